"""What the judge finds, and what it says of any group of it: errors, ranges, choices, memory, fits."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validation import measures
from validation.ask import Answer
from validation.case import Case
from validation.cases import Table

CELLS: dict[str, Callable[[Case], str]] = {
    "parallelism": lambda case: case.parallelism,
    "scale": lambda case: case.scale,
    "gpu": lambda case: case.accelerator,
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One case, asked by one route."""

    case: Case
    route: str
    answer: Answer | None = None
    reason: str = ""
    """Why there is no answer."""

    @property
    def error(self) -> float | None:
        if self.answer is None or self.case.seconds is None or self.case.status != "ran":
            return None
        return self.answer.seconds / self.case.seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.answer is None or self.answer.memory_bytes is None or self.case.memory_bytes is None:
            return None
        return self.answer.memory_bytes / self.case.memory_bytes - 1


def figures(found: Sequence[Judged], noise: float | None = None) -> dict[str, Any]:
    """Of any cases: errors, ranges, choices, memory, fits, and what could not be asked."""
    ran = [one for one in found if one.error is not None]
    made: dict[str, Any] = {}
    if ran:
        made.update(measures.errors([one.error for one in ran if one.error is not None]))
        if noise is not None:
            made["noise"] = noise
        answers = [(one.answer, one.case.seconds) for one in ran]
        held = [(one.low_s, one.high_s, seconds) for one, seconds in answers if one and one.low_s and one.high_s]
        if held:
            made.update(measures.ranges(held))  # type: ignore[arg-type]
        made.update(measures.choosing(ways_of(ran)))
    memory = [one.memory_error for one in found if one.memory_error is not None]
    if memory:
        made["memory"] = measures.errors(memory)
    fits = [(one.answer.fits, one.case.status == "ran") for one in found if one.answer and one.answer.fits is not None]
    if any(not ran for _, ran in fits):
        made["fits"] = measures.fits(fits)
    unasked = Counter(one.reason for one in found if one.answer is None)
    if unasked:
        made["unasked"] = dict(unasked.most_common())
    return made


def ways_of(ran: Sequence[Judged]) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured seconds of each way of each job; the middle one of repeats."""
    ways: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in ran:
        if one.case.kind == "step":
            ways[f"{one.route}/{one.case.table}/{one.case.job}", one.case.way].append(one)
    jobs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (job, _), repeats in ways.items():
        predicted = [one.answer.seconds for one in repeats if one.answer]
        measured = [one.case.seconds for one in repeats if one.case.seconds]
        jobs[job].append((statistics.median(predicted), statistics.median(measured)))
    return jobs


def noise_of(table: Table, rows: Sequence[Case]) -> float | None:
    """What the rows state, or as far as equal rows lie apart, or what the table states."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case in rows:
        if case.seconds is not None and case.status == "ran":
            groups[f"{case.job} {case.way} {case.parallelism} {case.m} {case.n} {case.k} {case.bytes}"].append(
                case.seconds
            )
    stated = [case.repeat for case in rows if case.repeat is not None]
    return measures.share_of(stated, 0.5) if stated else table.noise or measures.noise(list(groups.values()))


def by_table(tables: Sequence[Table], cases: Mapping[str, Sequence[Case]], found: Sequence[Judged]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for table in tables:
        noise = noise_of(table, cases[table.name])
        for route in dict.fromkeys(one.route for one in found if one.case.table == table.name):
            own = [one for one in found if (one.case.table, one.route) == (table.name, route)]
            if own:
                made.setdefault(table.name, {})[route] = figures(own, noise)
    return made


def subject_of(one: Judged) -> str:
    """What is compared across tables: steps by one route, or operators, or collectives; these by some routes apart."""
    if one.case.kind == "step":
        return one.route
    return f"{one.case.kind}s" if one.route in ("profile", "analytic") else f"{one.case.kind}s, {one.route}"


def by_cell(found: Sequence[Judged]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for subject in dict.fromkeys(map(subject_of, found)):
        for name, cell in CELLS.items():
            groups: dict[str, list[Judged]] = defaultdict(list)
            for one in found:
                if subject_of(one) == subject:
                    groups[cell(one.case)].append(one)
            made.setdefault(subject, {})[name] = {key: figures(groups[key]) for key in sorted(groups)}
    return made
