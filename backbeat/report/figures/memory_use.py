"""Device memory of one worker by kind: at its peak or over a sharded step, against a budget or what the device has."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from backbeat.model import Memory
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import COLOURS, Drawing, axis, drawn, legend, mark, stacked, translucent, upright
from backbeat.simulate.sharded_memory import MemoryLevel
from backbeat.units import format_bytes

SHARDED_KINDS = {
    "parameter": "parameter shards",
    "optimizer": "optimizer state shards",
    "other": "buffers, batch, workspaces",
    "gradient": "gradient shards",
    "activation": "activations",
    "gathered": "gathered parameters",
    "gather_buffer": "all-gather buffers",
    "whole_gradient": "whole gradients",
    "scatter_input": "reduce-scatter inputs",
}
"""From what is there all the time to what comes and goes; the order in which they are piled up."""
_KIND_COLOURS = (*COLOURS[1:], canvas.GREY, "#4f7f8b")


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
    present = {kind: words for kind, words in SHARDED_KINDS.items() if any(level.held[kind] for level in data.levels)}
    traces: list[Drawing] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "held",
            "name": words,
            "x": times,
            "y": [round(level.held[kind] / 1e9, 3) for _, level in corners],
            "line": {"width": 0.5, "color": colour},
            "fillcolor": translucent(colour, 0.75),
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
