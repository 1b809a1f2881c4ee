"""How far off every answer is, by table, parallelism, scale, GPU and route, on the measured cases of `cases/`.

    python validation/judge.py [TABLE …] [--rows] [--truth FOLDER] [--against record.json|COMMIT]
    python validation/judge.py --truth FOLDER --reported          # reads the other half, notes it, writes docs

Development rows alone are read, unless `--reported` says otherwise. Tables whose licence forbids a copy are read from
`--truth`; without it their figures are those of the record. Only a whole run with `--truth` writes: `record.json` and
`backbeat/zoo/checked.json` of development rows; with `--reported` each table's `reported.json`, a line of
`reported.log`, and the tables of docs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from validation import cases, measures  # noqa: E402
from validation.ask import OWN, Answer, Asker, CannotAsk  # noqa: E402
from validation.cases import Case, Table  # noqa: E402

SOME = 8
"""Cases that a process takes at a time."""
SCALING = "perfect scaling"
RECORD, LOG = HERE / "record.json", HERE / "reported.log"
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


@dataclass(frozen=True)
class Run:
    """Which tables are asked, and where their rows are."""

    tables: tuple[Table, ...]
    truth: Path | None
    half: str

    @cached_property
    def cases(self) -> dict[str, list[Case]]:
        """Of both halves: one run of a system may scale all others, whichever half it is in."""
        return {one.name: one.cases(self.truth) for one in self.tables}

    def asked(self) -> list[tuple[Table, str, str, list[Case]]]:
        """What is asked together: the cases of one system by one route."""
        found = []
        for table in self.tables:
            for route in table.routes:
                groups: dict[str, list[Case]] = defaultdict(list)
                for case in self.cases[table.name]:
                    if case.split == self.half:
                        groups[case.group].append(case)
                found += [(table, route, of, group) for of, group in groups.items()]
        return found


def judge(run: Run, processes: int) -> list[Judged]:
    """All cases of the run, asked in so many processes."""
    global RUN
    RUN = run
    tasks = run.asked()
    systems = [(table, route, of) for table, route, of, _ in tasks if needs_run(route)]
    factors: dict[tuple[str, str, str], Any] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        found = pool.imap_unordered(_calibrated, [(table.name, route, group) for table, route, group in systems])
        factors.update(found)
        parts = [
            (table.name, route, [case.id for case in group[at : at + SOME]], factors.get((table.name, route, of)))
            for table, route, of, group in tasks for at in range(0, len(group), SOME)
        ]  # fmt: skip
        return [one for some in pool.imap(_judged, parts, chunksize=1) for one in some]


RUN: Run
"""What processes share."""


def _asker(name: str) -> Asker:
    return Asker(next(one for one in RUN.tables if one.name == name), RUN.truth)


def _calibrated(system: tuple[str, str, str]) -> tuple[tuple[str, str, str], Any]:
    """The runs that a system's computation is scaled by, with their factors."""
    name, route, group = system
    asker = _asker(name)
    own = [case for case in RUN.cases[name] if case.group == group and case.seconds is not None and not case.unasked]
    every = [case for case in own if asker.asks(case, route)]
    found = []
    for case in known_runs(asker, every, route):
        try:
            found.append((case, 1.0 if route == SCALING else asker.fitted(case, route)))
        except CannotAsk:
            continue
    return system, found


def known_runs(asker: Asker, every: Sequence[Case], route: str) -> list[Case]:
    """Of one system: its runs on the fewest GPUs of one node; of layouts the development run that computes most."""
    base = route.partition(",")[0]
    if base != "shape":
        fewest = min((case.gpus for case in every), default=0)
        return [case for case in every if case.gpus == fewest <= 8]
    own = [case for case in every if case.split == "development"]
    if len(every) < 2:
        return []
    computing = {}
    for case in own:
        with contextlib.suppress(CannotAsk):
            computing[case.id] = asker.ask(case, base).computing
    own = [case for case in own if case.id in computing]
    if not own:
        return []
    return [max(own, key=lambda case: (computing[case.id], case.id))]


