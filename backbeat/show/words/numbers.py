"""One prediction in numbers as people write them: scaling, tokens, utilisation and money; the fastest of several, and
what they are predictions of."""

from __future__ import annotations

from collections.abc import Sequence

from backbeat.model import Network, Prediction, Profile
from backbeat.model.accelerator import accelerator
from backbeat.model.files import Source
from backbeat.model.prediction import GapParts
from backbeat.show.words.commands import Settings
from backbeat.units import counted, format_bytes, format_seconds

_WORTH_TELLING = 1e-3
"""Of the bound: a cause of what an iteration takes above it."""
SAME = 5e-4
"""Two times closer than this share are called equal: they print alike, and no measurement tells them apart."""


def gpu_hours(prediction: Prediction, samples: float) -> float:
    """Worker-hours to train on this many samples."""
    if prediction.samples_per_s <= 0:
        return float("inf")
    return samples / prediction.samples_per_s * prediction.workers / 3600


def over_bound(prediction: Prediction) -> float:
    """The gap to the bound; rounding may put a plan that meets it a hair below."""
    return max(prediction.gap, 0.0)


def gap_line(prediction: Prediction, parts: GapParts) -> str:
    """How far it is above its bound, and by what: the largest cause first, none below a tenth of a percent.

    >>> from types import SimpleNamespace
    >>> gap_line(SimpleNamespace(gap=0.12, bound_s=1.0, communicators=1), GapParts(0.02, 0.07, 0.03, 0.0))
    '12% above its bound: contention 7%, one communicator 3%, host 2%'
    """
    what = "buckets" if prediction.communicators == 1 else "buckets and communicators"
    lanes = "one communicator" if prediction.communicators == 1 else f"{prediction.communicators} communicators"
    named = {lanes: parts.communicators_s, "contention": parts.contention_s, "host": parts.host_s, what: parts.plan_s}
    shares = sorted(((seconds / (prediction.bound_s or 1.0), name) for name, seconds in named.items()), reverse=True)
    told = [f"{name} {_percent(share)}" for share, name in shares if share >= _WORTH_TELLING]
    return f"{_percent(prediction.gap)} above its bound" + (f": {', '.join(told)}" if told else "")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def load_range(prediction: Prediction) -> tuple[float, float]:
    """Scaling on a busy cluster and on a quiet one; the same twice where the network has no band."""
    band = prediction.network_band
    if band is None:
        return prediction.scaling_factor, prediction.scaling_factor
    return band.busy_scaling_factor, band.quiet_scaling_factor


def scaling_range(prediction: Prediction, digits: int = 0) -> str:
    """Scaling from a busy cluster to a quiet one; empty where the network has no band, or it does not show."""
    low, high = (f"{100 * share:.{digits}f}" for share in load_range(prediction))
    return f"{low}–{high}%" if low != high else ""


def tokens_per_s(prediction: Prediction, profile: Profile) -> float | None:
    """Of the whole job; None where samples are no sequences, or of a length that the profile does not say."""
    return None if profile.sequence_length is None else prediction.samples_per_s * profile.sequence_length


def utilisation(prediction: Prediction, profile: Profile) -> float | str:
    """Model FLOPs utilisation (MFU): the share of the device's peak that forward and backward reach; or why not."""
    if profile.flops_per_sample is None:
        return "the profile has no FLOPs"
    device = accelerator(profile.device)
    peak = device.rate(profile.precision) if device is not None else None
    if peak is None:
        return f"no peak rate is known of {profile.device} in {profile.precision}"
    return profile.flops_per_sample * prediction.samples_per_s / prediction.workers / peak


def unit(profile: Profile) -> str:
    return "samples" if profile.sequence_length is None else "tokens"


def per_billion(prediction: Prediction, profile: Profile, price: float) -> float:
    """Money for a billion tokens, or samples where these are no sequences."""
    return price * gpu_hours(prediction, 10**9 / (profile.sequence_length or 1))


def costs(prediction: Prediction, profile: Profile, price: float, epoch_samples: int | None) -> dict[str, float]:
    """Every price of the run by what it is for, at `price` for one GPU-hour."""
    found = {
        "step": price * prediction.workers * prediction.iteration_s / 3600,
        f"billion {unit(profile)}": per_billion(prediction, profile, price),
    }
    if epoch_samples is not None:
        found["epoch"] = price * gpu_hours(prediction, epoch_samples)
    return found


