"""Device memory of one worker by kind: at its peak or over a sharded step, against a budget or what the device has."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.model import Memory
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import COLOURS, Drawing, axis, bar, drawn, mark, ms, translucent, upright
from backbeat.simulate.sharded_levels import MemoryLevel
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    label: str
    times_s: tuple[float, ...]
    """Corners of the stairs: a level holds from one to the next, two corners each."""
    where: tuple[str, ...]
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    """(words, bytes at every corner), present ones only."""
    peak_bytes: int
    peak_s: float
    limit_bytes: int | None


def step_memory(label: str, levels: Sequence[MemoryLevel], limit_bytes: int | None = None) -> StepMemory:
    """The levels as stairs."""
    highest = max(levels, key=lambda level: level.total_bytes)
    corners = [(moment, level) for level in levels for moment in (level.start_s, level.end_s)]
    return StepMemory(
        label=label,
        times_s=tuple(moment for moment, _ in corners),
        where=tuple(f"{level.phase} of {level.where}" for _, level in corners),
        kinds=tuple(
            (words, tuple(level.held[kind] for _, level in corners))
            for kind, words in SHARDED_KINDS.items()
            if any(level.held[kind] for level in levels)
        ),
        peak_bytes=highest.total_bytes,
        peak_s=(highest.start_s + highest.end_s) / 2,
        limit_bytes=limit_bytes,
    )


def draw_memory_use(memory: Memory, budget_bytes: int | None = None) -> Drawing:
    kinds = memory_kinds(memory)
    hover = "<b>%{fullData.name}</b>: %{customdata}<extra></extra>"
    traces = [
        bar(kind, ["one worker"], [size / 1e9], colour, customdata=[format_bytes(size)], hovertemplate=hover)
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
        legend={"orientation": "h", "x": 0, "y": 1.25, "yanchor": "bottom", "traceorder": "normal"},
        shapes=[upright(size / 1e9) for size, _ in marks],
        annotations=[mark(size / 1e9, f"{word} {format_bytes(size)}") for size, word in marks],
    )


def draw_step_memory(data: StepMemory) -> Drawing:
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