def _judged(part: tuple[str, str, list[str], Any]) -> list[Judged]:
    name, route, ids, known = part
    asker, wanted = _asker(name), set(ids)
    return [one for case in RUN.cases[name] if case.id in wanted for one in [_asked(asker, case, route, known)] if one]


def _asked(asker: Asker, case: Case, route: str, known: Sequence[tuple[Case, float]] | None) -> Judged | None:
    """None where a case has nothing of its own to be asked with, or is itself what others are scaled by."""
    factor = 1.0
    if not asker.asks(case, route):
        return None
    if needs_run(route):
        if not known or any(case.id == one.id for one, _ in known):
            return None
        run, factor = min(known, key=lambda one: unlike(case, one[0]))
        if route == SCALING:
            return Judged(case=case, route=route, answer=Answer(seconds=scaled_perfectly(case, run)))
        if route.startswith("profile"):
            factor *= case.micro_batch / run.micro_batch
    try:
        return Judged(case=case, route=route, answer=asker.ask(case, route, factor))
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
            groups[f"{case.job} {case.way} {case.m} {case.n} {case.k} {case.bytes}"].append(case.seconds)
    stated = [case.repeat for case in rows if case.repeat is not None]
    return measures.share_of(stated, 0.5) if stated else table.noise or measures.noise(list(groups.values()))


