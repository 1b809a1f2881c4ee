"""Lists what moved between two commits' records: `python -m tests.golden.moved COMMIT [COMMIT] [--share 0.001]`.

The second commit is by default what lies in the folder. Values are listed by part of the record and by field, those
that moved most first: how many moved, and for each the case, old and new.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden import core, split

HERE = Path(__file__).parent
FIELDS = {"networks": core.COLUMNS, "memory": core.MEMORY_COLUMNS, "units": split.UNIT_COLUMNS} | {
    "layouts": split.LAYOUT_COLUMNS
}


def record(name: str, commit: str | None) -> dict[str, Any]:
    path = HERE / f"{name}.json.gz"
    shown = path.relative_to(Path.cwd())
    data = path.read_bytes() if commit is None else subprocess.check_output(["git", "show", f"{commit}:{shown}"])
    return json.loads(gzip.decompress(data))  # type: ignore[no-any-return]


def numbers(part: str, value: Any, where: str = "", field: str = "") -> Iterator[tuple[str, str, float]]:
    """Every number: its case, its field and its value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if field:
                yield from numbers(part, inner, where, f"{field}.{name}")
            else:
                yield from numbers(part, inner, f"{where} {name}".strip())
    elif isinstance(value, list) and field:
        for index, inner in enumerate(value):
            yield from numbers(part, inner, where, f"{field}[{index}]")
    elif isinstance(value, list):
        for name, inner in zip(FIELDS[part], value, strict=False):
            yield from numbers(part, inner, where, name)
    elif isinstance(value, int | float):
        yield where, field, float(value)


def moved(before: dict[str, Any], after: dict[str, Any], share: float) -> dict[str, list[tuple[float, str]]]:
    """By part and field: by how much each value moved, and a line that says so. A part of a step, or of memory, counts
    by its share of the whole."""
    found: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for part in FIELDS:
        old = {(where, field): value for where, field, value in numbers(part, before.get(part, {}))}
        for where, field, new in numbers(part, after.get(part, {})):
            was = old.get((where, field))
            if was is None:
                continue
            whole = {"breakdown": "step_s", "memory": "memory_bytes", "parts": "iteration_s"}
            of = (
                1.0
                if field == "bubble_share"
                else abs(old.get((where, whole.get(field.partition(".")[0].partition("[")[0], field)), was))
            )
            change = (new - was) / of if of else float(new != was)
            if abs(change) > share:
                found[f"{part}, {field}"].append((change, f"{change:+8.2%}  {where}: {was:.6g} -> {new:.6g}"))
    return {group: sorted(rows, key=lambda row: -abs(row[0])) for group, rows in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--share", type=float, default=0.001, help="by how much at least")
    asked = parser.parse_args()
    for name in ("core", "split"):
        rows = moved(record(name, asked.before), record(name, asked.after), asked.share)
        for group, lines in rows.items():
            print(f"{group}: {len(lines)} moved")
            for _, line in lines:
                print(f"  {line}")


if __name__ == "__main__":
    main()
