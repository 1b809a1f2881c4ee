"""Measured units of an FSDP2 job as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from backbeat.importers.fsdp_units import MeasuredUnit
from backbeat.units import format_bytes, format_seconds, printable


def units_table(units: Sequence[MeasuredUnit]) -> Table:
    """Units in the order of forward."""
    table = Table(
        title=f"{len(units)} units, medians",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    reduced = any(unit.reduce_s is not None for unit in units)
    headings = ["unit", "gathers", "all-gather", "takes", "reduce-scatter", "takes"]
    for heading in (*headings, *(["all-reduce"] if reduced else []), "exposed", "overlap"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for unit in units:
        table.add_row(
            printable(unit.name),
            f"{unit.gathers:g}",
            _bytes(unit.gather_bytes),
            _seconds(unit.gather_s),
            _bytes(unit.scatter_bytes),
            _seconds(unit.scatter_s),
            *([_seconds(unit.reduce_s)] if reduced else []),
            _seconds(unit.exposed_s),
            "" if unit.overlap is None else f"{unit.overlap:.0%}",
        )
    return table


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