def by_table(run: Run, found: Sequence[Judged]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for table in run.tables:
        noise = noise_of(table, [case for case in run.cases[table.name] if case.split == run.half])
        for route in table.routes:
            own = [one for one in found if (one.case.table, one.route) == (table.name, route)]
            if own:
                made.setdefault(table.name, {})[route] = figures(own, noise)
    return made


def by_cell(found: Sequence[Judged]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for route in dict.fromkeys(one.route for one in found):
        for name, cell in CELLS.items():
            groups: dict[str, list[Judged]] = defaultdict(list)
            for one in found:
                if one.route == route:
                    groups[cell(one.case)].append(one)
            made.setdefault(route, {})[name] = {key: figures(groups[key]) for key in sorted(groups)}
    return made


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "n": lambda told: str(told.get("n", 0)),
    "median": lambda told: _share(told.get("median")),
    "p90": lambda told: _share(told.get("p90")),
    "bias": lambda told: _share(told.get("bias"), "+"),
    "noise": lambda told: _share(told.get("noise")),
    "inside": lambda told: _share(told.get("inside"), digits=0),
    "width": lambda told: f"{told['width']:.2f}" if "width" in told else "",
    "score": lambda told: f"{told['score']:.2f}" if "score" in told else "",
    "regret, p90": lambda told: f"{_share(told['regret'])}, {_share(told['regret p90'])}" if "regret" in told else "",
    "ratios": lambda told: _share(told.get("ratios")),
    "ranks": lambda told: f"{told['ranks']:.2f}" if told.get("ranks") is not None else "",
    "memory": lambda told: _share(told.get("memory", {}).get("median")),
    "fits": lambda told: f"{told['fits']['cost']:.2f}" if "fits" in told else "",
    "not asked": lambda told: str(sum(told.get("unasked", {}).values()) or ""),
}


def _share(value: float | None, sign: str = "", digits: int = 1) -> str:
    return "" if value is None else f"{value:{sign}.{digits}%}"


def markdown(title: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---|" * len(COLUMNS)
    for name, told in rows:
        yield f"| {name} | {' | '.join(column(told) for column in COLUMNS.values())} |"


def shown(record: Mapping[str, Any]) -> Iterator[str]:
    tables = [(f"{name}, {route}", told) for name, routes in record["tables"].items() for route, told in routes.items()]
    yield from markdown("table, route", tables)
    for route, cells in record["cells"].items():
        for cell, groups in cells.items():
            yield ""
            yield from markdown(f"{route}: {cell}", groups.items())
    yield ""
    for name, told in tables:
        for reason, count in told.get("unasked", {}).items():
            yield f"not asked, {name}: {count} x {reason}"
        if "fits" in told:
            yield f"fits, {name}: {told['fits']}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Figures of tables that are no longer what they were."""
    for name, routes in new["tables"].items():
        for route, told in routes.items():
            before = old.get("tables", {}).get(name, {}).get(route)
            if before is None:
                yield f"{name}, {route}: new"
                continue
            changed = [
                f"{key} {before.get(key)} -> {value}"
                for key, value in told.items() if not isinstance(value, dict) and before.get(key) != value
            ]  # fmt: skip
            if changed:
                yield f"{name}, {route}: {', '.join(changed)}"


def recorded(named: str) -> Any:
    """A record by its file, or as a commit has it."""
    if Path(named).exists():
        return json.loads(Path(named).read_text())
    done = _git("show", f"{named}:validation/record.json")
    if done is None:
        raise cases.CaseError(f"--against {named}: neither a file nor a commit with validation/record.json")
    return json.loads(done)


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def rows(found: Sequence[Judged]) -> Iterator[str]:
    for one in found:
        where = f"{one.case.table}, {one.route}: {one.case.id}"
        if one.answer is None:
            yield f"{where}: not asked: {one.reason}"
            continue
        parts = [f"error {one.error:+.1%}"] if one.error is not None else [one.case.status]
        if one.memory_error is not None:
            parts.append(f"memory {one.memory_error:+.1%}")
        if one.answer.fits is not None:
            parts.append("fits" if one.answer.fits else "does not fit")
        yield f"{where}: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all, unless some are named")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--reported", action="store_true", help="read the half that is set aside, and write it down")
    parser.add_argument("--truth", type=Path, metavar="FOLDER", help="where tables are that may not be copied")
    parser.add_argument("--against", metavar="RECORD", help="a record.json, or a commit that has one")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    try:
        chosen = [cases.table(name) for name in asked.tables or cases.names()]
        tables = tuple(one for one in chosen if not one.missing(asked.truth))
        run = Run(tables, asked.truth, "reported" if asked.reported else "development")
        found = judge(run, asked.processes)
        record = measures.rounded({"tables": by_table(run, found), "cells": by_cell(found)})
        if asked.rows:
            print("\n".join(rows(found)))
        print("\n".join(shown(record)))
        for one in chosen:
            if one not in tables:
                missing = ", ".join(one.missing(asked.truth))
                print(f"{one.name}: {missing} is not copied ({one.licence}); --truth FOLDER reads it")
        if asked.against:
            print("\n".join(differences(recorded(asked.against), record)))
        if asked.truth and not asked.tables:
            write(run, found, record)
    except cases.CaseError as error:
        sys.exit(f"judge: {error}")


def write(run: Run, found: Sequence[Judged], record: dict[str, Any]) -> None:
    made = {"commit": _git("rev-parse", "--short=10", "HEAD"), "date": datetime.date.today().isoformat()}
    if run.half == "development":
        RECORD.write_text(json.dumps({**made, **record}, indent=1) + "\n")
        return
    with LOG.open("a") as log:
        log.write(f"{made['date']} {made['commit']} {' '.join(one.name for one in run.tables)}\n")
    for table in run.tables:
        own = [row_of(one) for one in found if one.case.table == table.name]
        told = {**made, "figures": record["tables"].get(table.name, {}), "rows": own}
        (table.folder / "reported.json").write_text(_by_line(told))


def row_of(one: Judged) -> dict[str, Any]:
    """What is written of a reported row: its errors, never what was measured."""
    told: dict[str, Any] = {"id": one.case.id, "route": one.route}
    told.update({name: cell(one.case) for name, cell in CELLS.items()})
    if one.answer is None:
        return {**told, "unasked": one.reason}
    if one.error is not None and one.answer.low_s and one.answer.high_s and one.case.seconds:
        told["low"], told["high"] = one.answer.low_s / one.case.seconds - 1, one.answer.high_s / one.case.seconds - 1
    more = {"error": one.error, "memory": one.memory_error, "fits": one.answer.fits, "status": one.case.status}
    return measures.rounded({**told, **{name: value for name, value in more.items() if value is not None}})


def _by_line(told: Mapping[str, Any]) -> str:
    """JSON with a row a line."""
    head = json.dumps({key: value for key, value in told.items() if key != "rows"}, indent=1)
    listed = ",\n  ".join(json.dumps(one) for one in told["rows"])
    return f'{head[:-2]},\n "rows": [\n  {listed}\n ]\n}}\n'


if __name__ == "__main__":
    main()
