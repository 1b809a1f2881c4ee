"""What an all-reduce costs by size: the measured points, the model's line, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbeat.model import Network
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import COLOURS, Drawing, axis, curve, dots, drawn, ms
from backbeat.units import format_bytes, format_seconds

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


def draw_cost_curve(data: CostCurve) -> Drawing:
    def shown(points: Sequence[tuple[float, float]]) -> list[list[str]]:
        return [[format_bytes(size), format_seconds(seconds)] for size, seconds in points]

    traces = [
        curve(
            f"{workers} workers{'' if workers == data.measured_workers else ', computed'}",
            sizes,
            ms(seconds),
            colour,
            mode="lines",
            customdata=shown(list(zip(sizes, seconds, strict=True))),
            hovertemplate="%{customdata[0]} on %{fullData.name}: %{customdata[1]}<extra></extra>",
        )
        for (workers, sizes, seconds), colour in zip(data.lines, COLOURS[1:], strict=False)
    ]
    xaxis = axis("bytes in one all-reduce", type="log", exponentformat="SI")
    yaxis = axis("milliseconds", type="log")
    if not data.points:
        return drawn(traces, xaxis=xaxis, yaxis=yaxis, height=400)
    sizes = [size for size, _ in data.points]
    traces += [
        dots(
            f"measured on {data.measured_workers}",
            sizes,
            ms([seconds for _, seconds in data.points]),
            {"color": canvas.ORANGE, "size": 8, "symbol": "circle-open", "line": {"width": 2}},
            customdata=shown(data.points),
            hovertemplate="%{customdata[0]}: measured %{customdata[1]}<extra></extra>",
        ),
        {
            "type": "bar",
            "name": "straight line against measured",
            "x": sizes,
            "y": [100 * residual for residual in data.residuals],
            "marker": {"color": canvas.GREY},
            "yaxis": "y2",
            "hovertemplate": "straight line %{y:+.1f} % of measured<extra></extra>",
        },
    ]
    return drawn(
        traces,
        xaxis={**xaxis, "anchor": "y2"},
        yaxis={**yaxis, "domain": [0.4, 1]},
        yaxis2=axis("residual", domain=[0, 0.3], ticksuffix=" %"),
        height=520,
    )