def figures_line(row: Prediction, profile: Profile, settings: Settings, which: str) -> str:
    """Speed, utilisation and money of one prediction, in one sentence; `which` says of which."""
    band = row.network_band
    tokens, share = tokens_per_s(row, profile), utilisation(row, profile)
    reach = ""
    if band is not None:
        times = f"{format_seconds(band.shortest_s)} to {format_seconds(band.longest_s)}"
        reach = f" ({times}: a quiet to a busy cluster, and {band.margin:.0%} either side)"
    rate = f"{format_count(row.samples_per_s)} samples/s" if tokens is None else f"{format_count(tokens)} tokens/s"
    parts = [f"{format_seconds(row.iteration_s)} a step{reach}", rate]
    if settings.price is not None:
        prices = costs(row, profile, settings.price, settings.epoch_samples)
        parts += [f"{format_money(money)} per {name}" for name, money in prices.items()]
    parts.append(f"MFU {share:.1%}" if isinstance(share, float) else f"no MFU ({share})")
    return f"At {counted(row.workers, 'GPU')}{which}: {', '.join(parts)}."


def format_number(value: float) -> str:
    """
    >>> format_number(1234.5), format_number(12.34), format_number(1.234)
    ('1,234', '12.3', '1.23')
    """
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def format_count(value: float) -> str:
    """
    >>> format_count(73_200_000), format_count(1136), format_count(39.2)
    ('73.2M', '1,136', '39.2')
    """
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:#.3g}".rstrip(".") + letter
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}".rstrip(".")


def format_money(value: float) -> str:
    """
    >>> format_money(1234.5), format_money(7.961), format_money(0.00421)
    ('$1,234', '$7.96', '$0.00421')
    """
    if value >= 100:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.995 else f"${value:.3g}"


def fastest(predictions: Sequence[Prediction]) -> dict[int, Prediction]:
    """The best prediction for each number of workers; the first listed of those that nobody could tell apart."""
    least: dict[int, float] = {}
    for one in predictions:
        least[one.workers] = min(one.iteration_s, least.get(one.workers, one.iteration_s))
    best: dict[int, Prediction] = {}
    for one in predictions:
        if one.iteration_s <= least[one.workers] * (1 + SAME):
            best.setdefault(one.workers, one)
    return best


def describe(
    profile: Profile,
    network: Network | None = None,
    *,
    accumulation: int | None = None,
    reduce_dtype: str | None = None,
    global_batch: int | None = None,
) -> str:
    """One line on what is being predicted."""
    device = profile.device.removesuffix(f" ({profile.origin})")
    micro_batches = accumulation or profile.accumulation
    tokens = "" if profile.sequence_length is None else f" of {profile.sequence_length} tokens"
    batch, scaling = f"batch {profile.batch_size}{tokens} per GPU", "weak"
    alone_s = micro_batches * (profile.forward_s + profile.backward_s) + profile.update_s
    alone = f"{format_seconds(alone_s)} per iteration alone, "
    if global_batch is not None:
        batch, scaling, alone = f"global batch {global_batch}{tokens} shared by the workers", "strong", ""
    if micro_batches > 1:
        batch += f", {micro_batches} micro-batches a step"
    kind = f" ({scaling} scaling)" if network is not None else ""
    sent = f" sent as {reduce_dtype}" if reduce_dtype is not None else ""
    text = (
        f"{profile.model}, {batch}{kind}, {profile.precision} on {device} ({profile.origin}): {alone}"
        f"{len(profile.gradients)} gradients, {format_bytes(profile.total_bytes)}{sent}"
    )
    return text if network is None else f"{text}; network {_named(network)}"


def _named(network: Network) -> str:
    """Its name with its origin, for what was never measured must not read as if it had been; and the GPUs of a node."""
    name = f"{network.name} ({network.source.method})" if isinstance(network.source, Source) else network.name
    if network.one_node:
        return f"{name}, inside one node"
    gpus = network.topology.gpus_per_node
    return f"{name}, one GPU a node" if gpus == 1 else f"{name}, {gpus} GPUs a node"


def lowered(sentence: str) -> str:
    """To go on a sentence."""
    return sentence[:1].lower() + sentence[1:]


def capitalised(words: str) -> str:
    """To begin a sentence; other letters stay as they are."""
    return words[:1].upper() + words[1:]
