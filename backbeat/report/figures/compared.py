"""Bars side by side: where strategies' exposed time comes from, time and memory of the ways to hold a model, and
iterations predicted against measured."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from backbeat.model import Prediction
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, bar, dots, drawn, mark, ms, upright
from backbeat.report.measured import Comparison
from backbeat.report.study import chosen
from backbeat.report.study_row import StudyRow
from backbeat.units import format_bytes, format_seconds

PARTS = {
    "bandwidth": ("the link is too slow for the bytes", canvas.BLUE),
    "latency": ("latency of messages", canvas.ORANGE),
    "waiting": ("held back by late gradients", canvas.PURPLE),
    "stragglers": ("waiting for the slowest worker", canvas.GREY),
    "buffers": ("broadcasting buffers", canvas.GREEN),
    "contention": ("computation slowed down by communication", canvas.ROSE),
    "gather": ("gathering updated parameters", "#9a8b2f"),
    "copies": ("copying into and out of collectives' buffers", "#4f7f8b"),
    "host": ("waiting for the host to issue work", "#5aa9c9"),
}
"""Parts of the exposed time in words, and the colour of each."""
_BY_LABEL = {"type": "category", "autorange": "reversed"}
"""The axis of bars that lie below each other in order."""
_ITERATION = axis("milliseconds per iteration", rangemode="tozero")


def exposed_by_part(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Seconds of each part, one for each prediction. Parts that are nowhere present are left out."""
    rows = list(predictions)
    # The host's is negative where communication takes the place of waiting for it.
    parts = {name: [max(getattr(row.breakdown, f"{name}_s"), 0.0) for row in rows] for name in PARTS}
    return {name: values for name, values in parts.items() if any(values)}


def draw_exposed(predictions: Mapping[str, Prediction]) -> Drawing:
    """Parts piled up, a bar for each label."""
    labels = [html.escape(label) for label in predictions]
    hover = "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>"
    traces = [
        bar(
            PARTS[part][0],
            labels,
            ms(values),
            PARTS[part][1],
            customdata=[format_seconds(seconds) for seconds in values],
            hovertemplate=hover,
        )
        for part, values in exposed_by_part(predictions.values()).items()
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds added to each iteration", rangemode="tozero"),
        yaxis=_BY_LABEL,
        height=190 + 34 * len(labels),
    )


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
        xaxis=_ITERATION,
        yaxis=_BY_LABEL,
        height=190 + 32 * len(rows),
    )


def draw_ways(ways: Sequence[StudyRow]) -> Drawing:
    """Time above, memory below; the way to take in green, those that do not fit in grey."""
    taken = chosen(ways)
    labels = [html.escape(way.label) for way in ways]
    colours = [canvas.GREEN if way is taken else canvas.BLUE if way.fits else canvas.GREY for way in ways]
    iteration_s = [way.prediction.iteration_s for way in ways]
    seconds = [format_seconds(one) for one in iteration_s]
    texts = [one + ("" if way.fits else ", does not fit") for one, way in zip(seconds, ways, strict=True)]
    common = {"hovertemplate": "<b>%{y}</b>: %{customdata}<extra></extra>", "textposition": "auto"}
    times = bar("iteration", labels, ms(iteration_s), colours, customdata=seconds, text=texts, **common)
    rows = 26 * len(labels)
    traces, layout = [times], {"xaxis": _ITERATION, "yaxis": _BY_LABEL, "height": 110 + rows, "showlegend": False}
    fits = [way.fit for way in ways if way.fit is not None]
    if len(fits) == len(ways):
        gigabytes, sizes = [fit.peak_bytes / 1e9 for fit in fits], [format_bytes(fit.peak_bytes) for fit in fits]
        below = {"xaxis": "x2", "yaxis": "y2"}
        traces.append(bar("peak", labels, gigabytes, colours, customdata=sizes, text=sizes, **common, **below))
        limit = fits[0].device_bytes
        line = upright(limit / 1e9) | {"xref": "x2", "yref": "paper", "y0": 0, "y1": 0.42}
        word = mark(limit / 1e9, f"limit {format_bytes(limit)}") | {"xref": "x2", "y": 0.42, "xanchor": "right"}
        layout |= {
            "xaxis": {**_ITERATION, "anchor": "y"},
            "yaxis": {**_BY_LABEL, "domain": [0.6, 1]},
            "xaxis2": axis("GB at the peak of one GPU", rangemode="tozero", anchor="y2"),
            "yaxis2": {**_BY_LABEL, "domain": [0, 0.42]},
            "height": 230 + 2 * rows,
            "shapes": [line],
            "annotations": [word],
        }
    return drawn(traces, **layout)
