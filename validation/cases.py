"""Every measured case in one schema: a folder of `cases/` is a table, with its rows, its split and what is assumed.

    python validation/cases.py split NAME [--truth FOLDER]  # once, before an error is computed
    python validation/cases.py show NAME [--truth FOLDER]    # its cases, without what was measured

`table.json` (`Table`) says how the columns of the rows are named in the schema (`Case` in case.py). Where that does not
suffice, `tables/NAME.py` has a function `cases(table, rows)` that makes the fields. `split.json` has the half of each
identity.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from validation.case import DEFAULTS, MEASURED, NOT_RUN, TYPES, Case  # noqa: E402

FOLDER = HERE / "cases"
HALVES = ("development", "reported")


class CaseError(Exception):
    """A table that cannot be read; one line."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One source of measurements, as its table.json has it."""

    name: str
    title: str
    source: str
    licence: str
    rows: str | tuple[str, ...]
    """The file, or several: in the folder where the licence allows it, in `--truth` otherwise."""
    routes: tuple[str, ...]
    """How its cases are asked: shape, analytic or profile; and after a comma "own run" or "own network"."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Field of the schema: its column, or [column, factor]. A column with a field's name needs no entry."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """Fields that all rows share."""
    identity: tuple[str, ...] = ("cluster", "family")
    """Fields whose values a split keeps together."""
    models: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, Any] = field(default_factory=dict)
    frameworks: Mapping[str, Any] = field(default_factory=dict)
    accelerators: Mapping[str, Any] = field(default_factory=dict)
    """What names in rows mean, where they are not bundled."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """Kernels of attention that the runs may have had, by name: a route of that name is asked with it."""
    assumed: tuple[str, ...] = ()
    """What the source does not say."""
    noise: float | None = None
    """Of rows that state no repeat, as the source or its repeated rows show it."""
    chose: Mapping[str, str] = field(default_factory=dict)
    """Constants that its development rows helped to choose, and how; `held_out.py` chooses them again."""
    margin: float | None = None
    """Added to either side of a range that holds the network's load alone."""
    adapted: bool = False
    """`tables/NAME.py` makes its cases."""
    note: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def own(self) -> bool:
        """Measured here: everything of it is committed."""
        return self.licence == "own"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.rows,) if isinstance(self.rows, str) else self.rows

    def missing(self, truth: Path | None) -> list[str]:
        """Files that are kept elsewhere, and nobody says where."""
        folders = [folder for folder in (self.folder, truth) if folder is not None]
        return [file for file in self.files if not any((folder / file).exists() for folder in folders)]

    @property
    def copied(self) -> bool:
        return not self.missing(None)

    @cached_property
    def halves(self) -> Mapping[str, str]:
        """By row where a row is its own identity, by identity otherwise."""
        path = self.folder / "split.json"
        if not path.exists():
            raise CaseError(f"{self.name} has no split.json: python validation/cases.py split {self.name}")
        split = json.loads(path.read_text())
        return {name: half for half in HALVES for name in split[half]}

    def half(self, case: Case) -> str:
        found = self.halves.get(case.id) or self.halves.get(case.identity)
        if found is None:
            raise CaseError(f"{self.name}: split.json has no {case.identity!r}: split it before an error is computed")
        return found

    def unsplit(self, truth: Path | None) -> list[Case]:
        """Its cases, of no half yet."""
        rows = self.rows_of(truth)
        made: Iterable[Mapping[str, Any]]
        made = self.adapter.cases(self, rows) if self.adapted else (self.fields(row) for row in rows)
        return list(numbered(self.case(one) for one in made))

    @property
    def adapter(self) -> Any:
        return importlib.import_module(f"validation.tables.{self.name}")

    def rows_of(self, truth: Path | None) -> list[dict[str, str]]:
        """Of all files, each with the file that it stands in where there are several."""
        missing = self.missing(truth)
        if missing:
            raise CaseError(f"{self.name}: {', '.join(missing)} is not copied ({self.licence}): give --truth FOLDER")
        found = []
        for file in self.files:
            own = self.folder / file
            rows = read_rows(own if own.exists() or truth is None else truth / file)
            found += rows if len(self.files) == 1 else [{**row, "file": file} for row in rows]
        return found

    def cases(self, truth: Path | None = None) -> list[Case]:
        return [replace(case, split=self.half(case)) for case in self.unsplit(truth)]

    def fields(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Of a row by `columns`: text, or a number times its factor. Empty cells are left out.

        >>> table = Table(name="t", title="", source="", licence="", rows="", routes=(),
        ...     columns={"seconds": ["ms", 1e-3], "micro_batch": "mbs"}, same={"precision": "bf16"})
        >>> table.fields({"ms": "250", "mbs": "4", "tp": "2", "note": ""})
        {'precision': 'bf16', 'tp': '2', 'seconds': 0.25, 'micro_batch': '4'}
        """
        found: dict[str, Any] = dict(self.same)
        found.update({name: value for name, value in row.items() if name in TYPES and value != ""})
        for name, column in self.columns.items():
            column, factor = column if isinstance(column, list) else (column, None)
            if row.get(column, "") != "":
                found[name] = row[column] if factor is None else float(row[column]) * factor
        return found

    def case(self, found: Mapping[str, Any]) -> Case:
        unknown = next((name for name in found if name not in TYPES), None)
        if unknown is not None:
            raise CaseError(f"{self.name}: a case has no {unknown!r}; it has {', '.join(TYPES)}")
        typed = {name: _typed(self.name, name, value) for name, value in found.items() if value is not None}
        typed.setdefault("table", self.name)
        model = typed.get("model") or typed.get("recorded") or typed.get("profile") or ""
        typed.setdefault("family", model["name"] if isinstance(model, dict) else model)
        typed.setdefault("cluster", self.name)
        if "dp" not in typed and "gpus" in typed:
            shared = typed.get("tp", 1) * typed.get("pp", 1) * typed.get("cp", 1)
            typed["dp"] = max(typed["gpus"] // shared, 1)
        case = Case(**{"identity": "", **typed})
        if not case.identity:
            case = replace(case, identity="/".join(str(getattr(case, name)) for name in self.identity))
        return case if case.id else replace(case, id=_id({**found, "gpus": case.gpus}, self.same))


def _typed(table: str, name: str, value: Any) -> Any:
    kind = TYPES[name]
    try:
        if kind == "int":
            return round(float(value))
        if kind == "float":
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
            return number
        if kind == "bool":
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
    except (ValueError, KeyError):
        raise CaseError(f"{table}: {name} is {value!r}, where a {kind} is meant") from None
    return value


def _id(found: Mapping[str, Any], same: Mapping[str, Any]) -> str:
    """What was run, in words: every field given that is neither measured nor shared by all rows."""
    told = {
        name: value for name, value in sorted(found.items())
        if name not in (*NOT_RUN, *same) and not isinstance(value, (dict, list))
    }  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in told.items())


def numbered(cases: Iterable[Case]) -> Iterator[Case]:
    """A case that stands twice gets a number."""
    seen: Counter[str] = Counter()
    for case in cases:
        seen[case.id] += 1
        yield case if seen[case.id] == 1 else replace(case, id=f"{case.id}#{seen[case.id]}")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of a CSV, compressed or not; of JSON, its list of rows, or what it holds as a single one."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if ".json" in path.suffixes:
        told = json.loads(data)
        rows = told.get("rows") if isinstance(told, dict) else told
        return rows if isinstance(rows, list) else [told]
    return list(csv.DictReader(data.decode("utf-8").splitlines()))


def half_of(identity: str) -> str:
    """By the sha256 of an identity: an even number is development, an odd one reported.

    >>> half_of("vtrain_multi_a100/3.6/64/512/8/3072/32/30/2048/1/64/1")
    'development'
    """
    return HALVES[int(hashlib.sha256(identity.encode()).hexdigest(), 16) % 2]


def table(name: str) -> Table:
    path = FOLDER / name / "table.json"
    if not path.exists():
        raise CaseError(f"{name!r} is no table: they are {', '.join(names())}")
    try:
        told = json.loads(path.read_text())
        told = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        return Table(name=name, **told)
    except (ValueError, TypeError) as error:
        raise CaseError(f"{path}: {error}") from None


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/table.json"))


def write_split(chosen: Table, truth: Path | None, day: str) -> dict[str, Any]:
    """Of identities alone. What has a half keeps it."""
    path = chosen.folder / "split.json"
    kept = dict(chosen.halves) if path.exists() else {}
    cases = chosen.unsplit(truth)
    new = dict.fromkeys(case.identity for case in cases if not kept.keys() & {case.id, case.identity})
    halves = {**kept, **{name: half_of(name) for name in new}}
    old = json.loads(path.read_text()) if path.exists() else {}
    answer = {
        "rule": "sha256 of the identity, as a number: even is development, odd is reported",
        "made": old.get("made", f"{day}, from {', '.join(chosen.identity)} alone, before an error was computed"),
        **{half: [name for name in halves if halves[name] == half] for half in HALVES},
    }
    path.write_text(json.dumps(answer, indent=1) + "\n")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("split", "show"))
    parser.add_argument("name")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--day", default="undated", help="written into split.json, as 2026-11-19")
    asked = parser.parse_args()
    try:
        chosen = table(asked.name)
        if asked.verb == "split":
            answer = write_split(chosen, asked.truth, asked.day)
            print({half: len(answer[half]) for half in HALVES})
            return
        cases = chosen.unsplit(asked.truth)
    except CaseError as error:
        sys.exit(f"cases: {error}")
    for case in cases:
        told = {name: getattr(case, name) for name in DEFAULTS if name not in (*MEASURED, "id", "table", "split")}
        given = (f"{name}={value}" for name, value in told.items() if value != DEFAULTS[name])
        print(f"{case.id}\n    {', '.join(given)}")
    print(f"{len(cases)} cases of {len({case.identity for case in cases})} identities")


if __name__ == "__main__":
    main()
