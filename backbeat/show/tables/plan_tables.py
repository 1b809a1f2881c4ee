"""A plan as tables: its buckets, its units, what is done with which blocks, and what all that takes of memory; units of
a trace beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from backbeat.importers.fsdp_units import MeasuredUnit
from backbeat.model import MemoryPlan, Plan, Prediction, Profile, Segment
from backbeat.model.gpu_memory import KINDS, MemoryByKind
from backbeat.model.profile import DTYPE_BYTES
from backbeat.show.tables.terminal_table import fitted_table, table_of
from backbeat.steps.model_chain import ROOT, chain_of
from backbeat.units import counted, first_to_last, format_bytes, format_seconds, printable

_MOST_NAME = 34


def plan_table(plan: Plan, result: Prediction, width: int | None = None) -> Table:
    """The buckets of a plan with when they travel; where they need more columns than `width`, without their last
    gradients."""
    spans = [span for span in result.timeline if span.carries_gradients]
    rows = [
        (
            str(number),
            span.lane.removeprefix("communicator ") if plan.communicators > 1 else "",
            printable(span.name),
            format_bytes(span.bytes),
            format_seconds(span.start_s),
            format_seconds(span.end_s),
        )
        for number, span in enumerate(spans)
    ]
    headings = ("bucket", "comm.", "gradients", "bytes", "starts", "ends")
    title = f"{counted(len(plan.buckets), 'bucket')} in launch order"
    return fitted_table(headings, rows, title, left={"gradients"}, names=2, width=width)


def units_table(profile: Profile, plan: Plan) -> Table:
    """Units in the order of forward; neighbours that are alike share a row."""
    sharding = plan.sharding
    assert sharding is not None
    chain, element = chain_of(profile, plan), DTYPE_BYTES[sharding.param_dtype]
    prefetching = any(unit.prefetch for unit in sharding.units)
    figures = [
        (
            len(unit.modules),
            format_bytes(elements * element),
            "freed" if unit.reshard else "kept",
            unit.prefetch,
        )
        for unit, elements in zip(sharding.units, chain.elements[:ROOT], strict=True)
    ]
    rows = []
    for alike, indices in groupby(range(len(figures)), key=lambda index: figures[index]):
        run = [sharding.units[index] for index in indices]
        modules, size, after, prefetch = alike
        ends = _between(run[0].modules[0], run[-1].modules[-1])
        rows.append((ends, str(len(run)), str(modules), size, after, str(prefetch) if prefetching else ""))
    rows.append(("root: the rest", "1", "", format_bytes(chain.elements[ROOT] * element), "kept", ""))
    headings = ("modules", "units", "modules each", "gathered each", "after forward", "prefetch")
    title = f"{counted(len(figures), 'unit')} and the root, mesh {sharding.mesh}"
    return table_of(headings, rows, title, left={"modules", "after forward"})


def measured_units_table(units: Sequence[MeasuredUnit]) -> Table:
    """Units of a trace in the order of forward."""
    rows = [
        (
            printable(unit.name),
            f"{unit.gathers:g}",
            _bytes(unit.gather_bytes),
            _seconds(unit.gather_s),
            _bytes(unit.scatter_bytes),
            _seconds(unit.scatter_s),
            _seconds(unit.reduce_s),
            _seconds(unit.exposed_s),
            "" if unit.overlap is None else f"{unit.overlap:.0%}",
        )
        for unit in units
    ]
    headings = ("unit", "gathers", "all-gather", "takes", "reduce-scatter", "takes", "all-reduce", "exposed", "overlap")
    return table_of(headings, rows, f"{len(units)} units, medians", left={"unit"})


def memory_table(held: MemoryByKind) -> Table:
    """The peak by kind, largest first; kinds below a thousandth are left out."""
    kinds = sorted(((size, KINDS[kind]) for kind, size in held.by_kind.items()), reverse=True)
    rows = [(words, format_bytes(size)) for size, words in kinds if size * 1000 >= held.peak_bytes]
    when = f", {held.moment}" if held.phase else ""
    heading = f"{format_bytes(held.peak_bytes)} at the peak{when}"
    return table_of((heading, "bytes"), rows, left={heading})


def _between(first: str, last: str) -> str:
    """Two names in few columns: what they share is said once."""
    if first == last:
        return printable(first)
    shared = first.rpartition(".")[0]
    short = last.removeprefix(f"{shared}.") if shared and last.startswith(f"{shared}.") else last
    text = f"{first} … {short}"
    return printable(text if len(text) <= _MOST_NAME else f"…{text[1 - _MOST_NAME :]}")


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


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


def _what(segment: Segment) -> str:
    if segment.action == "recompute":
        return "recompute, input offloaded" if segment.input == "offload" else "recompute"
    return segment.action
