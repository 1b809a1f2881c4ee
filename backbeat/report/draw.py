"""Thin drawings: each figure's structure as a plotly figure, in plain dictionaries.

Nothing here imports plotly; `figure` turns a drawing into its own object for notebooks. Colours of paper, text and grid
are left to whoever shows it, so that one drawing serves light and dark pages. Names come from files: plotly reads tags
in text, so every name is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from backbeat.report.canvas import COLOURS, COMPUTE, Drawing, axes, curve, figure, mark, rgb, shade, upright
from backbeat.report.draw_timeline import timeline, timeline_parts
from backbeat.report.figures import Compared, CostCurve, Exposed, GradientSizes, MemoryUse, Scaling, ScalingLine
from backbeat.report.figures.exposed import PARTS
from backbeat.units import format_bytes, format_seconds

__all__ = [
    "COLOURS",
    "Drawing",
    "cost_curve",
    "exposed",
    "figure",
    "gradient_sizes",
    "measured",
    "memory_use",
    "scaling",
    "shade",
    "timeline",
    "timeline_parts",
]

PART_COLOURS = {
    "bandwidth": "#2f81c7",
    "latency": "#d9822b",
    "waiting": "#a35bb5",
    "stragglers": "#7d8590",
    "buffers": "#17926b",
}
_ARRIVED = "#17926b"


def scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    traces: list[Drawing] = []
    best = data.best
    throughput = view == "throughput"
    if throughput:
        perfect = [count * data.alone_per_s for count in data.counts]
        traces.append(curve("perfect", data.counts, perfect, COMPUTE, dash="dot", hoverinfo="skip"))
    for place, line in enumerate(data.lines):
        colour = COLOURS[place % len(COLOURS)]
        values = line.samples_per_s if throughput else [100 * share for share in line.scaling]
        if line is best:
            traces += _band(line, colour, data.alone_per_s if throughput else None)
        rows = [
            [format_seconds(seconds), f"{share:.1%}", f"{rate:,.0f}", limit, " (extrapolated)" if beyond else ""]
            for seconds, share, rate, limit, beyond in zip(
                line.iteration_s, line.scaling, line.samples_per_s, line.bottleneck, line.extrapolated, strict=True
            )
        ]
        traces.append(
            {
                **curve(html.escape(line.label), line.workers, values, colour),
                "customdata": rows,
                "hovertemplate": "<b>%{fullData.name}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect "
                "scaling<br>%{customdata[0]} per iteration<br>%{customdata[2]} samples/s<br>limited by "
                "%{customdata[3]}<extra></extra>",
            }
        )
        if line is best and line.knee in line.workers:
            traces.append(_knee(line.knee, values[line.workers.index(line.knee)], colour))
    top: Drawing = {"title": {"text": "samples a second"}, "type": "log"}
    if not throughput:
        top = {"title": {"text": "share of perfect scaling"}, "ticksuffix": " %", "range": list(data.range_percent)}
    return {
        "data": traces,
        "layout": axes(
            xaxis={
                "title": {"text": "GPUs"},
                "type": "log",
                "tickvals": data.counts,
                "ticktext": [str(count) for count in data.counts],
            },
            yaxis=top,
            height=420,
        ),
    }


def exposed(data: Exposed) -> Drawing:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PARTS[part],
            "y": [html.escape(label) for label in data.labels],
            "x": [seconds * 1e3 for seconds in values],
            "marker": {"color": PART_COLOURS[part]},
            "customdata": [format_seconds(seconds) for seconds in values],
            "hovertemplate": "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>",
        }
        for part, values in data.parts.items()
    ]
    return {
        "data": traces,
        "layout": axes(
            barmode="stack",
            xaxis={"title": {"text": "milliseconds added to each iteration"}, "rangemode": "tozero"},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
            height=190 + 34 * len(data.labels),
            hovermode="closest",
        ),
    }


def gradient_sizes(data: GradientSizes) -> Drawing:
    traces: list[Drawing] = [
        {
            "type": "scattergl" if len(data.names) > 4000 else "scatter",
            "mode": "markers",
            "name": "one gradient",
            "x": [seconds * 1e3 for seconds in data.ready_s],
            "y": list(data.bytes),
            "marker": {"color": "#2f81c7", "size": 6, "opacity": 0.7},
            "customdata": [
                [html.escape(name), format_bytes(size), format_seconds(ready)]
                for name, size, ready in zip(data.names, data.bytes, data.ready_s, strict=True)
            ],
            "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}, ready after %{customdata[2]}<extra></extra>",
        },
        {
            **curve("bytes ready", _ms(data.ready_at_s), data.ready_bytes, "#d9822b", mode="lines"),
            "line": {"color": "#d9822b", "width": 2, "shape": "hv"},
            "yaxis": "y2",
            "hovertemplate": "%{y:.3s}B ready after %{x:.1f} ms<extra></extra>",
        },
    ]
    if data.sent_at_s:
        traces.append(
            {
                **curve(
                    f"bytes arrived with {html.escape(data.sent_label)}", _ms(data.sent_at_s), data.sent_bytes, _ARRIVED
                ),
                "mode": "lines",
                "line": {"color": _ARRIVED, "width": 2, "shape": "hv"},
                "yaxis": "y2",
                "hovertemplate": "%{y:.3s}B arrived after %{x:.1f} ms<extra></extra>",
            }
        )
    return {
        "data": traces,
        "layout": axes(
            xaxis={"title": {"text": "milliseconds from the start of backward"}, "anchor": "y2"},
            yaxis={"title": {"text": "bytes each"}, "type": "log", "domain": [0.54, 1], "exponentformat": "SI"},
            yaxis2={"title": {"text": "bytes in all"}, "domain": [0, 0.46], "exponentformat": "SI"},
            height=520,
            hovermode="closest",
            shapes=[upright(data.backward_s * 1e3)],
            annotations=[mark(data.backward_s * 1e3, "backward ends")],
        ),
    }


def cost_curve(data: CostCurve) -> Drawing:
    traces: list[Drawing] = []
    for place, (workers, sizes, seconds) in enumerate(data.lines):
        how = "" if workers == data.measured_workers else ", computed"
        traces.append(
            {
                **curve(f"{workers} workers{how}", sizes, [one * 1e3 for one in seconds], COLOURS[1 + place]),
                "mode": "lines",
                "customdata": [
                    [format_bytes(size), format_seconds(one)] for size, one in zip(sizes, seconds, strict=True)
                ],
                "hovertemplate": "%{customdata[0]} on %{fullData.name}: %{customdata[1]}<extra></extra>",
            }
        )
    layout = axes(
        xaxis={"title": {"text": "bytes in one all-reduce"}, "type": "log", "exponentformat": "SI"},
        yaxis={"title": {"text": "milliseconds"}, "type": "log"},
        height=400,
        hovermode="closest",
    )
    if data.points:
        measured_sizes = [size for size, _ in data.points]
        traces += [
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"measured on {data.measured_workers}",
                "x": measured_sizes,
                "y": [seconds * 1e3 for _, seconds in data.points],
                "marker": {"color": "#d9822b", "size": 8, "symbol": "circle-open", "line": {"width": 2}},
                "customdata": [[format_bytes(size), format_seconds(seconds)] for size, seconds in data.points],
                "hovertemplate": "%{customdata[0]}: measured %{customdata[1]}<extra></extra>",
            },
            {
                "type": "bar",
                "name": "straight line against measured",
                "x": measured_sizes,
                "y": [100 * residual for residual in data.residuals],
                "marker": {"color": "#7d8590"},
                "yaxis": "y2",
                "hovertemplate": "straight line %{y:+.1f} % of measured<extra></extra>",
            },
        ]
        layout["xaxis"]["anchor"] = "y2"
        layout["yaxis"]["domain"] = [0.4, 1]
        layout["yaxis2"] = {"title": {"text": "residual"}, "domain": [0, 0.3], "ticksuffix": " %", "automargin": True}
        layout["height"] = 520
    return {"data": traces, "layout": layout}


def memory_use(data: MemoryUse) -> Drawing:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": ["one worker"],
            "x": [size / 1e9],
            "marker": {"color": COLOURS[(place + 1) % len(COLOURS)]},
            "customdata": [format_bytes(size)],
            "hovertemplate": "<b>%{fullData.name}</b>: %{customdata}<extra></extra>",
        }
        for place, (kind, size) in enumerate(data.kinds)
    ]
    marks = [(data.peak_bytes, "peak")]
    if data.budget_bytes is not None:
        marks.append((data.budget_bytes, "budget"))
    return {
        "data": traces,
        "layout": axes(
            barmode="stack",
            xaxis={"title": {"text": "GB"}, "rangemode": "tozero"},
            yaxis={"type": "category", "automargin": True},
            height=250,
            margin={"l": 64, "r": 24, "t": 72, "b": 56},
            legend={"orientation": "h", "x": 0, "y": 1.25, "yanchor": "bottom", "traceorder": "normal"},
            hovermode="closest",
            shapes=[upright(size / 1e9) for size, _ in marks],
            annotations=[mark(size / 1e9, f"{word} {format_bytes(size)}") for size, word in marks],
        ),
    }


def measured(rows: Sequence[Compared]) -> Drawing:
    names = [html.escape(row.label) for row in rows]
    texts = [[format_seconds(row.predicted_s), format_seconds(row.measured_s), f"{row.error:+.1%}"] for row in rows]
    common: Mapping[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "y": names,
        "customdata": texts,
        "hovertemplate": "<b>%{y}</b><br>measured %{customdata[1]}<br>predicted %{customdata[0]} "
        "(%{customdata[2]})<extra></extra>",
    }
    return {
        "data": [
            {
                **common,
                "name": "measured, 10th to 90th percentile",
                "x": [row.measured_s * 1e3 for row in rows],
                "marker": {"color": "#d9822b", "size": 11},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [(row.high_s - row.measured_s) * 1e3 for row in rows],
                    "arrayminus": [(row.measured_s - row.low_s) * 1e3 for row in rows],
                    "color": "#d9822b",
                },
            },
            {
                **common,
                "name": "predicted",
                "x": [row.predicted_s * 1e3 for row in rows],
                "marker": {"color": "#2f81c7", "size": 13, "symbol": "line-ns-open", "line": {"width": 3}},
            },
        ],
        "layout": axes(
            xaxis={"title": {"text": "milliseconds per iteration"}, "rangemode": "tozero"},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
            height=190 + 32 * len(rows),
            hovermode="closest",
        ),
    }


def _band(line: ScalingLine, colour: str, alone_per_s: float | None) -> list[Drawing]:
    """The band between slow and fast iterations, as one closed outline."""
    known = [(count, band) for count, band in zip(line.workers, line.band, strict=True) if band is not None]
    if len(known) < 2:
        return []

    def value(count: int, share: float) -> float:
        return 100 * share if alone_per_s is None else share * count * alone_per_s

    counts = [count for count, _ in known]
    upper = [value(count, band[1]) for count, band in known]
    lower = [value(count, band[0]) for count, band in known]
    return [
        {
            "type": "scatter",
            "name": f"{html.escape(line.label)}: 10th to 90th percentile",
            "x": [*counts, *counts[::-1]],
            "y": [*upper, *lower[::-1]],
            "fill": "toself",
            "fillcolor": f"rgba({','.join(map(str, rgb(colour)))},.18)",
            "line": {"width": 0},
            "mode": "lines",
            "hoverinfo": "skip",
        }
    ]


def _knee(workers: int, value: float, colour: str) -> Drawing:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "knee",
        "x": [workers],
        "y": [value],
        "text": ["knee"],
        "textposition": "top right",
        "marker": {"symbol": "diamond", "size": 12, "color": colour, "line": {"width": 2, "color": "#fff"}},
        "hovertemplate": "knee: beyond %{x} GPUs an added one brings less than half of its own work<extra></extra>",
        "showlegend": False,
    }


def _ms(seconds: Sequence[float]) -> list[float]:
    return [one * 1e3 for one in seconds]
