"""Sharded plans as tables of 80 columns: units, memory by kind, strategies beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table

from backbeat.model import Plan, Profile
from backbeat.model.sharding import DTYPE_BYTES
from backbeat.report.tables import plain_table, scaling_range
from backbeat.report.ways import Way
from backbeat.simulate.sharded_memory import ShardedMemory
from backbeat.simulate.sharded_units import ROOT, chain_of
from backbeat.units import format_bytes, format_seconds, printable

_MOST_NAME = 34


class _UnitRow(NamedTuple):
    first: str
    last: str
    modules: int
    bytes: int
    kept: bool
    prefetch: int

    @property
    def alike(self) -> tuple[int, int, bool, int]:
        return self.modules, self.bytes, self.kept, self.prefetch


def units_table(profile: Profile, plan: Plan) -> Table:
    """Units in the order of forward; neighbours that are alike share a row."""
    sharding = plan.sharding
    assert sharding is not None
    chain, element = chain_of(profile, plan), DTYPE_BYTES[sharding.param_dtype]
    rows = [
        _UnitRow(unit.modules[0], unit.modules[-1], len(unit.modules), content.elements * element, not unit.reshard,
                 unit.prefetch)
        for unit, content in zip(sharding.units, chain.units[:ROOT], strict=True)
    ]  # fmt: skip
    count = len(rows)
    table = plain_table(f"{count} unit{'' if count == 1 else 's'} and the root, mesh {sharding.mesh}")
    several = any(row.prefetch for row in rows)
    for heading in ("modules", "units", "modules each", "gathered each", "after forward", *["prefetch"] * several):
        table.add_column(heading, justify="left" if heading in ("modules", "after forward") else "right")
    for _, alike in groupby(rows, key=lambda row: row.alike):
        run = list(alike)
        one = run[0]
        ends = _between(one.first, run[-1].last)
        what = "kept" if one.kept else "freed"
        size = format_bytes(one.bytes)
        table.add_row(ends, str(len(run)), str(one.modules), size, what, *[str(one.prefetch)] * several)
    root = chain.units[ROOT].elements * element
    table.add_row("root: the rest", "1", "", format_bytes(root), "kept", *[""] * several)
    return table


def memory_table(held: ShardedMemory) -> Table:
    """The peak by kind, largest first; kinds below a thousandth are left out."""
    place = "at the loss" if held.phase == "loss" else f"in the {held.phase} of {held.where}"
    table = plain_table(f"{format_bytes(held.peak_bytes)} at the peak, {place}")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    kinds = {
        "activations": held.activation_bytes,
        "parameter shards": held.parameter_bytes,
        "optimizer state shards": held.optimizer_bytes,
        "gradient shards": held.gradient_bytes,
        "gathered parameters": held.gathered_bytes,
        "all-gather buffers": held.gather_buffer_bytes,
        "whole gradients": held.whole_gradient_bytes,
        "reduce-scatter inputs": held.scatter_input_bytes,
        "buffers, batch, workspaces": held.other_bytes,
    }
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1]):
        if size * 1000 >= held.peak_bytes:
            table.add_row(kind, format_bytes(size))
    return table


def strategies_table(ways: Sequence[Way]) -> Table:
    """One row for each strategy and number of GPUs. Where the network has a band, it takes the place of samples/s."""
    table = plain_table()
    ranged = any(scaling_range(way.prediction) for way in ways)
    rate = "busy–quiet" if ranged else "samples/s"
    for heading in ("GPUs", "strategy", "step", "scaling", rate, "memory", "fits", "limited by"):
        table.add_column(heading, justify="left" if heading in ("strategy", "fits", "limited by") else "right")
    before = None
    for way in ways:
        row = way.prediction
        table.add_row(
            "" if row.workers == before else f"{row.workers}{'*' if row.extrapolated else ''}",
            printable(row.strategy),
            format_seconds(row.iteration_s),
            f"{row.scaling_factor:.1%}",
            scaling_range(row) if ranged else f"{row.samples_per_s:,.0f}",
            "" if way.peak_bytes is None else format_bytes(way.peak_bytes),
            "" if way.peak_bytes is None else "yes" if way.fits else "no",
            row.bottleneck,
        )
        before = row.workers
    return table


def _between(first: str, last: str) -> str:
    """Two names in few columns: what they share is said once."""
    if first == last:
        return printable(first)
    shared = first.rpartition(".")[0]
    short = last.removeprefix(f"{shared}.") if shared and last.startswith(f"{shared}.") else last
    text = f"{first} … {short}"
    return printable(text if len(text) <= _MOST_NAME else f"…{text[1 - _MOST_NAME :]}")
