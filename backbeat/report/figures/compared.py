"""Bars side by side: time and memory of the ways to hold a model, and iterations predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.report.measured import Measured
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    label: str
    workers: int
    iterations: int
    predicted_s: float
    measured_s: float
    """The median."""
    low_s: float
    high_s: float
    """The 10th and the 90th percentile; the median where single iterations were not kept."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def compared(rows: Sequence[Measured]) -> tuple[Compared, ...]:
    return tuple(
        Compared(
            label=row.label,
            workers=row.workers,
            iterations=row.iterations,
            predicted_s=row.predicted_s,
            measured_s=row.iteration_s,
            low_s=row.iteration_s if row.low_s is None else row.low_s,
            high_s=row.iteration_s if row.high_s is None else row.high_s,
        )
        for row in rows
        if row.predicted_s is not None and row.iteration_s
    )
