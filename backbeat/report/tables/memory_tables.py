"""Memory plans as tables: what is done with which blocks, and the uniform policies beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

from backbeat.model import MemoryPlan, Prediction, Profile, Segment
from backbeat.planners.max_batch import GrownBatch
from backbeat.report.tables.terminal_table import WINNER, fitted_table, table_of
from backbeat.report.words.numbers import format_number
from backbeat.simulate.memory_timeline import MemoryTimeline
from backbeat.simulate.sharded_memory import MemoryLevel
from backbeat.units import counted, first_to_last, format_bytes, format_seconds, printable


def segments_table(profile: Profile, memory: MemoryPlan, width: int | None = None) -> Table:
    """The plan's segments in the order of forward; alike neighbours share a row. `width` is the terminal's."""
    blocks = {block.name: block for block in profile.blocks}
    rows = []
    for (what, size), alike in groupby(memory.segments, key=lambda segment: (_what(segment), len(segment.blocks))):
        run = list(alike)
        names = [name for segment in run for name in segment.blocks]
        saved = sum(blocks[name].saved_bytes for name in names)
        again = sum(blocks[name].forward_s for name in names) if run[0].action == "recompute" else 0.0
        shown = printable(first_to_last(names))
        count = "" if what == "keep" else f"{len(run)}" + (f" × {size}" if size > 1 else "")
        rows.append((shown, what, count, format_bytes(saved), format_seconds(again) if again else ""))
    headings = ("blocks", "what", "segments", "saved", "recomputed")
    title = f"{len(profile.blocks)} blocks in {counted(len(memory.segments), 'segment')}"
    return fitted_table(headings, rows, title, left={"blocks", "what"}, names=0, width=width)


def policies_table(policies: Mapping[str, Prediction], budget: int) -> Table:
    """The plan, and then what treating every block alike would give."""
    rows = [
        (name, format_bytes(peak), format_seconds(one.iteration_s), "yes" if peak <= budget else "no")
        for name, one in policies.items()
        for peak in [one.peak_bytes or 0]
    ]
    table = table_of(("policy", "peak", "iteration", "in the budget"), rows, left={"policy"})
    table.rows[0].style = WINNER
    return table


def growth_table(points: Sequence[GrownBatch]) -> Table:
    """Batch sizes with what each takes and gives."""
    best = max(points, key=lambda point: point.prediction.samples_per_s)
    rows = [
        (
            str(point.batch_size),
            *(("all", "", "") if point.kept else map(str, mixture(point.plan.memory))),
            format_bytes(point.prediction.peak_bytes or 0),
            format_seconds(point.prediction.iteration_s),
            format_number(point.prediction.samples_per_s) + (" ◀" if point is best else ""),
        )
        for point in points
    ]
    table = table_of(("batch", "kept", "recomputed", "offloaded", "peak", "iteration", "samples/s"), rows)
    table.rows[points.index(best)].style = WINNER
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
    above = kept.peak_bytes - kept.holdings.total_bytes
    line = f"Predicted peak {format_bytes(kept.peak_bytes)}"
    if budget is not None:
        line += f" of a budget of {format_bytes(budget)}"
    line += f", {moment(kept)}: activations and their gradients {format_bytes(above)}, {kept.holdings.described()}."
    if kept.to_host_bytes:
        line += f" {format_bytes(kept.to_host_bytes)} to the host and back"
        line += f", computation waits {format_seconds(kept.stalled_s)} for it." if kept.stalled_s else ", all hidden."
    return line


def moment(held: MemoryTimeline | MemoryLevel) -> str:
    """When the peak is reached."""
    return "at the loss" if held.phase == "loss" else f"in the {held.phase} of {held.where}"


def _what(segment: Segment) -> str:
    if segment.action == "recompute":
        return "recompute, input offloaded" if segment.input == "offload" else "recompute"
    return segment.action
