"""How large the gradients are, when backward finishes them, and how their bytes pile up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backbeat.model import Gradient, Profile
from backbeat.report.figures.timeline import Timeline

MOST_POINTS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSizes:
    drawn: tuple[Gradient, ...]
    """The largest, in ready order; the smallest are only counted in the sums."""
    left_out: int
    left_out_bytes: int
    ready: tuple[tuple[float, float], ...]
    """(seconds from the start of backward, bytes whose gradients are ready then)."""
    sent: tuple[tuple[float, float], ...]
    """The same for bytes whose bucket has arrived, under the timeline that was given; empty without one."""
    sent_label: str
    backward_s: float


def gradient_sizes(profile: Profile, sent: Timeline | None = None, *, most: int = MOST_POINTS) -> GradientSizes:
    """`sent` adds when the bytes have arrived."""
    count, sums = len(profile.gradients), np.cumsum(profile.sizes)
    largest = np.sort(np.argsort(-profile.sizes, kind="stable")[:most])
    drawn = tuple(profile.gradients[index] for index in largest.tolist())
    stairs = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    return GradientSizes(
        drawn=drawn,
        left_out=count - len(drawn),
        left_out_bytes=profile.total_bytes - sum(gradient.bytes for gradient in drawn),
        ready=((0.0, 0.0), *zip(profile.ready[stairs].tolist(), sums[stairs].tolist(), strict=True)),
        sent=_arrivals(sent) if sent else (),
        sent_label=sent.label if sent else "",
        backward_s=profile.backward_s,
    )


def _arrivals(sent: Timeline) -> tuple[tuple[float, float], ...]:
    begins = [bar.start_s for bar in sent.compute if bar.name == "backward"]
    bars = sorted((bar for bar in sent.transfers if bar.name != "buffers"), key=lambda bar: bar.end_s)
    if not begins or not bars:
        return ()
    sums = np.cumsum([float(bar.bytes) for bar in bars]).tolist()
    return ((0.0, 0.0), *((bar.end_s - begins[-1], total) for bar, total in zip(bars, sums, strict=True)))
