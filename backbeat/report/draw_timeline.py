"""Timelines as plotly figures: one iteration, or parts of which a page puts any two on one time axis."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from backbeat.report.canvas import GREY, Drawing, axis, drawn, shade
from backbeat.report.figures import Timeline
from backbeat.report.figures.timeline import Bar, SizeScale, size_scale
from backbeat.units import counted, format_bytes, format_seconds

_LABEL_WIDTH = 56
_MOST_NAMED = 12
"""Computations that have their names inside their bars; of more, each is too short for its name."""
_COMPUTE_COLOURS = {"forward": "#a3a9b2", "copy": "#4f7f8b"}
"""Of a sharded step, whose computation is one bar a unit; backward and the update are grey."""


def timeline_parts(timelines: Sequence[Timeline]) -> dict[str, Drawing]:
    """Each timeline's bars, lanes and end by label, coloured on one scale: a page puts any two of them together."""
    sizes = size_scale(timelines)
    return {
        one.label: {"lanes": list(one.lanes), "end_ms": one.end_s * 1e3, "traces": _bars(one, sizes)}
        for one in timelines
    }


def timeline(data: Timeline) -> Drawing:
    """One iteration."""
    return drawn(
        _bars(data, size_scale([data])),
        barmode="overlay",
        xaxis=axis("milliseconds from the start of the iteration", range=[0, data.end_s * 1020]),
        yaxis={"type": "category", "categoryarray": data.lanes[::-1], "categoryorder": "array", "automargin": True},
        height=170 + 34 * len(data.lanes),
        showlegend=False,
    )


def _bars(data: Timeline, sizes: SizeScale) -> list[Drawing]:
    computing: Drawing = {
        **_intervals(data, data.compute),
        "name": f"{html.escape(data.label)}: computation",
        "text": [html.escape(bar.name) for bar in data.compute] if len(data.compute) <= _MOST_NAMED else None,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[5]})<br>%{customdata[1]} to %{customdata[2]}, "
        "%{customdata[3]} long<extra></extra>",
    }
    computing["marker"]["color"] = [_compute_colour(bar) for bar in data.compute]
    buckets: Drawing = {
        **_intervals(data, data.transfers),
        "name": f"{html.escape(data.label)}: buckets",
        "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[5]})<br>%{customdata[4]}<br>%{customdata[1]} to "
        "%{customdata[2]}, %{customdata[3]} long<extra></extra>",
    }
    buckets["marker"]["color"] = [shade(sizes.share(bar.bytes)) for bar in data.transfers]
    return [computing, buckets, *([_scale(sizes.low, sizes.high)] if sizes.high > sizes.low else [])]


def _compute_colour(bar: Bar) -> str:
    kind, _, unit = bar.name.partition(" ")
    return _COMPUTE_COLOURS.get(kind, GREY) if unit else GREY


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
            "colorscale": [[share, shade(share)] for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
            "showscale": True,
            "colorbar": {
                "title": {"text": "bucket", "side": "top"},
                "tickvals": [low, high],
                "ticktext": [format_bytes(10**low), format_bytes(10**high)],
                "thickness": 12,
                "len": 0.9,
                "outlinewidth": 0,
            },
        },
    }


def _intervals(data: Timeline, bars: Sequence[Bar]) -> Drawing:
    return {
        "type": "bar",
        "orientation": "h",
        "base": [bar.start_s * 1e3 for bar in bars],
        "x": [bar.duration_s * 1e3 for bar in bars],
        "y": [bar.lane for bar in bars],
        "width": 0.78,
        "customdata": [
            [
                _wrapped(bar.name),
                format_seconds(bar.start_s),
                format_seconds(bar.end_s),
                format_seconds(bar.duration_s),
                _contents(bar),
                html.escape(data.label),
            ]
            for bar in bars
        ],
        "marker": {"line": {"width": 0.5, "color": "rgba(255,255,255,.6)"}},
    }


def _wrapped(name: str) -> str:
    """A list of names on lines that fit a hover label."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(name, _LABEL_WIDTH)) or html.escape(name)


def _contents(bar: Bar) -> str:
    """What a bucket carries, in words."""
    parts = [f"{bar.buckets} buckets"] if bar.buckets > 1 else []
    if bar.gradients:
        parts.append(counted(bar.gradients, "gradient"))
    return ", ".join([*parts, format_bytes(bar.bytes)])
