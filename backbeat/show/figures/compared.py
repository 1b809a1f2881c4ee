"""What strategies take of time and memory: their exposed time by cause, shardings of a model, iterations predicted
against measured, and device memory by kind, at its peak or over a sharded step."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from backbeat.model import Memory, Prediction
from backbeat.model.gpu_memory import KINDS
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, Drawing, axis, bar, dots, drawn, legend, mark, ms, stacked, upright
from backbeat.show.measured import Measured
from backbeat.show.study import chosen
from backbeat.show.study_row import StudyRow
from backbeat.steps.sharded_memory import MemoryLevel
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
_KIND_COLOURS = (*COLOURS[1:], canvas.GREY, "#4f7f8b")
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
        stacked(PARTS[part][0], labels, ms(values), [format_seconds(seconds) for seconds in values], PARTS[part][1])
        | {"hovertemplate": hover}
        for part, values in exposed_by_part(predictions.values()).items()
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds added to each iteration", rangemode="tozero"),
        yaxis=_BY_LABEL,
        height=190 + 34 * len(labels),
    )


def draw_measured(rows: Sequence[Measured]) -> Drawing:
    """By label, what was measured and what was predicted before."""
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
        xaxis=_ITERATION,
        yaxis=_BY_LABEL,
        height=190 + 32 * len(rows),
    )


def draw_shardings(rows: Sequence[StudyRow]) -> Drawing:
    """Time above, memory below; the one to take in green, those that do not fit in grey."""
    taken = chosen(rows)
    labels = [html.escape(row.label) for row in rows]
    colours = [canvas.GREEN if row is taken else canvas.BLUE if row.fits else canvas.GREY for row in rows]
    iteration_s = [row.prediction.iteration_s for row in rows]
    seconds = [format_seconds(one) for one in iteration_s]
    texts = [one + ("" if row.fits else ", does not fit") for one, row in zip(seconds, rows, strict=True)]
    common = {"hovertemplate": "<b>%{y}</b>: %{customdata}<extra></extra>", "textposition": "auto"}
    times = bar("iteration", labels, ms(iteration_s), colours, customdata=seconds, text=texts, **common)
    bars = 26 * len(labels)
    traces, layout = [times], {"xaxis": _ITERATION, "yaxis": _BY_LABEL, "height": 110 + bars, "showlegend": False}
    fits = [row.fit for row in rows if row.fit is not None]
    if len(fits) == len(rows):
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
            "height": 230 + 2 * bars,
            "shapes": [line],
            "annotations": [word],
        }
    return drawn(traces, **layout)


def memory_kinds(memory: Memory) -> dict[str, int]:
    """Bytes by kind, present ones only; `workspace` is what the peak holds beyond all kinds that were counted."""
    counted = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "buffers": memory.buffer_bytes,
        "activations": memory.activation_bytes,
    }
    kinds = {**counted, "workspace": memory.peak_bytes - sum(counted.values())}
    return {kind: size for kind, size in kinds.items() if size > 0}


class StepMemory(NamedTuple):
    """What one worker holds over a sharded step."""

    label: str
    levels: Sequence[MemoryLevel]
    limit_bytes: int | None

    @property
    def peak(self) -> MemoryLevel:
        return max(self.levels, key=lambda level: level.total_bytes)


def draw_memory_use(memory: Memory, budget_bytes: int | None = None) -> Drawing:
    kinds = memory_kinds(memory)
    traces = [
        stacked(kind, ["one worker"], [size / 1e9], [format_bytes(size)], colour)
        for (kind, size), colour in zip(kinds.items(), COLOURS[1:], strict=False)
    ]
    marks = [(memory.peak_bytes or sum(kinds.values()), "peak")]
    if budget_bytes is not None:
        marks.append((budget_bytes, "budget"))
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("GB", rangemode="tozero"),
        yaxis={"type": "category"},
        height=250,
        margin={"l": 64, "r": 24, "t": 72, "b": 56},
        legend=legend(1.25),
        shapes=[upright(size / 1e9) for size, _ in marks],
        annotations=[mark(size / 1e9, f"{word} {format_bytes(size)}") for size, word in marks],
    )


def draw_step_memory(data: StepMemory) -> Drawing:
    """Kinds piled up over time. Each level holds from its start to its end: two corners of a stair."""
    corners = [(moment, level) for level in data.levels for moment in (level.start_s, level.end_s)]
    times = [round(moment * 1e3, 3) for moment, _ in corners]
    present = {kind: words for kind, words in KINDS.items() if any(level.held[kind] for level in data.levels)}
    traces: list[Drawing] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "held",
            "name": words,
            "x": times,
            "y": [round(level.held[kind] / 1e9, 3) for _, level in corners],
            "line": {"width": 0.5, "color": colour},
            "fillcolor": canvas.translucent(colour, 0.75),
            "hovertemplate": "%{y:.2f} GB",
        }
        for (kind, words), colour in zip(present.items(), _KIND_COLOURS, strict=False)
    ]
    # One label for all kinds names the block once.
    where = [html.escape(f"{level.phase} of {level.where}") for _, level in corners]
    traces[0] |= {"text": where, "hovertemplate": "%{y:.2f} GB (%{text})"}
    peak, limit = data.peak, data.limit_bytes
    top, middle = peak.total_bytes, (peak.start_s + peak.end_s) / 2 * 1e3
    shapes, notes = [], [_note(middle, top, f"peak {format_bytes(top)}")]
    if limit is not None:
        level = limit / 1e9
        shapes.append(upright(0) | {"xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": level, "y1": level})
        notes.append(_note(0, limit, f"limit {format_bytes(limit)}") | {"xref": "paper", "xanchor": "left"})
    return drawn(
        traces,
        xaxis=axis("milliseconds from the start of the iteration", rangemode="tozero"),
        yaxis=axis("GB", range=[0, max(top, limit or 0) / 1e9 * 1.12]),
        height=460,
        hovermode="x unified",
        shapes=shapes,
        annotations=notes,
    )


def _note(x: float, size: int, text: str) -> Drawing:
    return mark(x, text) | {"yref": "y", "y": size / 1e9}
