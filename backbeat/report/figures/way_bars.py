"""The ways to hold a model side by side: time of an iteration, and peak memory against the device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.report.ways import Way, chosen_way


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBars:
    labels: tuple[str, ...]
    iteration_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    """Empty where nobody knows."""
    fits: tuple[bool, ...]
    chosen: int | None
    limit_bytes: int | None


def way_bars(ways: Sequence[Way]) -> WayBars:
    known = [way.fit for way in ways if way.fit is not None]
    taken = chosen_way(ways)
    return WayBars(
        labels=tuple(way.label for way in ways),
        iteration_s=tuple(way.prediction.iteration_s for way in ways),
        peak_bytes=tuple(fit.peak_bytes for fit in known) if len(known) == len(ways) else (),
        fits=tuple(way.fits for way in ways),
        chosen=None if taken is None else list(ways).index(taken),
        limit_bytes=known[0].device_bytes if known else None,
    )
