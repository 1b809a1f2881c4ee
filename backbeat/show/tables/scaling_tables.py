"""Tables of how a job scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from backbeat.model import Prediction, Profile
from backbeat.show.study import Study
from backbeat.show.tables.terminal_table import WINNER, natural_width, plain_table, table_of
from backbeat.show.words import numbers
from backbeat.units import format_bytes, format_seconds, printable


def scaling_tables(predictions: Sequence[Prediction], *, samples: int, width: int) -> list[Table]:
    """Every (workers, strategy) in a row, the fastest of each worker count marked; two tables of half the columns each
    where one is wider than `width`."""
    headings = ["scaling", "busy–quiet", "iteration", "p10–p90", "exposed", "over bound", f"GPU-h/{_count(samples)}"]
    headings += ["samples/s", "limited by"]
    # Strategies that print alike share a row.
    alike: _Alike = {}
    for one in predictions:
        alike.setdefault(one.workers, {}).setdefault(_cells(one, samples), []).append(one)
    whole = _scaling_table(alike, headings)
    if natural_width(whole) <= width:
        return [whole]
    halves = []
    for first in sorted(range(3, len(headings) - 1), key=lambda index: abs(index - headings.index("exposed"))):
        halves.append([_scaling_table(alike, headings[:first]), _scaling_table(alike, headings[first:], first)])
        if max(map(natural_width, halves[-1])) <= width:
            return halves[-1]
    return halves[0]


_Alike = dict[int, dict[tuple[str, ...], list[Prediction]]]
"""For each number of workers the cells of a row, and those that share it."""


def _scaling_table(alike: _Alike, headings: Sequence[str], first: int = 0) -> Table:
    """These headings' columns, as far as they hold anything. `first` is where their cells begin in a row of `alike`."""
    every = [cells for rows in alike.values() for cells in rows]
    indices = [index for index in range(first, first + len(headings)) if any(cells[index] for cells in every)]
    table = plain_table()
    for heading in ("GPUs", "strategy", *(headings[index - first] for index in indices)):
        left = heading in ("strategy", "limited by")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "strategy", overflow="fold")
    for count, rows in alike.items():
        best = numbers.fastest([one for ones in rows.values() for one in ones])[count]
        for row_index, (cells, ones) in enumerate(rows.items()):
            # Where all are equal nobody has won.
            winner = len(rows) > 1 and best in ones
            # A second table has no mark: the first one has it.
            names = ", ".join(printable(one.strategy) for one in ones) + (" ◀" if winner and not first else "")
            shown = (cells[index] for index in indices)
            table.add_row("" if row_index else str(count), names, *shown, style=WINNER if winner else None)
        table.add_section()
    return table


def _cells(prediction: Prediction, samples: int) -> tuple[str, ...]:
    band = prediction.band
    return (
        f"{prediction.scaling_factor:.1%}",
        numbers.scaling_range(prediction, 1),
        format_seconds(prediction.iteration_s) + ("*" if prediction.extrapolated else ""),
        f"{band.p10_s * 1e3:.1f}–{band.p90_s * 1e3:.1f} ms" if band else "",
        format_seconds(prediction.exposed_s),
        f"{numbers.over_bound(prediction):+.1%}",
        _three_figures(numbers.gpu_hours(prediction, samples)),
        numbers.format_number(prediction.samples_per_s),
        prediction.bottleneck,
    )


_LONG_NAME = 10
"""Headings above this many letters are broken."""


