"""Predicted against measured iterations, one row for each plan that has both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.report.measured import Measured


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
