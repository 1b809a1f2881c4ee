"""Layouts in tables of 80 columns: ranked, or one in full; and one step, drawn in letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from backbeat.model import Span
from backbeat.model.gpu_memory import KINDS
from backbeat.show.tables.terminal_table import folded, table_of
from backbeat.units import format_bytes, format_seconds

_STYLE: dict[str, Any] = {"title_style": "bold", "box": None, "padding": (0, 2, 0, 0)}
_COLUMNS = 64
"""Of a drawn timeline."""
_MANY_PASSES = 1500
"""With more, one round of micro-batches through the pipeline is drawn instead of two."""
_LETTERS = {"forward": "F", "backward": "B", "weight": "W", "reduce": "r", "update": "u", "gather": "g"}

PART_WORDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "norms, activations, loss",
    "host": "waiting for the host",
    "recompute": "recomputing forward",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel ring",
    "expert": "all-to-alls of experts",
    "contention": "computing beside communication",
    "parameters": "sharded parameters",
    "bubble": "pipeline bubble and sends",
    "reduce": "reducing gradients",
    "update": "update",
    "gather": "gathering parameters",
    "stragglers": "waiting for slow ranks",
}


def ranked_table(found: Sequence[Any], *, title: str, counts: bool = False) -> Table:
    """One row a layout, best first; with `counts`, one row a number of GPUs."""
    others = 35 if any(one.range_s is not None for one in found) else 23
    width = 80 - others - 6 * counts - max((len(one.bottleneck) for one in found), default=0)
    rows = [
        (
            str(one.gpus) if counts else "",
            "\n".join(folded([f"{part}+" for part in one.strategy.split("+")], width))[:-1],
            f"{one.tokens_per_s_per_gpu:.0f}",
            _band(one),
            f"{one.mfu:.0%}",
            format_bytes(one.peak_bytes),
            one.bottleneck,
        )
        for one in found
    ]
    headings = ("GPUs", "layout", "tok/s/GPU", "range", "MFU", "memory", "limit")
    return table_of(headings, rows, title, left={"layout", "limit"}, **_STYLE)


def _band(one: Any) -> str:
    if one.range_s is None:
        return ""
    quiet, busy = (one.tokens_per_s_per_gpu * one.step_s / edge for edge in one.range_s)
    return f"{busy:.0f}–{quiet:.0f}"


def breakdown_table(one: Any) -> Table:
    rows = [
        (PART_WORDS[name], format_seconds(seconds), f"{seconds / one.step_s:.1%}")
        for name, seconds in one.breakdown.parts.items()
        if seconds > 0.0005 * one.step_s
    ]
    rows.append(("step", format_seconds(one.step_s), ""))
    return table_of(("part", "time", "share"), rows, "one step", left={"part"}, **_STYLE)


def layout_memory_table(one: Any) -> Table:
    limit = max(one.device_bytes, one.peak_bytes)
    sizes = one.memory.by_kind
    rows = [(KINDS[name], format_bytes(size), "█" * round(40 * size / limit)) for name, size in sizes.items() if size]
    fits = {"yes": "fits", "tight": "tight"}.get(one.fits)
    fits = fits or f"does not fit: {format_bytes(one.peak_bytes - one.device_bytes)} too much"
    rows.append(("all", format_bytes(one.peak_bytes), f"of {format_bytes(one.device_bytes)}, {fits}"))
    title = "memory of one GPU, in the stage that holds most"
    return table_of(("kind", "bytes", ""), rows, title, left={"kind", ""}, **_STYLE)


def stage_lines(timeline: Sequence[Span]) -> list[str]:
    """The step drawn in letters, a line a stage: what it mostly does in each slice of time, or a dot for nothing."""
    if not timeline:
        return []
    end = max(span.end_s for span in timeline)
    edges, letters = np.linspace(0.0, 1.0, _COLUMNS + 1), "." + "".join(_LETTERS.values())
    lines = []
    for lane in sorted({span.lane for span in timeline}, key=lambda lane: int(lane.split()[-1])):
        done = {letter: np.zeros(_COLUMNS) for letter in letters}
        for span in timeline:
            if span.lane == lane:
                inside = np.minimum(span.end_s / end, edges[1:]) - np.maximum(span.start_s / end, edges[:-1])
                done[_LETTERS[span.name.split()[0]]] += np.maximum(inside, 0.0)
        done["."] = 1 / _COLUMNS - np.sum(list(done.values()), axis=0)
        most = np.argmax(list(done.values()), axis=0)
        lines.append(f"  {lane:<9} " + "".join(letters[index] for index in most))
    return [*lines, "  F forward, B backward, W weight gradient, r reduce, u update, g gather, . idle"]


def drawn_batch(one: Any) -> int:
    """The global batch to draw a step with. In the middle of many micro-batches all is alike: fewer show the ends."""
    layout = one.layout
    passes = 2 * layout.pp * layout.pp * layout.chunks
    rounds = 1 if 2 * passes > _MANY_PASSES else 2
    most: int = rounds * layout.pp * layout.dp * layout.micro_batch
    return min(int(one.global_batch), most)
