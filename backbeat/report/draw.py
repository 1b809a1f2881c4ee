"""Thin drawings: each figure's structure as a plotly figure, in plain dictionaries.

Nothing here imports plotly; `figure` turns a drawing into its own object for notebooks. Colours of paper, text and grid
are left to whoever shows it, so that one drawing serves light and dark pages. Names come from files: plotly reads tags
in text, so every name is escaped.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from backbeat.report.figures import CostCurve, Exposed, GradientSizes, MemoryUse, Scaling, Timeline
from backbeat.report.figures.exposed import PARTS
from backbeat.report.figures.timeline import Bar
from backbeat.units import format_bytes, format_seconds

Drawing = dict[str, Any]

COLOURS = ("#7d8590", "#2f81c7", "#d9822b", "#17926b", "#a35bb5", "#c94f6d", "#5aa9c9", "#9a8b2f")
"""Strategies in order; the first, stock DDP, is grey. All are readable on white and on near-black."""
PART_COLOURS = {
    "bandwidth": "#2f81c7",
    "startup": "#d9822b",
    "waiting": "#a35bb5",
    "stragglers": "#7d8590",
    "buffers": "#17926b",
}
_LABEL_WIDTH = 56
_COMPUTE = "#7d8590"
_ARRIVED = "#17926b"
_SIZES = ("#8fd0c4", "#3aa0b8", "#2f62a8", "#4a3d9e")
"""Small groups to large ones."""


def figure(drawing: Drawing) -> Any:
    """The drawing as a plotly figure."""
    from backbeat.errors import MissingPartError

    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingPartError("figures need plotly: pip install plotly") from None
    return go.Figure(drawing)


def scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    traces: list[Drawing] = []
    throughput = view == "throughput"
    if throughput:
        counts = sorted({count for line in data.lines for count in line.workers})
        perfect = [count * data.alone_per_s for count in counts]
        traces.append(_line("perfect", counts, perfect, _COMPUTE, dash="dot", hoverinfo="skip"))
    # Only the best of the bands is drawn: several on top of each other say nothing.
    widest = max(data.lines, key=lambda line: line.scaling[-1])
    for place, line in enumerate(data.lines):
        colour = COLOURS[place % len(COLOURS)]
        values = line.samples_per_s if throughput else [100 * share for share in line.scaling]
        if line is widest:
            traces += _band(line, colour, data.alone_per_s if throughput else None)
        rows = [
            [format_seconds(seconds), f"{share:.1%}", f"{rate:,.0f}", limit, " (extrapolated)" if beyond else ""]
            for seconds, share, rate, limit, beyond in zip(
                line.iteration_s, line.scaling, line.samples_per_s, line.bottleneck, line.extrapolated, strict=True
            )
        ]
        traces.append(
            {
                **_line(html.escape(line.label), line.workers, values, colour),
                "customdata": rows,
                "hovertemplate": "<b>%{fullData.name}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect "
                "scaling<br>%{customdata[0]} per iteration<br>%{customdata[2]} samples/s<br>limited by "
                "%{customdata[3]}<extra></extra>",
            }
        )
        if line is widest and line.knee is not None:
            traces.append(_knee(line.knee, values[line.workers.index(line.knee)], colour))
    counts = sorted({count for line in data.lines for count in line.workers})
    top: Drawing = {"title": {"text": "samples a second"}, "type": "log"}
    if not throughput:
        least = min(share for line in data.lines for share in line.scaling)
        floor = max(0, 10 * math.floor(10 * least - 1.5))
        top = {"title": {"text": "share of perfect scaling"}, "ticksuffix": " %", "range": [floor, 103]}
    return {
        "data": traces,
        "layout": _layout(
            xaxis={
                "title": {"text": "GPUs"},
                "type": "log",
                "tickvals": counts,
                "ticktext": [str(count) for count in counts],
            },
            yaxis=top,
            height=420,
        ),
    }


def timeline_parts(timelines: Sequence[Timeline]) -> dict[str, Drawing]:
    """Each timeline's bars, lanes and end by label, coloured on one scale: a page puts any two of them together."""
    sizes = [bar.bytes for one in timelines for bar in one.transfers if bar.bytes > 0]
    return {
        one.label: {
            "lanes": list(one.lanes),
            "end_ms": one.end_s * 1e3,
            "traces": _bars(one, "", sizes, outlined=False, scale=True),
        }
        for one in timelines
    }


