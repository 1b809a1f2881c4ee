"""How the job scales: one line per strategy over the number of workers, with the band and the knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.simulate.sweep import knee


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLine:
    """One strategy."""

    label: str
    workers: tuple[int, ...]
    scaling: tuple[float, ...]
    """T(1) / T(N), one for each number of workers."""
    band: tuple[tuple[float, float] | None, ...]
    """Scaling factors of a slow (p90) and of a fast (p10) iteration; None where the profile has no iteration times."""
    samples_per_s: tuple[float, ...]
    iteration_s: tuple[float, ...]
    bottleneck: tuple[str, ...]
    extrapolated: tuple[bool, ...]
    knee: int | None
    """Past this many workers an added one brings less than half of its own throughput; 1 where none of the curve pays,
    None where all of it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    lines: tuple[ScalingLine, ...]
    alone_per_s: float
    """Samples a second of one worker alone."""

    @property
    def best(self) -> ScalingLine:
        """The highest at its end. Only its band is drawn: several on top of each other say nothing."""
        return max(self.lines, key=lambda line: line.scaling[-1])

    @property
    def counts(self) -> list[int]:
        """Every number of workers, rising."""
        return sorted({count for line in self.lines for count in line.workers})

    @property
    def range_percent(self) -> tuple[float, float]:
        """Where an axis of shares starts and ends."""
        shares = [share for line in self.lines for share in line.scaling]
        return max(0, 10 * math.floor(10 * min(shares) - 1.5)), max(100, 100 * max(shares)) + 3


def scaling(curves: Mapping[str, Sequence[Prediction]]) -> Scaling:
    """Curves by label; the points of each are put in order of their workers."""
    lines = tuple(_line(label, sorted(curve, key=lambda point: point.workers)) for label, curve in curves.items())
    first = next(iter(curves.values()))[0]
    alone = first.samples_per_s / first.workers / first.scaling_factor if first.scaling_factor > 0 else 0.0
    return Scaling(lines=lines, alone_per_s=alone)


def _line(label: str, points: Sequence[Prediction]) -> ScalingLine:
    return ScalingLine(
        label=label,
        workers=tuple(point.workers for point in points),
        scaling=tuple(point.scaling_factor for point in points),
        band=tuple(_band(point) for point in points),
        samples_per_s=tuple(point.samples_per_s for point in points),
        iteration_s=tuple(point.iteration_s for point in points),
        bottleneck=tuple(point.bottleneck for point in points),
        extrapolated=tuple(point.extrapolated for point in points),
        knee=knee(points),
    )


def _band(point: Prediction) -> tuple[float, float] | None:
    if point.band is None or point.band.p10_s <= 0:
        return None
    return point.single_s / point.band.p90_s, point.single_s / point.band.p10_s
