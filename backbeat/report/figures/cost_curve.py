"""What an all-reduce costs by size: the measured points, the model's line, and how far the two are apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backbeat.model import Network

_SMALLEST, _LARGEST, _SAMPLES = 2**10, 2**30, 61


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    measured_workers: int
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds) as measured; empty where the network is given by two numbers."""
    residuals: tuple[float, ...]
    """Straight line over measured, less one, for each point: how far latency plus bytes over bandwidth explains it."""
    latency_s: float
    bytes_per_s: float
    """Of the straight line: the rate at which an all-reduce of many bytes proceeds."""
    lines: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...]
    """(workers, sizes, seconds) as predictions use them: where it was measured, and where it is asked for."""


def cost_curve(network: Network, workers: int) -> CostCurve:
    base = network.at(workers=network.moved_from.workers) if network.moved_from else network
    curve = base.all_reduce.curve
    latency, per_byte = curve.line
    points = base.all_reduce.points or ()
    residuals = tuple((latency + per_byte * size) / seconds - 1 if seconds > 0 else 0.0 for size, seconds in points)
    low = min([_SMALLEST, *(size for size, _ in points if size > 0)])
    high = max([_LARGEST, *(size for size, _ in points)])
    sizes = np.geomspace(low, high, _SAMPLES)
    counts = [base.workers] if workers in (base.workers, 1) else [base.workers, workers]
    return CostCurve(
        measured_workers=base.workers,
        points=points,
        residuals=residuals,
        latency_s=latency,
        bytes_per_s=1 / per_byte if per_byte > 0 else float("inf"),
        lines=tuple(
            (count, tuple(sizes.tolist()), tuple(base.at(workers=count).all_reduce.curve.time(sizes).tolist()))
            for count in counts
        ),
    )
