"""How tables of the terminal look, and how they are fitted to its width."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WINNER = "bold green"
"""The style of the row to take."""
_SHORTEST_NAME = 12


def table_of(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str | None = None,
    *,
    left: Set[str] = frozenset(),
    **style: Any,
) -> Table:
    """Figures stand to the right, what is in `left` to the left. A column with nothing in it is left out."""
    table = plain_table(title, **style)
    shown = [index for index, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    for index in shown:
        table.add_column(headings[index], justify="left" if headings[index] in left else "right")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def plain_table(title: str | None = None, **style: Any) -> Table:
    plain = {"header_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False, "show_edge": False}
    return Table(title=title, title_justify="left", **{**plain, **style})


def fitted_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], title: str, *, left: Set[str], names: int, width: int | None
) -> Table:
    """As `table_of`; where it takes more columns than `width`, cells of the column `names` leave out the last name of
    several, and the end of the first: `a … z (26)` is then `a … (26)`."""

    def table_with(cells: Sequence[str]) -> tuple[Table, int]:
        whole = [(*row[:names], cell, *row[names + 1 :]) for row, cell in zip(rows, cells, strict=True)]
        table = table_of(headings, whole, title, left=left)
        return table, 0 if width is None else natural_width(table) - width

    cells = [row[names] for row in rows]
    table, over = table_with(cells)
    if over > 0:
        cells = [re.sub(r" … .* (\(\d+\))$", r" … \1", cell) for cell in cells]
        table, over = table_with(cells)
    if over > 0:
        room = max(max(map(len, cells)) - over, _SHORTEST_NAME)
        table, _ = table_with([_cut(cell, room) for cell in cells])
    return table


def _cut(name: str, room: int) -> str:
    """
    >>> _cut("encoder.layer.0.weight … (26)", 20), _cut("encoder.layer.0.weight", 12), _cut("fc", 2)
    ('encoder.layer.… (26)', 'encoder.lay…', 'fc')
    """
    if len(name) <= room:
        return name
    first, mark, count = name.partition(" … ")
    ending = f"… {count}" if mark else "…"
    return first[: max(room - len(ending), 1)] + ending


def natural_width(table: Table) -> int:
    """The columns of a terminal that it takes without wrapping."""
    # Without a height rich takes a dumb terminal's 80 columns.
    console = Console(width=1000, height=25)
    return Measurement.get(console, console.options, table).maximum


def folded(parts: list[str], width: int, between: str = "") -> list[str]:
    """Parts on as few lines as they take, none of them broken.

    >>> folded(["tp=4+", "dp=8+", "pp=2"], 10)
    ['tp=4+dp=8+', 'pp=2']
    """
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(between) + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += between + part
    return lines
