"""Sharding as tables of 80 columns: units as planned and as measured, memory by kind, strategies beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.table import Table

from backbeat.importers.fsdp_units import MeasuredUnit
from backbeat.model import Plan, Prediction, Profile
from backbeat.model.profile import DTYPE_BYTES
from backbeat.report.figures.memory_use import SHARDED_KINDS
from backbeat.report.study_row import StudyRow
from backbeat.report.tables.memory_tables import moment
from backbeat.report.tables.terminal_table import table_of
from backbeat.report.words.numbers import format_number, scaling_range
from backbeat.simulate.sharded_memory import MemoryLevel
from backbeat.simulate.sharded_units import ROOT, chain_of
from backbeat.units import counted, format_bytes, format_seconds, printable

_MOST_NAME = 34


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


def memory_table(held: MemoryLevel) -> Table:
    """The peak by kind, largest first; kinds below a thousandth are left out."""
    kinds = [(words, held.held[kind]) for kind, words in SHARDED_KINDS.items()]
    rows = [
        (words, format_bytes(size))
        for words, size in sorted(kinds, key=lambda kind: -kind[1])
        if size * 1000 >= held.total_bytes
    ]
    return table_of(
        ("kind", "bytes"), rows, f"{format_bytes(held.total_bytes)} at the peak, {moment(held)}", left={"kind"}
    )


def strategies_table(rows: Sequence[StudyRow], cost: tuple[str, Callable[[Prediction], str]] | None = None) -> Table:
    """One row for each strategy and number of GPUs. Where the network has a band, it takes the place of samples/s; a
    cost, its heading and how it is found, that of the limit."""
    ranged = any(scaling_range(row.prediction) for row in rows)
    rate, last = "busy–quiet" if ranged else "samples/s", "limited by" if cost is None else cost[0]
    cells = []
    before = None
    for row in rows:
        found, peak = row.prediction, row.peak_bytes
        cells.append(
            (
                "" if row.workers == before else f"{row.workers}{'*' if found.extrapolated else ''}",
                printable(row.label),
                format_seconds(found.iteration_s),
                f"{found.scaling_factor:.1%}",
                scaling_range(found) if ranged else format_number(found.samples_per_s),
                _bytes(peak),
                "" if peak is None else "yes" if row.fits else "no",
                found.bottleneck if cost is None else cost[1](found),
            )
        )
        before = row.workers
    headings = ("GPUs", "strategy", "step", "scaling", rate, "memory", "fits", last)
    return table_of(headings, cells, left={"strategy", "fits", "limited by"})


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