def timeline(data: Timeline, other: Timeline | None = None, *, overlay: bool = False) -> Drawing:
    """One iteration, or two on one time axis: below each other, or the second as outlines over the first."""
    pair = [data] if other is None else [data, other]
    sizes = [bar.bytes for one in pair for bar in one.transfers if bar.bytes > 0]
    traces: list[Drawing] = []
    lanes: list[str] = []
    for place, one in enumerate(pair):
        prefix = "" if other is None or overlay else f"{html.escape(one.label)} · "
        outlined = overlay and place == 1
        lanes += [f"{prefix}{lane}" for lane in one.lanes if f"{prefix}{lane}" not in lanes]
        traces += _bars(one, prefix, sizes, outlined=outlined, scale=place == 0)
    end = max(one.end_s for one in pair)
    return {
        "data": traces,
        "layout": _layout(
            barmode="overlay",
            xaxis={"title": {"text": "milliseconds from the start of the iteration"}, "range": [0, end * 1020]},
            yaxis={"type": "category", "categoryarray": lanes[::-1], "categoryorder": "array", "automargin": True},
            height=170 + 34 * len(lanes),
            showlegend=False,
            hovermode="closest",
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
        "layout": _layout(
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
            **_line("bytes ready", _ms(data.ready_at_s), data.ready_bytes, "#d9822b", mode="lines"),
            "line": {"color": "#d9822b", "width": 2, "shape": "hv"},
            "yaxis": "y2",
            "hovertemplate": "%{y:.3s}B ready after %{x:.1f} ms<extra></extra>",
        },
    ]
    if data.sent_at_s:
        traces.append(
            {
                **_line(
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
        "layout": _layout(
            xaxis={"title": {"text": "milliseconds from the start of backward"}, "anchor": "y2"},
            yaxis={"title": {"text": "bytes each"}, "type": "log", "domain": [0.54, 1], "exponentformat": "SI"},
            yaxis2={"title": {"text": "bytes in all"}, "domain": [0, 0.46], "exponentformat": "SI"},
            height=520,
            hovermode="closest",
            shapes=[_upright(data.backward_s * 1e3)],
            annotations=[_mark(data.backward_s * 1e3, "backward ends")],
        ),
    }


def cost_curve(data: CostCurve) -> Drawing:
    traces: list[Drawing] = []
    for place, (workers, sizes, seconds) in enumerate(data.lines):
        how = "" if workers == data.measured_workers else ", computed"
        traces.append(
            {
                **_line(f"{workers} workers{how}", sizes, [one * 1e3 for one in seconds], COLOURS[1 + place]),
                "mode": "lines",
                "customdata": [
                    [format_bytes(size), format_seconds(one)] for size, one in zip(sizes, seconds, strict=True)
                ],
                "hovertemplate": "%{customdata[0]} on %{fullData.name}: %{customdata[1]}<extra></extra>",
            }
        )
    layout = _layout(
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
        "layout": _layout(
            barmode="stack",
            xaxis={"title": {"text": "GB"}, "rangemode": "tozero"},
            yaxis={"type": "category", "automargin": True},
            height=250,
            margin={"l": 64, "r": 24, "t": 72, "b": 56},
            legend={"orientation": "h", "x": 0, "y": 1.25, "yanchor": "bottom", "traceorder": "normal"},
            hovermode="closest",
            shapes=[_upright(size / 1e9) for size, _ in marks],
            annotations=[_mark(size / 1e9, f"{word} {format_bytes(size)}") for size, word in marks],
        ),
    }


def measured(rows: Sequence[tuple[str, float, float, float, float]]) -> Drawing:
    """(label, predicted, measured median, its 10th and 90th percentile), in seconds."""
    names = [html.escape(row[0]) for row in rows]
    texts = [
        [format_seconds(predicted), format_seconds(seen), f"{predicted / seen - 1:+.1%}"]
        for _, predicted, seen, *_ in rows
    ]
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
                "x": [row[2] * 1e3 for row in rows],
                "marker": {"color": "#d9822b", "size": 11},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [(row[4] - row[2]) * 1e3 for row in rows],
                    "arrayminus": [(row[2] - row[3]) * 1e3 for row in rows],
                    "color": "#d9822b",
                },
            },
            {
                **common,
                "name": "predicted",
                "x": [row[1] * 1e3 for row in rows],
                "marker": {"color": "#2f81c7", "size": 13, "symbol": "line-ns-open", "line": {"width": 3}},
            },
        ],
        "layout": _layout(
            xaxis={"title": {"text": "milliseconds per iteration"}, "rangemode": "tozero"},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
            height=190 + 32 * len(rows),
            hovermode="closest",
        ),
    }


