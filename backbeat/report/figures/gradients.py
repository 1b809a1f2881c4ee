"""How large the gradients are, when backward finishes them, and how their bytes pile up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbeat.model import Profile
from backbeat.report.figures.timeline import Timeline

MOST_POINTS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSizes:
    names: tuple[str, ...]
    bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    count: int
    left_out: int
    """Smallest gradients that are not drawn, though counted in the sums."""
    left_out_bytes: int
    ready_at_s: tuple[float, ...]
    ready_bytes: tuple[float, ...]
    """Bytes whose gradients are ready, over time from the start of backward."""
    sent_at_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    """Bytes whose bucket has arrived, under the timeline that was given; empty without one."""
    sent_label: str
    backward_s: float


def gradient_sizes(profile: Profile, sent: Timeline | None = None, *, most: int = MOST_POINTS) -> GradientSizes:
    """`sent` adds when the bytes have arrived."""
    sizes, ready = profile.sizes, profile.ready
    order = np.sort(np.argsort(-sizes, kind="stable")[:most])
    kept = [profile.gradients[place] for place in order.tolist()]
    stairs = list(_thinned(len(sizes), most))
    sums = np.cumsum(sizes)
    arrived_at, arrived = _arrivals(profile, sent)
    return GradientSizes(
        names=tuple(gradient.name for gradient in kept),
        bytes=tuple(gradient.bytes for gradient in kept),
        ready_s=tuple(gradient.ready_s for gradient in kept),
        count=len(sizes),
        left_out=len(sizes) - len(kept),
        left_out_bytes=profile.total_bytes - sum(gradient.bytes for gradient in kept),
        ready_at_s=(0.0, *ready[stairs].tolist()),
        ready_bytes=(0.0, *sums[stairs].tolist()),
        sent_at_s=arrived_at,
        sent_bytes=arrived,
        sent_label=sent.label if sent else "",
        backward_s=profile.backward_s,
    )


def _arrivals(profile: Profile, sent: Timeline | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if sent is None:
        return (), ()
    begins = [bar.start_s for bar in sent.compute if bar.name == "backward"]
    bars = sorted((bar for bar in sent.transfers if bar.name != "buffers"), key=lambda bar: bar.end_s)
    if not begins or not bars:
        return (), ()
    moments = [bar.end_s - begins[-1] for bar in bars]
    sums = np.cumsum([float(bar.bytes) for bar in bars]).tolist()
    return (0.0, *moments), (0.0, *sums)


def _thinned(count: int, most: int) -> Sequence[int]:
    if count <= most:
        return range(count)
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
