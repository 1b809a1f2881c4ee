"""Memory plans as tables: what is done with which blocks, and the uniform policies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table

from backbeat.model import MemoryPlan, Profile, Segment
from backbeat.planners.max_batch import Point
from backbeat.simulate.memory_timeline import MemoryTimeline
from backbeat.units import format_bytes, format_seconds, printable


class Policy(NamedTuple):
    """One way to treat the blocks."""

    name: str
    peak_bytes: int
    iteration_s: float


def segments_table(profile: Profile, memory: MemoryPlan) -> Table:
    """The plan's segments in the order of forward; alike neighbours share a row."""
    blocks = {block.name: block for block in profile.blocks}
    title = f"{len(profile.blocks)} blocks in {_count(len(memory.segments), 'segment')}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("blocks", "what", "segments", "saved by autograd", "computed again"):
        table.add_column(heading, justify="left" if heading in ("blocks", "what") else "right")
    for _, alike in groupby(memory.segments, key=lambda segment: (_what(segment), len(segment.blocks))):
        run = list(alike)
        names = [name for segment in run for name in segment.blocks]
        again = sum(blocks[name].forward_s for name in names) if run[0].action == "recompute" else 0.0
        size = len(run[0].blocks)
        shown = "" if run[0].action == "keep" else f"{len(run)}" + (f" of {size} blocks" if size > 1 else "")
        table.add_row(
            printable(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"),
            _what(run[0]),
            shown,
            format_bytes(sum(blocks[name].saved_bytes for name in names)),
            format_seconds(again) if again else "",
        )
    return table


def policies_table(policies: Sequence[Policy], budget: int) -> Table:
    """The plan and what treating every block alike would give."""
    table = Table(header_style="bold")
    for heading in ("policy", "peak", "iteration", "in the budget"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for place, policy in enumerate(policies):
        fits = policy.peak_bytes <= budget
        table.add_row(
            policy.name,
            format_bytes(policy.peak_bytes),
            format_seconds(policy.iteration_s),
            "yes" if fits else "no",
            style="bold green" if place == 0 else None,
        )
    return table


def growth_table(points: Sequence[Point]) -> Table:
    """Batch sizes with what each takes and gives."""
    table = Table(header_style="bold")
    for heading in ("batch", "kept", "recomputed", "offloaded", "peak", "iteration", "samples/s"):
        table.add_column(heading, justify="right")
    best = max(points, key=lambda point: point.prediction.samples_per_s)
    for point in points:
        kept, again, away = mixture(point.plan.memory)
        table.add_row(
            str(point.batch_size),
            "all" if point.kept else str(kept),
            "" if point.kept else str(again),
            "" if point.kept else str(away),
            format_bytes(point.prediction.peak_bytes or 0),
            format_seconds(point.prediction.iteration_s),
            f"{point.prediction.samples_per_s:,.0f}" + (" ◀" if point is best else ""),
            style="bold green" if point is best else None,
        )
    return table


def mixture(memory: MemoryPlan | None) -> tuple[int, int, int]:
    """Blocks kept, recomputed, and offloaded (their saved tensors, or the input of a recomputed segment)."""
    kept = again = away = 0
    for segment in memory.segments if memory else ():
        count = len(segment.blocks)
        kept += count if segment.action == "keep" else 0
        again += count if segment.action == "recompute" else 0
        away += count if segment.action == "offload" else 1 if segment.input == "offload" else 0
    return kept, again, away


def peak_line(kept: MemoryTimeline, budget: int | None) -> str:
    """The predicted peak, where it is and what it is made of."""
    place = "at the loss" if kept.phase == "loss" else f"in the {kept.phase} of {kept.block}"
    above = kept.peak_bytes - kept.holdings.total_bytes
    line = f"Predicted peak {format_bytes(kept.peak_bytes)}"
    if budget is not None:
        line += f" of a budget of {format_bytes(budget)}"
    line += f", {place}: activations and their gradients {format_bytes(above)}, {kept.holdings.described()}."
    if kept.to_host_bytes:
        line += f" {format_bytes(kept.to_host_bytes)} to the host and back"
        line += f", computation waits {format_seconds(kept.stalled_s)} for it." if kept.stalled_s else ", all hidden."
    return line


def _what(segment: Segment) -> str:
    if segment.action == "recompute":
        return "recompute, input on the host" if segment.input == "offload" else "recompute"
    return segment.action


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
