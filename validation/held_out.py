"""Errors as they are for somebody whose cluster and model nobody has seen: what `backbeat/zoo/checked.json` holds.

A row informs with the error that it has when its cluster and its model family took no part in choosing constants. The
`chose` of a table.json names the constants that the table's development rows helped to choose. `CONSTANTS` says how
each is chosen again: the value of its grid with the smallest median error on the rows of other clusters and families.
Where fewer than `FEWEST` of these are left, it is as it would be if nobody had measured: `unseen`.

Rows that made a rule which is not chosen again say so (`Case.informs_nothing`), and neither do reported rows inform.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from validation import measures
from validation.ask import CannotAsk, holding
from validation.case import Case
from validation.figures import Judged
from validation.replays import SIMPLER
from validation.run import SCALING, Run, Runner, asked, asker, calibrated, needs_run

FEWEST = 3
"""Rows that choose a value."""
CELL = ("accelerator", "scale", "parallelism", "precision", "framework")
Values = Mapping[str, Any]
Errors = list[float]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """How one is chosen again."""

    grid: tuple[Any, ...] = ()
    unseen: Any = None
    """As it would be if nobody had measured."""
    simulated: bool = False
    """Whether it takes events to see what a value does."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Of one whose docstring has all that it comes from: a line through what is left without a cluster."""


CONSTANTS = {
    "sustained": Constant(grid=tuple(round(0.6 + 0.05 * step, 2) for step in range(9)), unseen=1.0),
    "pass_s": Constant(grid=tuple(step * 1e-3 for step in range(0, 13, 2)), unseen=0.0),
    "unfused": Constant(grid=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), unseen=1.0),
    "attention_share": Constant(grid=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), unseen=1.0),
    "copies_slices": Constant(grid=(False, True), unseen=False),
    "streams": Constant(grid=("direction", "pair", "rank"), unseen="pair", simulated=True),
    "waits": Constant(without={"vTrain's A100s": (23e-6, 9.1e-6), "SimuMax's B200": (34e-6, 7.1e-6)}),
}
"""By name, before the GPU that it is of (`sustained h100`) or behind the framework (`nanotron.unfused`). Nobody having
measured, a GPU sustains the rates of short bursts, a framework has what `Framework` has by default, and stages send as
torch does on NCCL. `waits` are layouts' small collectives. What frameworks lose beside what a GPU does
(`Framework.sustained`) is chosen again with the GPU's own: answers have their product."""


def constant(name: str) -> Constant | None:
    """None of what a table names in words alone: a rule, which is not chosen again."""
    return CONSTANTS.get(name.split()[0] if " " in name else name.rpartition(".")[2])


def concerns(name: str, case: Case) -> bool:
    """Whether the case is answered with this constant."""
    if name == "waits":
        return case.tp > 1
    if " " in name:
        return asker(case.table).gpu(case).short_name == name.split()[1]
    framework, _, told = name.partition(".")
    known = asker(case.table).based_on(case.framework or "")
    return framework in known and (told != "streams" or case.pp > 1)


def kin(family: str) -> str:
    """Models of one family, whatever their size.

    >>> kin("gpt-181b"), kin("llama31_8b"), kin("Qwen3-235B-A22B"), kin("deepseekv3")
    ('gpt', 'llama', 'qwen', 'deepseek')
    """
    found = re.match(r"[a-z]+?(?=v?\d|[^a-z]|$)", family.lower())
    return found[0] if found else family


def choosers(run: Run) -> dict[str, list[Case]]:
    """Development rows that helped to choose each constant."""
    found: dict[str, list[Case]] = {}
    for table in run.tables:
        for name in table.chose:
            if constant(name) is not None:
                rows = (case for case in run.cases[table.name] if case.split == "development" and case.kind == "step")
                own = [case for case in rows if case.seconds and not case.unasked and concerns(name, case)]
                found.setdefault(name, []).extend(own)
    return found


def took_part(case: Case, name: str, rows: Sequence[Case]) -> bool:
    near = (one.cluster == case.cluster or kin(one.family) == kin(case.family) for one in rows)
    told = constant(name)
    return case.cluster in told.without if told and told.without else any(near)


