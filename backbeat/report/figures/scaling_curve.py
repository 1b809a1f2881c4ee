"""How the job scales: one line per strategy over the number of workers, with the band and the knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.report.tables import load_range
from backbeat.simulate.sweep import knee


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLine:
    """One strategy."""

    label: str
    points: tuple[Prediction, ...]
    """In order of their workers."""

    @property
    def workers(self) -> list[int]:
        return [point.workers for point in self.points]

    @property
    def band(self) -> list[tuple[int, float, float]]:
        """(workers, scaling at the lower edge, at the upper one): from a busy cluster to a quiet one where the network
        has a band; otherwise of a slow and a fast iteration, p90 and p10, where the profile has iteration times."""
        if self.load_band:
            return [(point.workers, *load_range(point)) for point in self.points]
        return [
            (point.workers, point.single_s / point.band.p90_s, point.single_s / point.band.p10_s)
            for point in self.points
            if point.band is not None and point.band.p10_s > 0
        ]

    @property
    def load_band(self) -> bool:
        """The band is the network's, not that of single iterations."""
        return any(point.network_band is not None for point in self.points)

    @property
    def knee(self) -> int | None:
        """Past this many workers an added one brings less than half of its own throughput; 1 where none of the curve
        pays, None where all of it does."""
        return knee(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    lines: tuple[ScalingLine, ...]
    alone_per_s: float
    """Samples a second of one worker alone."""

    @property
    def best(self) -> ScalingLine:
        """The highest at its end. Only its band is drawn: several on top of each other say nothing."""
        return max(self.lines, key=lambda line: line.points[-1].scaling_factor)

    @property
    def counts(self) -> list[int]:
        """Every number of workers, rising."""
        return sorted({count for line in self.lines for count in line.workers})

    @property
    def range_percent(self) -> tuple[float, float]:
        """Where an axis of shares starts and ends."""
        shares = [point.scaling_factor for line in self.lines for point in line.points]
        shares += [low for _, low, _ in self.best.band if self.best.load_band]
        return max(0, 10 * math.floor(10 * min(shares) - 1.5)), max(100, 100 * max(shares)) + 3


def scaling(curves: Mapping[str, Sequence[Prediction]]) -> Scaling:
    """Curves by label; the points of each are put in order of their workers."""
    lines = tuple(
        ScalingLine(label=label, points=tuple(sorted(curve, key=lambda point: point.workers)))
        for label, curve in curves.items()
    )
    first = next(iter(curves.values()))[0]
    alone = first.samples_per_s / first.workers / first.scaling_factor if first.scaling_factor > 0 else 0.0
    return Scaling(lines=lines, alone_per_s=alone)
