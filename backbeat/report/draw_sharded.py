"""Drawings of sharded steps: the ways to hold a model, and memory over a step."""

from __future__ import annotations

import html

from backbeat.report import canvas
from backbeat.report.canvas import COLOURS, Drawing, axis, bar, drawn, mark, ms, translucent, upright
from backbeat.report.figures import StepMemory, WayBars
from backbeat.units import format_bytes, format_seconds

_KIND_COLOURS = (*COLOURS[1:], canvas.GREY, "#4f7f8b")


def way_bars(data: WayBars) -> Drawing:
    """Time above, memory below; the way to take in green, those that do not fit in grey."""
    labels = [html.escape(label) for label in data.labels]
    colours = [
        canvas.GREEN if index == data.chosen else canvas.BLUE if fits else canvas.GREY
        for index, fits in enumerate(data.fits)
    ]
    seconds, sizes = [format_seconds(one) for one in data.iteration_s], [format_bytes(size) for size in data.peak_bytes]
    texts = [one + ("" if fits else ", does not fit") for one, fits in zip(seconds, data.fits, strict=True)]
    common = {"hovertemplate": "<b>%{y}</b>: %{customdata}<extra></extra>", "textposition": "auto"}
    times = bar("iteration", labels, ms(data.iteration_s), colours, customdata=seconds, text=texts, **common)
    rows = 26 * len(labels)
    category = {"type": "category", "autorange": "reversed"}
    if not data.peak_bytes:
        xaxis = axis("milliseconds per iteration", rangemode="tozero")
        return drawn([times], xaxis=xaxis, yaxis=category, height=110 + rows, showlegend=False)
    gigabytes = [size / 1e9 for size in data.peak_bytes]
    below = {"xaxis": "x2", "yaxis": "y2"}
    peaks = bar("peak", labels, gigabytes, colours, customdata=sizes, text=sizes, **common, **below)
    limit = data.limit_bytes or 0
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


def step_memory(data: StepMemory) -> Drawing:
    """Kinds piled up over time."""
    traces: list[Drawing] = []
    times = [round(moment, 3) for moment in ms(data.times_s)]
    for (words, sizes), colour in zip(data.kinds, _KIND_COLOURS, strict=False):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "held",
                "name": words,
                "x": times,
                "y": [round(size / 1e9, 3) for size in sizes],
                "line": {"width": 0.5, "color": colour},
                "fillcolor": translucent(colour, 0.75),
                "hovertemplate": "%{y:.2f} GB",
            }
        )
    # One label for all kinds names the block once.
    traces[0] |= {"text": [html.escape(where) for where in data.where], "hovertemplate": "%{y:.2f} GB (%{text})"}
    top = max(data.peak_bytes, data.limit_bytes or 0)
    shapes, notes = [], [_note(data.peak_s * 1e3, data.peak_bytes, f"peak {format_bytes(data.peak_bytes)}")]
    if data.limit_bytes is not None:
        level = data.limit_bytes / 1e9
        shapes.append(upright(0) | {"xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": level, "y1": level})
        notes.append(
            _note(0, data.limit_bytes, f"limit {format_bytes(data.limit_bytes)}") | {"xref": "paper", "xanchor": "left"}
        )
    return drawn(
        traces,
        xaxis=axis("milliseconds from the start of the iteration", rangemode="tozero"),
        yaxis=axis("GB", range=[0, top / 1e9 * 1.12]),
        height=460,
        hovermode="x unified",
        shapes=shapes,
        annotations=notes,
    )


def _note(x: float, size: int, text: str) -> Drawing:
    return mark(x, text) | {"yref": "y", "y": size / 1e9}
