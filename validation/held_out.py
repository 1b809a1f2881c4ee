"""Errors as they are for somebody whose cluster and model nobody has seen: what `backbeat/zoo/checked.json` holds.

A row informs with the error that it has when its cluster and its model family took no part in choosing constants. The
shares of their short-burst rates that GPUs sustain (`SUSTAINED`) are chosen again without them, in one way for all: the
one share for products and attention alike, of a grid, with the smallest median error. Where nobody else's rows are
left, a GPU has the share of one that nobody has seen. Rows that helped to choose another constant, which is not chosen
again, inform nothing (`Case.informs`), and neither do reported rows.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from validation import measures
from validation.ask import SHARES, CannotAsk, sustaining
from validation.cases import Case
from validation.figures import Judged
from validation.run import SCALING, Run, Runner, asker

GRID = tuple(round(0.5 + 0.05 * step, 2) for step in range(11))
FEWEST = 3
"""Rows that choose a share."""
CELL = ("accelerator", "scale", "parallelism", "precision", "framework")


def kin(family: str) -> str:
    """Models of one family, whatever their size.

    >>> kin("gpt-181b"), kin("llama31_8b"), kin("Qwen3-235B-A22B"), kin("deepseekv3")
    ('gpt', 'llama', 'qwen', 'deepseek')
    """
    found = re.match(r"[a-z]+?(?=v?\d|[^a-z]|$)", family.lower())
    return found[0] if found else family


def choosers(run: Run) -> dict[str, list[Case]]:
    """Development rows that helped to choose the shares of each GPU."""
    found: dict[str, list[Case]] = defaultdict(list)
    for table in run.tables:
        gpus = {name.split()[1] for name in table.chose if name.split()[0] == SHARES}
        for case in run.cases[table.name]:
            if case.accelerator in gpus and case.split == "development" and case.seconds and not case.unasked:
                found[case.accelerator].append(case)
    return found


def _over_grid(case: Case) -> list[float]:
    """Its error with each share."""
    errors = []
    for share in GRID:
        with sustaining(case.accelerator, (share, share)):
            try:
                seconds = asker(case.table).ask(case, "shape", quick=True).seconds
            except CannotAsk:
                return []
            errors.append(abs(seconds / (case.seconds or 1.0) - 1))
    return errors


def _asked_with(part: tuple[Case, tuple[float, float] | None]) -> Judged:
    case, shares = part
    with sustaining(case.accelerator, shares):
        return Judged(case=case, route="shape", answer=asker(case.table).ask(case, "shape"))


def share_without(case: Case, others: Sequence[tuple[Case, list[float]]]) -> tuple[float, float] | None:
    """Chosen by the rows of other clusters and families; None where too few are left."""
    left = [
        errors for other, errors in others
        if errors and other.cluster != case.cluster and kin(other.family) != kin(case.family)
    ]  # fmt: skip
    if len(left) < FEWEST:
        return None
    best = min(range(len(GRID)), key=lambda place: statistics.median(errors[place] for errors in left))
    return GRID[best], GRID[best]


def held_out(found: Sequence[Judged], runner: Runner) -> list[Judged]:
    """The rows that inform, each with the answer that it has where its cluster and family took no part."""
    chosen = choosers(runner.run)
    every = [case for cases in chosen.values() for case in cases]
    errors = dict(zip([(case.table, case.id) for case in every], runner.each(_over_grid, every), strict=True))
    others = {gpu: [(case, errors[case.table, case.id]) for case in cases] for gpu, cases in chosen.items()}
    told = [one for one in found if one.error is not None and one.case.kind == "step" and one.case.informs]
    told = [one for one in told if one.route != SCALING]
    kept, again = [], []
    for one in told:
        own = others.get(one.case.accelerator, []) if one.route.startswith("shape") else []
        part = any(case.cluster == one.case.cluster or kin(case.family) == kin(one.case.family) for case, _ in own)
        if not part:
            kept.append(one)
        elif one.route == "shape":
            again.append((one.case, share_without(one.case, own)))
    return [*kept, *runner.each(_asked_with, again)]


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
