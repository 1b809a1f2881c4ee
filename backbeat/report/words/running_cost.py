"""A prediction in the units people count in: tokens, utilisation and money."""

from __future__ import annotations

from backbeat.cost.accelerators import accelerator
from backbeat.model import Prediction, Profile
from backbeat.report.words.numbers import gpu_hours
from backbeat.units import format_seconds


def tokens_per_s(prediction: Prediction, profile: Profile) -> float | None:
    """Of the whole job; None where samples are no sequences, or of a length that the profile does not say."""
    return None if profile.sequence_length is None else prediction.samples_per_s * profile.sequence_length


def utilisation(prediction: Prediction, profile: Profile) -> float | str:
    """Model FLOPs utilisation (MFU): the share of the device's peak that forward and backward reach; or why not."""
    if profile.flops_per_sample is None:
        return "the profile has no FLOPs"
    device = accelerator(profile.device)
    peak = device.peak_flops(profile.precision) if device is not None else None
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


def units_line(
    prediction: Prediction, profile: Profile, *, price: float | None = None, epoch_samples: int | None = None
) -> str:
    """Speed, utilisation and money of one prediction, in one sentence."""
    tokens = tokens_per_s(prediction, profile)
    rate = f"{format_count(prediction.samples_per_s)} samples/s"
    if tokens is not None:
        rate = f"{format_count(tokens)} tokens/s"
    share = utilisation(prediction, profile)
    band = prediction.network_band
    reach = f" ({format_seconds(band.shortest_s)} to {format_seconds(band.longest_s)})" if band is not None else ""
    parts = [f"{format_seconds(prediction.iteration_s)} a step{reach}", rate]
    if price is not None:
        prices = costs(prediction, profile, price, epoch_samples)
        parts.extend(f"{format_money(money)} per {name}" for name, money in prices.items())
    parts.append(f"MFU {share:.1%}" if isinstance(share, float) else f"no MFU ({share})")
    return ", ".join(parts)


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
