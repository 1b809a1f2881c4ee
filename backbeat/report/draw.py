"""Each figure's structure as a plotly drawing; timelines have a module of their own.

Names come from files: plotly reads tags in text, so every name is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from backbeat.report import canvas
from backbeat.report.canvas import COLOURS, Drawing, axis, bar, curve, dots, drawn, mark, ms, translucent, upright
from backbeat.report.figures import Compared, CostCurve, Exposed, GradientSizes, MemoryUse, Scaling, ScalingLine
from backbeat.report.figures.exposed import PARTS
from backbeat.report.tables import format_number
from backbeat.units import format_bytes, format_seconds

PART_COLOURS = {
    "bandwidth": canvas.BLUE,
    "latency": canvas.ORANGE,
    "waiting": canvas.PURPLE,
    "stragglers": canvas.GREY,
    "buffers": canvas.GREEN,
    "contention": canvas.ROSE,
    "gather": "#9a8b2f",
    "copies": "#4f7f8b",
    "host": "#5aa9c9",
}


def scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    throughput = view == "throughput"
    traces: list[Drawing] = []
    scale = axis("share of perfect scaling", ticksuffix=" %", range=list(data.range_percent))
    if throughput:
        scale = axis("samples a second", type="log")
        perfect = [count * data.alone_per_s for count in data.counts]
        stroke = {"color": canvas.GREY, "width": 2.5, "dash": "dot"}
        traces.append(curve("perfect", data.counts, perfect, canvas.GREY, line=stroke, hoverinfo="skip"))
    for index, line in enumerate(data.lines):
        colour = COLOURS[index % len(COLOURS)]
        values = [point.samples_per_s if throughput else 100 * point.scaling_factor for point in line.points]
        best = line is data.best
        if best and len(line.band) > 1:
            traces.append(_band(line, colour, data.alone_per_s if throughput else None))
        traces.append(
            curve(
                html.escape(line.label),
                line.workers,
                values,
                colour,
                customdata=[
                    [
                        format_seconds(point.iteration_s),
                        f"{point.scaling_factor:.1%}",
                        format_number(point.samples_per_s),
                        point.bottleneck,
                        " (extrapolated)" if point.extrapolated else "",
                    ]
                    for point in line.points
                ],
                hovertemplate="<b>%{fullData.name}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect "
                "scaling<br>%{customdata[0]} per iteration<br>%{customdata[2]} samples/s<br>limited by "
                "%{customdata[3]}<extra></extra>",
            )
        )
        if best and line.knee in line.workers:
            traces.append(_knee(line.knee, values[line.workers.index(line.knee)], colour))
    ticks = [str(count) for count in data.counts]
    return drawn(traces, xaxis=axis("GPUs", type="log", tickvals=data.counts, ticktext=ticks), yaxis=scale, height=420)


def exposed(data: Exposed) -> Drawing:
    labels = [html.escape(label) for label in data.labels]
    hover = "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>"
    traces = [
        bar(
            PARTS[part],
            labels,
            ms(values),
            PART_COLOURS[part],
            customdata=[format_seconds(seconds) for seconds in values],
            hovertemplate=hover,
        )
        for part, values in data.parts.items()
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds added to each iteration", rangemode="tozero"),
        yaxis={"type": "category", "autorange": "reversed"},
        height=190 + 34 * len(labels),
    )


def gradient_sizes(data: GradientSizes) -> Drawing:
    def bytes_over_time(name: str, points: Sequence[tuple[float, float]], colour: str, did: str) -> Drawing:
        seconds, sizes = zip(*points, strict=True)
        stroke = {"color": colour, "width": 2, "shape": "hv"}
        hover = f"%{{y:.3s}}B {did} after %{{x:.1f}} ms<extra></extra>"
        return curve(name, ms(seconds), sizes, colour, mode="lines", line=stroke, yaxis="y2", hovertemplate=hover)

    traces = [
        dots(
            "one gradient",
            ms([one.ready_s for one in data.drawn]),
            [one.bytes for one in data.drawn],
            {"color": canvas.BLUE, "size": 6, "opacity": 0.7},
            customdata=[
                [html.escape(one.name), format_bytes(one.bytes), format_seconds(one.ready_s)] for one in data.drawn
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}, ready after %{customdata[2]}<extra></extra>",
        ),
        bytes_over_time("bytes ready", data.ready, canvas.ORANGE, "ready"),
    ]
    if data.sent:
        name = f"bytes arrived with {html.escape(data.sent_label)}"
        traces.append(bytes_over_time(name, data.sent, canvas.GREEN, "arrived"))
    return drawn(
        traces,
        xaxis=axis("milliseconds from the start of backward", anchor="y2"),
        yaxis=axis("bytes each", type="log", domain=[0.54, 1], exponentformat="SI"),
        yaxis2=axis("bytes in all", domain=[0, 0.46], exponentformat="SI"),
        height=520,
        shapes=[upright(data.backward_s * 1e3)],
        annotations=[mark(data.backward_s * 1e3, "backward ends")],
    )


def cost_curve(data: CostCurve) -> Drawing:
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


def memory_use(data: MemoryUse) -> Drawing:
    hover = "<b>%{fullData.name}</b>: %{customdata}<extra></extra>"
    traces = [
        bar(kind, ["one worker"], [size / 1e9], colour, customdata=[format_bytes(size)], hovertemplate=hover)
        for (kind, size), colour in zip(data.kinds, COLOURS[1:], strict=False)
    ]
    marks = [(data.peak_bytes, "peak")]
    if data.budget_bytes is not None:
        marks.append((data.budget_bytes, "budget"))
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("GB", rangemode="tozero"),
        yaxis={"type": "category"},
        height=250,
        margin={"l": 64, "r": 24, "t": 72, "b": 56},
        legend={"orientation": "h", "x": 0, "y": 1.25, "yanchor": "bottom", "traceorder": "normal"},
        shapes=[upright(size / 1e9) for size, _ in marks],
        annotations=[mark(size / 1e9, f"{word} {format_bytes(size)}") for size, word in marks],
    )


def measured(rows: Sequence[Compared]) -> Drawing:
    labels = [html.escape(row.label) for row in rows]
    common: Drawing = {
        "customdata": [
            [format_seconds(row.predicted_s), format_seconds(row.measured_s), f"{row.error:+.1%}"] for row in rows
        ],
        "hovertemplate": "<b>%{y}</b><br>measured %{customdata[1]}<br>predicted %{customdata[0]} "
        "(%{customdata[2]})<extra></extra>",
    }
    spread = {
        "type": "data",
        "symmetric": False,
        "array": ms([row.high_s - row.measured_s for row in rows]),
        "arrayminus": ms([row.measured_s - row.low_s for row in rows]),
        "color": canvas.ORANGE,
    }
    seen, said = ms([row.measured_s for row in rows]), ms([row.predicted_s for row in rows])
    dot = {"color": canvas.ORANGE, "size": 11}
    tick = {"color": canvas.BLUE, "size": 13, "symbol": "line-ns-open", "line": {"width": 3}}
    return drawn(
        [
            dots("measured, 10th to 90th percentile", seen, labels, dot, error_x=spread, **common),
            dots("predicted", said, labels, tick, **common),
        ],
        xaxis=axis("milliseconds per iteration", rangemode="tozero"),
        yaxis={"type": "category", "autorange": "reversed"},
        height=190 + 32 * len(rows),
    )


def _band(line: ScalingLine, colour: str, alone_per_s: float | None) -> Drawing:
    """The band as one closed outline: a busy to a quiet cluster, or slow and fast iterations."""
    outline = [(count, fast) for count, _, fast in line.band] + [(count, slow) for count, slow, _ in line.band[::-1]]
    return {
        "type": "scatter",
        "name": f"{html.escape(line.label)}: "
        + ("busy to quiet cluster" if line.load_band else "10th to 90th percentile"),
        "x": [count for count, _ in outline],
        "y": [100 * share if alone_per_s is None else share * count * alone_per_s for count, share in outline],
        "fill": "toself",
        "fillcolor": translucent(colour, 0.18),
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
    }


def _knee(workers: int, value: float, colour: str) -> Drawing:
    return dots(
        "knee",
        [workers],
        [value],
        {"symbol": "diamond", "size": 12, "color": colour, "line": {"width": 2, "color": "#fff"}},
        mode="markers+text",
        text=["knee"],
        textposition="top right",
        hovertemplate="knee: beyond %{x} GPUs an added one brings less than half of its own work<extra></extra>",
        showlegend=False,
    )
