"""Strategies side by side: where their exposed time comes from, time and memory of the ways to hold a model, and
iterations predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.report.measured import Measured
from backbeat.report.ways import Way, chosen_way

PARTS = {
    "bandwidth": "the link is too slow for the bytes",
    "latency": "latency of messages",
    "waiting": "held back by late gradients",
    "stragglers": "waiting for the slowest worker",
    "buffers": "broadcasting buffers",
    "contention": "computation slowed down by communication",
    "gather": "gathering updated parameters",
    "copies": "copying into and out of collectives' buffers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    single_s: float
    labels: tuple[str, ...]
    parts: Mapping[str, tuple[float, ...]]
    """Seconds of each part, one for each label. Parts that are nowhere present are left out."""
    totals: tuple[float, ...]


def exposed(predictions: Mapping[str, Prediction]) -> Exposed:
    rows = list(predictions.values())
    parts = {name: tuple(float(getattr(row.breakdown, f"{name}_s")) for row in rows) for name in PARTS}
    return Exposed(
        single_s=rows[0].single_s,
        labels=tuple(predictions),
        parts={name: values for name, values in parts.items() if any(value > 0 for value in values)},
        totals=tuple(row.exposed_s for row in rows),
    )


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
