"""One prediction in numbers as people write them, the fastest of several, and what they are predictions of."""

from __future__ import annotations

from collections.abc import Sequence

from backbeat.model import Network, Prediction, Profile
from backbeat.model.files import Source
from backbeat.units import format_bytes, format_seconds

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


def work_range(prediction: Prediction) -> tuple[str, str]:
    """How many GPUs' work it does, on a busy cluster and on a quiet one; the same twice without a band."""
    low, high = (format_number(prediction.workers * share) for share in load_range(prediction))
    return low, high


def format_number(value: float) -> str:
    """
    >>> format_number(1234.5), format_number(12.34), format_number(1.234)
    ('1,234', '12.3', '1.23')
    """
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


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
    return text if network is None else f"{text}; network {named(network)}{_nodes(network)}"


def _nodes(network: Network) -> str:
    if network.one_node:
        return ""
    gpus = network.topology.gpus_per_node
    return ", one GPU a node" if gpus == 1 else f", {gpus} GPUs a node"


def named(network: Network) -> str:
    """A network's name with its origin: what was never measured must not read as if it had been."""
    name = f"{network.name} ({network.source.method})" if isinstance(network.source, Source) else network.name
    return f"{name}, inside one node" if network.one_node else name
