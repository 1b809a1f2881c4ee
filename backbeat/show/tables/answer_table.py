"""The rows of an answer as one table of 80 columns: of the decision's size all that matters, of others the best."""

from __future__ import annotations

from rich.table import Table

from backbeat.answer.answer import Answer
from backbeat.answer.row import AnswerRow
from backbeat.model.rule import SPLITS
from backbeat.show.tables.terminal_table import natural_width, table_of
from backbeat.show.words.decision_words import mesh_words
from backbeat.show.words.numbers import format_count, format_hours, format_money
from backbeat.units import SCREEN, format_bytes, format_seconds, printable

MOST_ROWS = 22
_LAYOUTS = 3
"""Layouts of each kind, the best ones."""


def shown_rows(answer: Answer, most: int = MOST_ROWS) -> list[AnswerRow]:
    """What stands in the table. Of HSDP the best and its neighbours, of layouts the best, with tp and with pp."""
    taken, sizes = answer.taken, answer.sizes
    if answer.question.ways:
        return _limited(list(answer.rows), answer, most)
    here = answer.rows_at(taken.gpus)
    groups = sorted((row for row in here if row.way.startswith("hsdp:")), key=lambda row: int(row.way[5:]))
    fastest = min(groups, key=lambda row: (not row.possible, row.seconds), default=None)
    place = next((at for at, row in enumerate(groups) if row is fastest), 0)
    near = {id(row) for row in groups[max(place - 1, 0) : place + 2]}
    layouts = [row for row in here if any(row.mesh.get(name, 1) > 1 for name in SPLITS)]
    kept = {id(row) for row in layouts[:_LAYOUTS]}
    for name in SPLITS:
        kept |= {id(row) for row in [row for row in layouts if row.mesh.get(name, 1) > 1][:1]}
    unlisted = {id(row) for row in groups if id(row) not in near} | {id(row) for row in layouts if id(row) not in kept}
    unlisted -= {id(answer.best)}
    rows = []
    for size in sizes:
        if size == taken.gpus:
            rows += [row for row in here if id(row) not in unlisted]
        else:
            rows += answer.rows_at(size)[:1]
    return _limited(rows, answer, most)


def _limited(rows: list[AnswerRow], answer: Answer, most: int) -> list[AnswerRow]:
    if len(rows) <= most:
        return rows
    first = {id(row) for size in answer.sizes for row in answer.rows_at(size)[:1]}
    others = [row for row in rows if id(row) not in first]
    left = {id(row) for row in others[: max(most - len(first), 0)]}
    return [row for row in rows if id(row) in first or id(row) in left]


def answer_table(answer: Answer, most: int = MOST_ROWS) -> Table:
    """`*` marks what is level with the fastest; a range is of the median step."""
    rows = shown_rows(answer, most)
    level = {id(answer.rows[index].prediction) for index in answer.level}
    several = len(answer.sizes) > 1
    cells: list[tuple[str, ...]] = []
    before = None
    for row in rows:
        one = row.prediction
        low, high = row.range_s
        tokens = one.tokens_per_s if one.tokens_per_s is not None else one.samples_per_s
        elsewhere = "" if one.runs_by in (None, one.framework) else one.runs_by
        cells.append(
            (
                (str(row.gpus) if row.gpus != before else "") if several else "",
                printable(row.way) + ("*" if id(one) in level and len(level) > 1 else ""),
                _mesh(row),
                format_seconds(row.step_s),
                f"{_short(low)}–{_short(high)}" if high > low * 1.0005 else "",
                _money(row) if one.cost is not None else format_count(tokens),
                "" if row.peak is None else format_bytes(row.peak) + _FITS.get(str(one.fits), ""),
                elsewhere,
            )
        )
        before = row.gpus
    rate = "tokens/s" if any(row.tokens_per_s is not None for row in rows) else "samples/s"
    if any(row.cost is not None for row in rows):
        rate = "cost" if any(row.cost is not None and row.cost.money is not None for row in rows) else "lasts"
    headings = ("GPUs", "way", "mesh", "step", "p10–p90, ms", rate, "memory", "run by")
    left = {"way", "mesh", "run by"}
    table = table_of(headings, cells, left=left)
    for dropped in (7, 4, 2):
        if natural_width(table) <= SCREEN:
            break
        cells = [(*row[:dropped], "", *row[dropped + 1 :]) for row in cells]
        table = table_of(headings, cells, left=left)
    return table


_FITS = {"no": " no", "tight": " tight"}


def _mesh(row: AnswerRow) -> str:
    """What a way's own word does not say."""
    return mesh_words({name: size for name, size in row.mesh.items() if name not in SPLITS})


def _short(seconds: float) -> str:
    """
    >>> _short(0.5654), _short(2.5), _short(0.0021)
    ('565', '2500', '2.1')
    """
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _money(row: AnswerRow) -> str:
    cost = row.cost
    return format_hours(cost.hours) if cost.money is None else format_money(cost.money)
