"""What a prediction starts from: how large the gradients are and when backward finishes them, and what an all-reduce
costs by size, as measured and as modelled."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbeat.model import Gradient, Network, Profile
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, Drawing, axis, curve, dots, drawn, mark, ms, upright
from backbeat.show.figures.timeline import Timeline
from backbeat.units import format_bytes, format_seconds

MOST_POINTS = 1500
_SMALLEST, _LARGEST, _SAMPLES = 2**10, 2**30, 61


def largest_gradients(profile: Profile, most: int = MOST_POINTS) -> list[Gradient]:
    """Those that are drawn, in ready order; the smallest are only counted in the sums."""
    largest = np.sort(np.argsort(-profile.sizes, kind="stable")[:most])
    return [profile.gradients[index] for index in largest.tolist()]


def bytes_ready(profile: Profile, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """(seconds from the start of backward, bytes whose gradients are ready then)."""
    count = len(profile.gradients)
    stairs = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    sums = np.cumsum(profile.sizes)[stairs]
    return [(0.0, 0.0), *zip(profile.ready[stairs].tolist(), sums.tolist(), strict=True)]


def bytes_arrived(sent: Timeline) -> list[tuple[float, float]]:
    """The same for bytes whose bucket has arrived, under this timeline; empty where it shows none."""
    begins = [bar.start_s for bar in sent.compute if bar.name == "backward"]
    bars = sorted((bar for bar in sent.transfers if bar.name != "buffers"), key=lambda bar: bar.end_s)
    if not begins or not bars:
        return []
    sums = np.cumsum([float(bar.bytes) for bar in bars]).tolist()
    return [(0.0, 0.0), *((bar.end_s - begins[-1], total) for bar, total in zip(bars, sums, strict=True))]


def draw_gradient_sizes(profile: Profile, sent: Timeline) -> Drawing:
    """`sent` is the iteration whose buckets say when bytes have arrived."""
    largest = largest_gradients(profile)

    def bytes_over_time(name: str, points: Sequence[tuple[float, float]], colour: str, did: str) -> Drawing:
        seconds, sizes = zip(*points, strict=True)
        stroke = {"color": colour, "width": 2, "shape": "hv"}
        hover = f"%{{y:.3s}}B {did} after %{{x:.1f}} ms<extra></extra>"
        return curve(name, ms(seconds), sizes, colour, mode="lines", line=stroke, yaxis="y2", hovertemplate=hover)

    traces = [
        dots(
            "one gradient",
            ms([one.ready_s for one in largest]),
            [one.bytes for one in largest],
            {"color": canvas.BLUE, "size": 6, "opacity": 0.7},
            customdata=[
                [html.escape(one.name), format_bytes(one.bytes), format_seconds(one.ready_s)] for one in largest
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}, ready after %{customdata[2]}<extra></extra>",
        ),
        bytes_over_time("bytes ready", bytes_ready(profile), canvas.ORANGE, "ready"),
    ]
    if arrived := bytes_arrived(sent):
        name = f"bytes arrived with {html.escape(sent.label)}"
        traces.append(bytes_over_time(name, arrived, canvas.GREEN, "arrived"))
    return drawn(
        traces,
        xaxis=axis("milliseconds from the start of backward", anchor="y2"),
        yaxis=axis("bytes each", type="log", domain=[0.54, 1], exponentformat="SI"),
        yaxis2=axis("bytes in all", domain=[0, 0.46], exponentformat="SI"),
        height=520,
        shapes=[upright(profile.backward_s * 1e3)],
        annotations=[mark(profile.backward_s * 1e3, "backward ends")],
    )


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
    base = network.as_measured
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
            f"{workers} GPUs{'' if workers == data.measured_workers else ', computed'}",
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
            f"points of the network's file, {data.measured_workers} GPUs",
            sizes,
            ms([seconds for _, seconds in data.points]),
            {"color": canvas.ORANGE, "size": 8, "symbol": "circle-open", "line": {"width": 2}},
            customdata=shown(data.points),
            hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
        ),
        {
            "type": "bar",
            "name": "straight line against these points",
            "x": sizes,
            "y": [100 * residual for residual in data.residuals],
            # In proportion to the bytes, so that all look as wide on their axis.
            "width": [0.3 * size for size in sizes],
            "marker": {"color": canvas.GREY},
            "yaxis": "y2",
            "hovertemplate": "straight line %{y:+.1f} %<extra></extra>",
        },
    ]
    return drawn(
        traces,
        xaxis={**xaxis, "anchor": "y2"},
        yaxis={**yaxis, "domain": [0.4, 1]},
        yaxis2=axis("residual", domain=[0, 0.3], ticksuffix=" %"),
        height=520,
    )