def others(case: Case, rows: Sequence[Case]) -> list[Case]:
    return [one for one in rows if one.cluster != case.cluster and kin(one.family) != kin(case.family)]


def chosen_again(case: Case, name: str, rows: Sequence[Case], errors: Mapping[tuple[str, str, str], Errors]) -> Any:
    told = constant(name)
    assert told is not None
    if told.without:
        return told.without[case.cluster]
    left = [found for one in others(case, rows) if (found := errors.get((name, one.table, one.id)))]
    if len(left) < FEWEST:
        return told.unseen
    return told.grid[min(range(len(told.grid)), key=lambda at: statistics.median(found[at] for found in left))]


def _over_grid(part: tuple[str, Case]) -> Errors:
    """The case's error with each value; nothing where it cannot be asked."""
    name, case = part
    told, errors = constant(name), []
    for value in told.grid if told else ():
        with holding({name: value}):
            try:
                seconds = asker(case.table).ask(case, "shape", quick=not told.simulated).seconds
            except CannotAsk:
                return []
            errors.append(abs(seconds / (case.seconds or 1.0) - 1))
    return errors


def _asked_with(part: tuple[Case, str, Values]) -> Judged | None:
    case, route, values = part
    with holding(values):
        known = _runs(case.table, route, case.group, tuple(values.items())) if needs_run(route) else None
        return asked(asker(case.table), case, route, known)


@cache
def _runs(table: str, route: str, group: str, _values: tuple[Any, ...]) -> Any:
    """A system's own runs, with the factors that they have under these values."""
    return calibrated((table, route, group))


def held_out(found: Sequence[Judged], runner: Runner) -> list[Judged]:
    """The rows that inform, each with the answer that it has where its cluster and family took no part."""
    chose = choosers(runner.run)
    told = [one for one in found if one.error is not None and one.case.kind == "step" and not one.case.informs_nothing]
    told = [one for one in told if one.route not in (SCALING, *SIMPLER)]
    kept: list[Judged] = []
    again: list[tuple[Judged, list[str]]] = []
    for one in told:
        shaped = one.route.partition(",")[0] == "shape"
        names = [
            name for name in chose if shaped and concerns(name, one.case) and took_part(one.case, name, chose[name])
        ]
        (again.append((one, names)) if names else kept.append(one))
    needed: dict[tuple[str, str, str], tuple[str, Case]] = {}
    for one, names in again:
        for name in names:
            left = others(one.case, chose[name])
            needed.update(((name, row.table, row.id), (name, row)) for row in left if len(left) >= FEWEST)
    errors = dict(zip(needed, runner.each(_over_grid, list(needed.values())), strict=True))
    parts = [
        (one.case, one.route, {name: chosen_again(one.case, name, chose[name], errors) for name in names})
        for one, names in again
    ]  # fmt: skip
    return [*kept, *(one for one in runner.each(_asked_with, parts) if one is not None)]


def left_out(run: Run) -> dict[str, list[str]]:
    """Why rows inform no range, and of which tables these are."""
    found: dict[str, set[str]] = defaultdict(set)
    for table in run.tables:
        for case in run.cases[table.name]:
            if case.informs_nothing and case.split == "development":
                found[case.informs_nothing].add(table.name)
    return {why: sorted(found[why]) for why in sorted(found)}


def checked(found: Sequence[Judged]) -> list[dict[str, Any]]:
    """By what was compared: how far off answers were."""
    cells: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for one in found:
        key = tuple(str(getattr(one.case, name) or "") for name in CELL)
        cells[(*key, one.route)].append(one)
    made = []
    for key in sorted(cells):
        rows = cells[key]
        errors = [one.error for one in rows if one.error is not None]
        over = sorted(1 / (1 + error) for error in errors)
        names = ("gpu", *CELL[1:], "route")
        told = {name: value for name, value in zip(names, key, strict=True) if value}
        told |= {"clusters": sorted({one.case.cluster for one in rows})}
        told |= {"families": sorted({kin(one.case.family) for one in rows})}
        spread = {"low": measures.share_of(over, 0.05), "high": measures.share_of(over, 0.95)}
        made.append(measures.rounded({**told, **measures.errors(errors), **spread}))
    return made