def answer_table(study: Study, price: float | None) -> Table:
    """One row for each number of GPUs: stock DDP or what the job runs today, the others beside it, and what limits the
    fastest.

    `best` is headed as planned where no other plan stands beside stock DDP or frameworks. The gain is that of the
    fastest of them, and negative where stock DDP is faster. What is too big for the device's memory, or left out at a
    number of GPUs, shows no figure. Where the network has a band, the fastest's scaling is shown from a busy cluster to
    a quiet one, too. Neighbouring rows that print alike share one.
    """
    stock, too_big = study.baseline, study.too_big
    others = [label for label in study.curves if label != stock]
    compared = stock not in too_big and not too_big >= set(others)
    at = {label: {point.workers: point for point in curve} for label, curve in study.curves.items()}
    best = {point.workers: point for point in study.frontier}

    def share(label: str, count: int) -> str:
        if label in too_big:
            return "too big"
        return f"{at[label][count].scaling_factor:.1%}" if count in at[label] else "–"

    def cells_at(count: int) -> tuple[str, ...]:
        winner, gain = best[count], ""
        rivals = [at[label][count] for label in others if label not in too_big and count in at[label]]
        if compared and rivals:
            shortest = min(one.iteration_s for one in rivals)
            more = at[stock][count].iteration_s / shortest - 1 if shortest > 0 else 0.0
            gain = "none" if abs(more) < numbers.SAME else f"{more:+.1%}"
        shares = (share(label, count) for label in (stock, *others))
        mark, cost = "*" if winner.extrapolated else "", _cost(winner, study.given, price)
        return (mark, *shares, gain, numbers.scaling_range(winner), cost, winner.bottleneck)

    rows = []
    for (mark, *cells), alike in groupby(best, key=cells_at):
        counts = list(alike)
        rows.append((("" if len(counts) == 1 else f"{counts[0]}..") + f"{counts[-1]}{mark}", *cells))
    # A framework has no plan.
    names = [_broken(printable(label)) for label in others]
    if [label for label in others if label in study.plans] == ["best"]:
        names[others.index("best")] = "planned"
    headings = ["GPUs", "DDP" if stock == "ddp" else _broken(stock), *names, "gain", "busy–quiet"]
    table = table_of([*headings, f"$/B {numbers.unit(study.given)}", "limited by"], rows, left={"limited by"})
    for column in table.columns:
        column.vertical = "bottom"
    return table


def strategies_table(study: Study, price: float | None) -> Table:
    """One row for each strategy and number of GPUs. Where the network has a band, it takes the place of samples/s; with
    a price, cost takes that of the limit."""
    ranged = any(numbers.scaling_range(row.prediction) for row in study.rows)
    cells = []
    before = None
    for row in study.rows:
        found, peak = row.prediction, row.peak_bytes
        cells.append(
            (
                "" if row.workers == before else f"{row.workers}{'*' if found.extrapolated else ''}",
                printable(row.label),
                format_seconds(found.iteration_s),
                f"{found.scaling_factor:.1%}",
                numbers.scaling_range(found) if ranged else numbers.format_number(found.samples_per_s),
                "" if peak is None else format_bytes(peak),
                "" if row.fit is None else row.fit.rating,
                _cost(found, study.given, price) or found.bottleneck,
            )
        )
        before = row.workers
    rate = "busy–quiet" if ranged else "samples/s"
    last = "limited by" if price is None else f"$/B {numbers.unit(study.given)}"
    headings = ("GPUs", "strategy", "step", "scaling", rate, "memory", "fits", last)
    return table_of(headings, cells, left={"strategy", "fits", "limited by"})


def _cost(row: Prediction, profile: Profile, price: float | None) -> str:
    """Money for a billion tokens or samples; empty without a price."""
    return "" if price is None else numbers.format_money(numbers.per_billion(row, profile, price)).removeprefix("$")


def _broken(name: str) -> str:
    """A long name over several lines."""
    return name if len(name) <= _LONG_NAME else name.replace("-", "-\n")


def _three_figures(value: float) -> str:
    """
    >>> _three_figures(1234.5), _three_figures(999.7), _three_figures(0.5)
    ('1,234', '1,000', '0.500')
    """
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def _count(samples: int) -> str:
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if samples >= scale and samples % scale == 0:
            return f"{samples // scale}{unit}"
    return str(samples)
