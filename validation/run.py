"""All cases of some tables asked, in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from validation import peers
from validation.ask import OWN, Answer, Asker, CannotAsk
from validation.case import Case
from validation.cases import Table
from validation.figures import Judged

SOME = 16
"""Cases that a process takes at a time."""
SCALING = "perfect scaling"
"""A route that asks nothing: what a prediction has to beat."""


@dataclass(frozen=True)
class Run:
    """Which tables are asked, and where their rows are."""

    tables: tuple[Table, ...]
    truth: Path | None
    half: str
    peers: tuple[str, ...] = ()
    """Other predictors that are installed: routes of every table that is asked by shape."""

    def routes(self, table: Table) -> tuple[str, ...]:
        return (*table.routes, *(self.peers if "shape" in table.routes else ()))

    @cached_property
    def cases(self) -> dict[str, list[Case]]:
        """Of both halves: one run of a system may scale all others, whichever half it is in."""
        return {one.name: one.cases(self.truth) for one in self.tables}

    @cached_property
    def by_id(self) -> dict[tuple[str, str], Case]:
        return {(name, case.id): case for name, cases in self.cases.items() for case in cases}

    def asked(self) -> list[tuple[Table, str, str, list[Case]]]:
        """What is asked together: the cases of one system by one route."""
        found = []
        for table in self.tables:
            for route in self.routes(table):
                groups: dict[str, list[Case]] = defaultdict(list)
                for case in self.cases[table.name]:
                    if case.split == self.half:
                        groups[case.group].append(case)
                found += [(table, route, of, group) for of, group in groups.items()]
        return found


class Runner:
    """Processes that share a run."""

    def __init__(self, run: Run, processes: int) -> None:
        global RUN
        RUN = run
        self.run = run
        _ = run.by_id, [table.name for table in run.tables]
        self._pool = multiprocessing.get_context("fork").Pool(processes)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()

    def each(self, task: Callable[[Any], Any], parts: Sequence[Any]) -> Iterable[Any]:
        """In order."""
        return self._pool.imap(task, parts)

    def judged(self) -> list[Judged]:
        """All cases of the run's half."""
        tasks = self.run.asked()
        systems = [(table.name, route, of) for table, route, of, _ in tasks if needs_run(route)]
        factors = dict(zip(systems, self.each(calibrated, systems), strict=True))
        parts = [
            (table.name, route, [case.id for case in group[at : at + SOME]], factors.get((table.name, route, of)))
            for table, route, of, group in tasks for at in range(0, len(group), SOME)
        ]  # fmt: skip
        return [one for some in self.each(_judged, parts) for one in some]


RUN: Run
"""What processes share."""


def asker(name: str) -> Asker:
    return Asker(next(one for one in RUN.tables if one.name == name), RUN.truth)


def calibrated(system: tuple[str, str, str]) -> list[tuple[Case, float]]:
    """The runs that a system's computation is scaled by, with their factors."""
    name, route, group = system
    asks = asker(name)
    own = [case for case in RUN.cases[name] if case.group == group and case.seconds is not None and not case.unasked]
    every = [case for case in own if asks.asks(case, route)]
    found = []
    for case in known_runs(asks, every, route):
        with contextlib.suppress(CannotAsk):
            found.append((case, 1.0 if route == SCALING else asks.fitted(case, route)))
    return found


def known_runs(asks: Asker, every: Sequence[Case], route: str) -> list[Case]:
    """Of one system: its runs on the fewest GPUs of one node; of layouts the development run that computes most."""
    base = route.partition(",")[0]
    if base != "shape":
        fewest = min((case.gpus for case in every), default=0)
        return [case for case in every if case.gpus == fewest <= 8]
    computing: list[tuple[float, str, Case]] = []
    for case in every if len(every) > 1 else ():
        if case.split == "development":
            with contextlib.suppress(CannotAsk):
                computing.append((asks.ask(case, base).computing, case.id, case))
    return [max(computing, key=lambda one: one[:2])[2]] if computing else []


def _judged(part: tuple[str, str, list[str], Any]) -> list[Judged]:
    name, route, ids, known = part
    found = (asked(asker(name), RUN.by_id[name, each], route, known) for each in ids)
    return [one for one in found if one is not None]


def asked(asks: Asker, case: Case, route: str, known: Sequence[tuple[Case, float]] | None) -> Judged | None:
    """None where a case has nothing of its own to be asked with, or is itself what others are scaled by."""
    if not asks.asks(case, route):
        return None
    if case.unasked:
        return Judged(case=case, route=route, reason=case.unasked)
    factor = 1.0
    if needs_run(route):
        if not known or any(case.id == one.id for one, _ in known):
            return None
        run, factor = min(known, key=lambda one: unlike(case, one[0]))
        if route == SCALING:
            return Judged(case=case, route=route, answer=Answer(seconds=scaled_perfectly(case, run)))
        if route.startswith("profile"):
            factor *= case.micro_batch / run.micro_batch
    peer = peers.adapter(route) if route in peers.NAMES else None
    try:
        if peer is not None:
            return Judged(case=case, route=route, answer=peer.ask(case, asks.shape(case)))
        return Judged(case=case, route=route, answer=asks.ask(case, route, factor))
    except CannotAsk as why:
        return Judged(case=case, route=route, reason=str(why))


def scaled_perfectly(case: Case, run: Case) -> float:
    """What a prediction has to beat: every GPU as many sequences a second as in a run on one node."""
    assert run.seconds is not None
    return run.seconds * (case.global_batch / case.gpus) / (run.global_batch / run.gpus)


def needs_run(route: str) -> bool:
    return route == SCALING or route.endswith(OWN)


def unlike(case: Case, other: Case) -> tuple[Any, ...]:
    """How little one run says of another's computation."""
    more = max(case.micro_batch, other.micro_batch) / min(case.micro_batch, other.micro_batch)
    return (case.recompute != other.recompute, more, other.gpus)
