"""Bars side by side: time and memory of the ways to hold a model, and iterations predicted against measured."""

from __future__ import annotations

import html
from collections.abc import Sequence

from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, bar, dots, drawn, mark, ms, upright
from backbeat.report.measured import Comparison
from backbeat.report.words.ways import Way, chosen_way
from backbeat.units import format_bytes, format_seconds


def draw_measured(rows: Sequence[tuple[str, Comparison]]) -> Drawing:
    """By label, what was measured and what was predicted before."""
    labels, pairs = [html.escape(label) for label, _ in rows], [pair for _, pair in rows]
    common: Drawing = {
        "customdata": [
            [format_seconds(row.predicted_s), format_seconds(row.measured_s), f"{row.error:+.1%}"] for row in pairs
        ],
        "hovertemplate": "<b>%{y}</b><br>measured %{customdata[1]}<br>predicted %{customdata[0]} "
        "(%{customdata[2]})<extra></extra>",
    }
    spread = {
        "type": "data",
        "symmetric": False,
        "array": ms([row.high_s - row.measured_s for row in pairs]),
        "arrayminus": ms([row.measured_s - row.low_s for row in pairs]),
        "color": canvas.ORANGE,
    }
    seen, said = ms([row.measured_s for row in pairs]), ms([row.predicted_s for row in pairs])
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


def draw_ways(ways: Sequence[Way]) -> Drawing:
    """Time above, memory below; the way to take in green, those that do not fit in grey."""
    taken = chosen_way(ways)
    labels = [html.escape(way.label) for way in ways]
    colours = [canvas.GREEN if way is taken else canvas.BLUE if way.fits else canvas.GREY for way in ways]
    iteration_s = [way.prediction.iteration_s for way in ways]
    seconds = [format_seconds(one) for one in iteration_s]
    texts = [one + ("" if way.fits else ", does not fit") for one, way in zip(seconds, ways, strict=True)]
    common = {"hovertemplate": "<b>%{y}</b>: %{customdata}<extra></extra>", "textposition": "auto"}
    times = bar("iteration", labels, ms(iteration_s), colours, customdata=seconds, text=texts, **common)
    rows = 26 * len(labels)
    category = {"type": "category", "autorange": "reversed"}
    fits = [way.fit for way in ways if way.fit is not None]
    if len(fits) < len(ways):
        xaxis = axis("milliseconds per iteration", rangemode="tozero")
        return drawn([times], xaxis=xaxis, yaxis=category, height=110 + rows, showlegend=False)
    gigabytes, sizes = [fit.peak_bytes / 1e9 for fit in fits], [format_bytes(fit.peak_bytes) for fit in fits]
    below = {"xaxis": "x2", "yaxis": "y2"}
    peaks = bar("peak", labels, gigabytes, colours, customdata=sizes, text=sizes, **common, **below)
    limit = fits[0].device_bytes
    line = upright(limit / 1e9) | {"xref": "x2", "yref": "paper", "y0": 0, "y1": 0.42}
    word = mark(limit / 1e9, f"limit {format_bytes(limit)}") | {"xref": "x2", "y": 0.42, "xanchor": "right"}
    return drawn(
        [times, peaks],
        xaxis=axis("milliseconds per iteration", rangemode="tozero", anchor="y"),
        yaxis={**category, "domain": [0.6, 1]},
        xaxis2=axis("GB at the peak of one GPU", rangemode="tozero", anchor="y2"),
        yaxis2={**category, "domain": [0, 0.42]},
        height=230 + 2 * rows,
        showlegend=False,
        shapes=[line],
        annotations=[word],
    )
