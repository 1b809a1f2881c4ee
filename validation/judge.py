"""How far off every answer is, by table, parallelism, scale, GPU and route, on the measured cases of `cases/`.

    python validation/judge.py [TABLE …] [--rows] [--truth FOLDER] [--against record.json|COMMIT] [--peers]
    python validation/judge.py --truth FOLDER --reported          # reads the other half, notes it, writes docs

Development rows alone are read, unless `--reported` says otherwise. Tables whose licence forbids a copy are read from
`--truth`; without it their figures are those of the record. Only a whole run with `--truth` writes `record.json` and
`backbeat/zoo/checked.json` of development rows, and `errors.json` of tables of our own. `--reported` writes the
`reported.json` of each table that it was given. Both write what docs state of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from validation import cases, docs, measures, peers, show  # noqa: E402
from validation.cases import CaseError  # noqa: E402
from validation.figures import CELLS, Judged, by_cell, by_table  # noqa: E402
from validation.held_out import checked, held_out, left_out  # noqa: E402
from validation.run import Run, Runner  # noqa: E402

RECORD, LOG = HERE / "record.json", HERE / "reported.log"
CHECKED = HERE.parent / "backbeat" / "zoo" / "checked.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all, unless some are named")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--reported", action="store_true", help="read the half that is set aside, and note it")
    parser.add_argument("--truth", type=Path, metavar="FOLDER", help="where tables are that may not be copied")
    parser.add_argument("--against", metavar="RECORD", help="a record.json, or a commit that has one")
    parser.add_argument("--peers", action="store_true", help="ask other predictors too, where they are; writes nothing")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    try:
        judge(asked)
    except CaseError as error:
        sys.exit(f"judge: {error}")


def judge(asked: argparse.Namespace) -> None:
    began = time.monotonic()
    chosen = [cases.table(name) for name in asked.tables or cases.names()]
    old = recorded(asked.against or str(RECORD))
    lacking = [f"{file} ({one.name})" for one in chosen if asked.truth for file in one.missing(asked.truth)]
    if lacking:
        # A record written without them would forget these tables.
        raise CaseError(f"--truth {asked.truth} has no {', '.join(lacking)}: name the folder that has them")
    run = Run(
        tables=tuple(one for one in chosen if not one.missing(asked.truth)),
        truth=asked.truth,
        half="reported" if asked.reported else "development",
        peers=tuple(name for name in peers.NAMES if peers.adapter(name)) if asked.peers else (),
    )
    for name in peers.NAMES if asked.peers else ():
        if name not in run.peers:
            print(f"{name} is not installed: skipped (validation/peers says where it is from)")
    if asked.reported:
        with LOG.open("a") as log:
            log.write(f"{' '.join(stamp().values())} {' '.join(one.name for one in run.tables)}\n")
    with Runner(run, asked.processes) as runner:
        found = runner.judged()
        writes = asked.truth is not None and not asked.peers and not asked.reported and not asked.tables
        informing = held_out(found, runner) if writes else []
    rows = {name: [case for case in every if case.split == run.half] for name, every in run.cases.items()}
    record = measures.rounded({"tables": by_table(run.tables, rows, found), "cells": by_cell(found)})
    if asked.rows:
        print("\n".join(show.rows(found)))
    print("\n".join(show.shown(record)))
    elsewhere = [one for one in chosen if one not in run.tables]
    if elsewhere:
        named = ", ".join(one.name for one in elsewhere)
        print(f"\nnot here, so as the record has it (--truth FOLDER reads {named}):")
        kept = {one.name: old["tables"][one.name] for one in elsewhere if one.name in old.get("tables", {})}
        print("\n".join(show.shown({"tables": kept, "cells": {}})))
    if not asked.reported:
        print(f"\nagainst {asked.against or 'the record'}:")
        print("\n".join(show.differences(old, record)) or "no figure differs")
    if asked.reported and not asked.peers:
        write_reported(run, found, record)
    if writes:
        write_own(run, found)
        RECORD.write_text(json.dumps({**stamp(), **record}, indent=1) + "\n")
        CHECKED.write_text(by_line({**stamp(), "informs nothing": left_out(run), "rows": checked(informing)}))
    stale = docs.stale()
    print("\n".join(stale) or "docs agree with what is committed")
    print(f"{len(found)} answers in {time.monotonic() - began:.0f} s")
    if stale:
        sys.exit(1)


def recorded(named: str) -> Any:
    """A record by its file, or as a commit has it."""
    if Path(named).exists():
        return json.loads(Path(named).read_text())
    told = git("show", f"{named}:validation/record.json") if named != str(RECORD) else "{}"
    if told is None:
        raise CaseError(f"--against {named}: neither a file nor a commit with validation/record.json")
    return json.loads(told)


def stamp() -> dict[str, str]:
    """The day, and the commit that answers; a + where files differ from it."""
    changed = "+" if git("status", "--porcelain", "--", "backbeat") else ""
    commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return {"date": datetime.date.today().isoformat(), "commit": commit + changed}


def git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(HERE.parent), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def write_reported(run: Run, found: Sequence[Judged], record: Mapping[str, Any]) -> None:
    for table in run.tables:
        steps = [one for one in found if one.case.table == table.name and one.case.kind == "step"]
        own = [row_of(one) for one in steps if one.answer is not None]
        told = {**stamp(), "figures": record["tables"].get(table.name, {}), "rows": own}
        (table.folder / "reported.json").write_text(by_line(told))
    docs.write()


def write_own(run: Run, found: Sequence[Judged]) -> None:
    """Of our own tables, whose development rows docs state, too, each error is kept."""
    for table in run.tables:
        if table.own:
            rows = [
                {"id": one.case.id, "route": one.route, "error": one.error, "memory": one.memory_error}
                for one in found if one.case.table == table.name and one.answer is not None
            ]  # fmt: skip
            told = [{name: value for name, value in row.items() if value is not None} for row in rows]
            (table.folder / "errors.json").write_text(by_line({**stamp(), "rows": measures.rounded(told, 6)}))
    docs.write()


def row_of(one: Judged) -> dict[str, Any]:
    """What is written of a row: its errors, never what was measured."""
    assert one.answer is not None
    told: dict[str, Any] = {"id": one.case.id, "route": one.route}
    told.update({name: cell(one.case) for name, cell in CELLS.items()})
    if one.error is not None and one.answer.low_s and one.answer.high_s and one.case.seconds:
        told["low"], told["high"] = one.answer.low_s / one.case.seconds - 1, one.answer.high_s / one.case.seconds - 1
    more = {"error": one.error, "memory": one.memory_error, "fits": one.answer.fits, "status": one.case.status}
    return dict(measures.rounded({**told, **{name: value for name, value in more.items() if value is not None}}))


def by_line(told: Mapping[str, Any]) -> str:
    """JSON with a row a line."""
    head = json.dumps({key: value for key, value in told.items() if key != "rows"}, indent=1)
    listed = ",\n  ".join(json.dumps(one) for one in told["rows"])
    return f'{head[:-2]},\n "rows": [\n  {listed}\n ]\n}}\n'


if __name__ == "__main__":
    main()
