"""Rows of an answer beside each other: step and range, memory by kind, what a step waits for; and what was measured."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from backbeat.answer.row import AnswerRow
from backbeat.model.gpu_memory import KINDS
from backbeat.model.prediction import Prediction
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, Drawing, axis, bar, dots, drawn, mark, ms, stacked, upright
from backbeat.show.measured import Measured
from backbeat.units import format_bytes, format_seconds

CAUSES = {
    "bandwidth": ("the link is too slow for the bytes", canvas.BLUE),
    "latency": ("latency of messages", canvas.ORANGE),
    "waiting": ("held back by late gradients", canvas.PURPLE),
    "stragglers": ("waiting for the slowest GPU", canvas.GREY),
    "buffers": ("broadcasting buffers", canvas.GREEN),
    "contention": ("computation slowed down by communication", canvas.ROSE),
    "gather": ("gathering updated parameters", "#9a8b2f"),
    "copies": ("copying into and out of collectives' buffers", "#4f7f8b"),
    "host": ("waiting for the host to issue work", "#5aa9c9"),
    "parameters": ("gathering and scattering shards", "#2f9a8b"),
    "reduce": ("reducing gradients", "#6b8fd6"),
    "tensor": ("collectives of tensor parallelism", "#d0a02b"),
    "context": ("collectives of context parallelism", "#8a6fb0"),
    "expert": ("taking tokens to experts", "#b06f8a"),
    "bubble": ("the pipeline's bubble", "#c7c2b8"),
}
"""What a step waits for, in words, and the colour of each."""
_BY_LABEL = {"type": "category", "autorange": "reversed", "automargin": True}
"""The axis of bars that lie below each other in order."""
_STEP = axis("milliseconds per step", rangemode="tozero")
_HOVER = "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>"
_KIND_COLOURS = (*COLOURS[1:], canvas.GREY, "#4f7f8b")


def labels_of(rows: Sequence[AnswerRow]) -> list[str]:
    return [html.escape(row.way) for row in rows]


def draw_steps(rows: Sequence[AnswerRow], taken: AnswerRow) -> Drawing:
    """Step times with their ranges; the one to take in green, those that do not fit in grey."""
    labels, seconds = labels_of(rows), [row.step_s for row in rows]
    colours = [canvas.GREEN if row is taken else canvas.BLUE if row.possible else canvas.GREY for row in rows]
    words = [format_seconds(row.step_s) + ("" if row.possible else ", does not fit") for row in rows]
    spread = {
        "type": "data",
        "symmetric": False,
        "array": ms([row.range_s[1] - row.step_s for row in rows]),
        "arrayminus": ms([row.step_s - row.range_s[0] for row in rows]),
        "color": canvas.ORANGE,
    }
    traces = [bar("step", labels, ms(seconds), colours, customdata=words, hovertemplate=_HOVER, error_x=spread)]
    return drawn(traces, xaxis=_STEP, yaxis=_BY_LABEL, height=110 + 26 * len(rows), showlegend=False)


def draw_memory(rows: Sequence[AnswerRow]) -> Drawing | None:
    """What one GPU holds at its peak, by kind, against what it has; None where nobody knows."""
    known = [row for row in rows if row.memory is not None and row.memory.by_kind]
    if not known:
        return None
    labels = labels_of(known)
    kinds = [kind for kind in KINDS if any(row.memory.by_kind.get(kind) for row in known)]
    traces = []
    for kind, colour in zip(kinds, _KIND_COLOURS * 2, strict=False):
        sizes = [row.memory.by_kind.get(kind, 0.0) for row in known]
        words = [format_bytes(size) for size in sizes]
        traces.append(stacked(KINDS[kind], labels, [size / 1e9 for size in sizes], words, colour))
        traces[-1]["hovertemplate"] = _HOVER
    limit = known[0].device_bytes
    shapes = [upright(limit / 1e9)] if limit else []
    notes = [mark(limit / 1e9, f"limit {format_bytes(limit)}") | {"xanchor": "right"}] if limit else []
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("GB at the peak of one GPU", rangemode="tozero"),
        yaxis=_BY_LABEL,
        height=230 + 26 * len(known),
        shapes=shapes,
        annotations=notes,
        legend=canvas.legend(-0.2, yanchor="top"),
    )


def exposed_by_part(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Seconds of each part, one for each prediction. Parts that are nowhere present are left out."""
    rows = list(predictions)
    # The host's is negative where communication takes the place of waiting for it.
    parts = {name: [max(row.breakdown.parts.get(name, 0.0), 0.0) for row in rows] for name in CAUSES}
    return {name: values for name, values in parts.items() if any(value > 1e-9 for value in values)}


def draw_exposed(rows: Sequence[AnswerRow]) -> Drawing:
    """Parts piled up, a bar for each row."""
    labels = labels_of(rows)
    traces = []
    for part, values in exposed_by_part(row.prediction for row in rows).items():
        words = [format_seconds(seconds) for seconds in values]
        traces.append(stacked(CAUSES[part][0], labels, ms(values), words, CAUSES[part][1]) | {"hovertemplate": _HOVER})
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds of each step that wait", rangemode="tozero"),
        yaxis=_BY_LABEL,
        height=230 + 26 * len(labels),
        legend=canvas.legend(-0.2, yanchor="top"),
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
        xaxis=_STEP,
        yaxis=_BY_LABEL,
        height=190 + 32 * len(rows),
    )