def _bars(data: Timeline, prefix: str, sizes: Sequence[int], *, outlined: bool, scale: bool) -> list[Drawing]:
    low, high = (math.log10(min(sizes)), math.log10(max(sizes))) if sizes else (0.0, 1.0)
    computing: Drawing = {
        **_intervals(data, data.compute, prefix, outlined),
        "name": f"{html.escape(data.label)}: computation",
        "text": [html.escape(bar.name) for bar in data.compute],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[5]})<br>%{customdata[1]} to %{customdata[2]}, "
        "%{customdata[3]} long<extra></extra>",
    }
    computing["marker"].update(color="rgba(0,0,0,0)" if outlined else _COMPUTE)
    groups: Drawing = {
        **_intervals(data, data.transfers, prefix, outlined),
        "name": f"{html.escape(data.label)}: groups",
        "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[5]})<br>%{customdata[4]}<br>%{customdata[1]} to "
        "%{customdata[2]}, %{customdata[3]} long<extra></extra>",
    }
    span = high - low if high > low else 1.0
    groups["marker"].update(
        color="rgba(0,0,0,0)"
        if outlined
        else [shade((math.log10(max(bar.bytes, 1)) - low) / span) for bar in data.transfers]
    )
    return [computing, groups, *([_scale(low, high)] if scale and high > low else [])]


def _scale(low: float, high: float) -> Drawing:
    """What the shades mean: a colour bar on a trace without points."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [None],
        "y": [None],
        "hoverinfo": "skip",
        "marker": {
            "color": [low],
            "cmin": low,
            "cmax": high,
            "colorscale": [[place, shade(place)] for place in (0.0, 0.25, 0.5, 0.75, 1.0)],
            "showscale": True,
            "colorbar": {
                "title": {"text": "group", "side": "top"},
                "tickvals": [low, high],
                "ticktext": [format_bytes(10**low), format_bytes(10**high)],
                "thickness": 12,
                "len": 0.9,
                "outlinewidth": 0,
            },
        },
    }


def shade(share: float) -> str:
    """The colour of a group at this share of the way from the smallest to the largest."""
    place = min(max(share, 0.0), 1.0) * (len(_SIZES) - 1)
    below = min(int(place), len(_SIZES) - 2)
    part = place - below
    mixed = [
        round(one + part * (two - one))
        for one, two in zip(_channels(_SIZES[below]), _channels(_SIZES[below + 1]), strict=True)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _intervals(data: Timeline, bars: Sequence[Bar], prefix: str, outlined: bool) -> Drawing:
    edge = {"width": 2, "color": "#c94f6d"} if outlined else {"width": 0.5, "color": "rgba(255,255,255,.6)"}
    return {
        "type": "bar",
        "orientation": "h",
        "base": [bar.start_s * 1e3 for bar in bars],
        "x": [bar.duration_s * 1e3 for bar in bars],
        "y": [f"{prefix}{bar.lane}" for bar in bars],
        "width": 0.42 if outlined else 0.78,
        "customdata": [
            [
                _wrapped(bar.name),
                format_seconds(bar.start_s),
                format_seconds(bar.end_s),
                format_seconds(bar.duration_s),
                _cargo(bar),
                html.escape(data.label),
            ]
            for bar in bars
        ],
        "marker": {"line": edge},
    }


def _wrapped(name: str) -> str:
    """A list of names on lines that fit a hover label."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(name, _LABEL_WIDTH)) or html.escape(name)


def _cargo(bar: Bar) -> str:
    """What a group carries, in words."""
    size = format_bytes(bar.bytes)
    parts = [f"{bar.groups} groups"] if bar.groups > 1 else []
    if bar.gradients:
        parts.append(f"{bar.gradients} gradient" + ("s" if bar.gradients != 1 else ""))
    return ", ".join([*parts, size])


def _band(line: Any, colour: str, alone_per_s: float | None) -> list[Drawing]:
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
            "fillcolor": f"rgba({_rgb(colour)},.18)",
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


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str, **more: Any) -> Drawing:
    line = {"color": colour, "width": 2.5}
    if "dash" in more:
        line["dash"] = more.pop("dash")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": line,
        "marker": {"size": 7, "color": colour},
        **more,
    }


def _layout(**more: Any) -> Drawing:
    return {
        "margin": {"l": 64, "r": 24, "t": 24, "b": 56},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
        "dragmode": "zoom",
        **more,
    }


def _upright(x: float) -> Drawing:
    line = {"dash": "dash", "width": 1.5, "color": "#c94f6d"}
    return {"type": "line", "x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _mark(x: float, text: str) -> Drawing:
    return {"x": x, "xref": "x", "y": 1, "yref": "paper", "text": text, "showarrow": False, "yanchor": "bottom"}


def _ms(seconds: Sequence[float]) -> list[float]:
    return [one * 1e3 for one in seconds]


def _rgb(colour: str) -> str:
    return ",".join(str(value) for value in _channels(colour))


def _channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
