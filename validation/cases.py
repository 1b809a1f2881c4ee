"""Every measured case in one schema: a folder of `cases/` is a table, with its rows, its split and what is assumed.

    python validation/cases.py split NAME [--truth FOLDER]  # once, before an error is computed
    python validation/cases.py show NAME [--truth FOLDER]    # its cases, without what was measured

`table.json` (`Table`) says how the columns of the rows are named in the schema (`Case`). Where that does not suffice,
`tables/NAME.py` has a function `cases(table, rows)` that makes the fields. `split.json` has the half of each identity.
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
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "cases"
HALVES = ("development", "reported")
SCALES = (8, 64, 512)


class CaseError(Exception):
    """A table that cannot be read; one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement: what was run, on what, and what came out. Seconds and bytes; a field left out is unknown."""

    table: str
    id: str = ""
    """Of the row, in its table. Made of the columns unless given."""
    identity: str
    """What a split keeps whole: cluster, model, submitter."""
    split: str = "development"

    kind: str = "step"
    """step, operator or collective."""
    model: Any = None
    """Of a transformer by its shape: a bundled name, one of the table's `models`, or the shape itself."""
    profile: Any = None
    """Of any model as it was measured: a bundled profile, a file of the folder, or the profile itself."""
    recorded: str | None = None
    """Of any model by its operators: one of the folder's operators.json.gz (`operators.py`)."""
    strategy: str | None = None
    """Of backbeat's planners."""
    plan: Any = None
    """A file of the folder, or the plan itself."""
    framework: str | None = None
    """How the run was sent: a bundled name, or one of the table's `frameworks`."""
    dp: int = 1
    """What the other ways leave of all GPUs, unless given."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    zero: int = 0
    shard: int = 0
    """GPUs that share one copy of parameters, of those that have replicas: hybrid sharding. 0 is all of them."""
    micro_batch: int = 1
    """0, like chunks of 0, where the source does not say: the fastest that fits, as predicted."""
    global_batch: int = 0
    sequence: int = 0
    precision: str = "bf16"
    recompute: str = "none"
    schedule: str | None = None
    sequence_parallel: bool = True
    accumulation: int = 1
    dilation: float = 0.0
    """Of a replay in the lab: computation is spun, and takes so many times as long. 0 is no replay."""

    operator: str | None = None
    """Of the kind operator: matmul."""
    m: int = 0
    n: int = 0
    k: int = 0
    collective: str | None = None
    """Of the kind collective: all_reduce, all_gather, reduce_scatter, all_to_all, send."""
    bytes: int = 0
    """Of the whole message; of an all-to-all what each rank sends."""

    gpus: int = 1
    accelerator: str = ""
    network: Any = None
    """A bundled name, one of the table's `networks`, a file of the folder, or the network itself."""
    own_network: str | None = None
    """The same, as it was measured on this cluster."""
    cluster: str = ""
    family: str = ""
    """Of models: a constant is chosen again without its cluster, and without its family."""
    system: str = ""
    """Cases with the same share a factor of computation: those of one model on one cluster, unless given."""

    seconds: float | None = field(default=None, repr=False)
    """Of one step, operator or collective."""
    memory_bytes: float | None = field(default=None, repr=False)
    status: str = "ran"
    """ran or failed. Where memory was not the cause of the failure, leave the row out."""
    repeat: float | None = field(default=None, repr=False)
    """How far repeats of this very measurement lie apart, as a share: the instrument's own noise."""
    informs_nothing: str | None = None
    """Why its error may widen no range: it helped to make a rule that is not chosen again without it, or what it
    measures is no range's."""
    unasked: str | None = None
    """Why it cannot be asked, where the table knows: a chip, a precision, a way that backbeat does not have."""
    source: str = ""
    """Of the row, where it is not the table's."""

    @property
    def group(self) -> str:
        """Of one model on one system: one factor of computation."""
        return self.system or "/".join((self.cluster, self.family, self.accelerator, self.precision))

    @property
    def job(self) -> str:
        """What ways of running compete for."""
        subject = self.model or self.recorded or self.profile
        model = subject["name"] if isinstance(subject, dict) else subject
        return "/".join(map(str, (self.group, model, self.gpus, self.global_batch, self.sequence, self.precision)))

    @property
    def way(self) -> str:
        """How the job is run. The same way again, in another release or on another day, is a repeat of it."""
        told = [f"{name}={getattr(self, name)}" for name in _WAY if getattr(self, name) != _DEFAULTS[name]]
        return ",".join(told)

    @property
    def parallelism(self) -> str:
        if self.kind != "step":
            return self.operator or self.collective or self.kind
        many = {"experts": self.ep, "context": self.cp, "tensor": self.tp, "pipeline": self.pp}
        ways = [name for name, gpus in many.items() if gpus > 1]
        if ways[:1] in (["experts"], ["context"]):
            return ways[0]
        sharded = "sharded" if self.zero == 3 else "data"
        return "+".join(ways) or (sharded if self.gpus > 1 else "none")

    @property
    def scale(self) -> str:
        """How many GPUs, in four classes.

        >>> [Case(table="t", identity="i", gpus=gpus).scale for gpus in (8, 9, 1024)]
        ['1-8', '9-64', '513-']
        """
        low = 1
        for high in SCALES:
            if self.gpus <= high:
                return f"{low}-{high}"
            low = high + 1
        return f"{low}-"


_TYPES = {one.name: str(one.type).replace("|", " ").split()[0] for one in fields(Case)}
_DEFAULTS = {one.name: one.default for one in fields(Case)}
_WAY = (
    "strategy", "plan", "framework", "dp", "tp", "pp", "cp", "ep", "chunks", "zero", "shard", "micro_batch",
    "recompute", "schedule", "sequence_parallel", "accumulation", "network",
)  # fmt: skip
_MEASURED = ("seconds", "memory_bytes", "status", "repeat")
_NOT_RUN = (*_MEASURED, "informs_nothing", "table", "id", "identity", "split", "unasked", "source")


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
        return [_replaced(case, split=self.half(case)) for case in self.unsplit(truth)]

    def fields(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Of a row by `columns`: text, or a number times its factor. Empty cells are left out.

        >>> table = Table(name="t", title="", source="", licence="", rows="", routes=(),
        ...     columns={"seconds": ["ms", 1e-3], "micro_batch": "mbs"}, same={"precision": "bf16"})
        >>> table.fields({"ms": "250", "mbs": "4", "tp": "2", "note": ""})
        {'precision': 'bf16', 'tp': '2', 'seconds': 0.25, 'micro_batch': '4'}
        """
        found: dict[str, Any] = dict(self.same)
        found.update({name: value for name, value in row.items() if name in _TYPES and value != ""})
        for name, column in self.columns.items():
            column, factor = column if isinstance(column, list) else (column, None)
            if row.get(column, "") != "":
                found[name] = row[column] if factor is None else float(row[column]) * factor
        return found

    def case(self, found: Mapping[str, Any]) -> Case:
        unknown = next((name for name in found if name not in _TYPES), None)
        if unknown is not None:
            raise CaseError(f"{self.name}: a case has no {unknown!r}; it has {', '.join(_TYPES)}")
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
            case = _replaced(case, identity="/".join(str(getattr(case, name)) for name in self.identity))
        return case if case.id else _replaced(case, id=_id({**found, "gpus": case.gpus}, self.same))


def _typed(table: str, name: str, value: Any) -> Any:
    kind = _TYPES[name]
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
        if name not in (*_NOT_RUN, *same) and not isinstance(value, (dict, list))
    }  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in told.items())


def _replaced(case: Case, **changed: Any) -> Case:
    return Case(**{**{one.name: getattr(case, one.name) for one in fields(Case)}, **changed})


def numbered(cases: Iterable[Case]) -> Iterator[Case]:
    """A case that stands twice gets a number."""
    seen: Counter[str] = Counter()
    for case in cases:
        seen[case.id] += 1
        yield case if seen[case.id] == 1 else _replaced(case, id=f"{case.id}#{seen[case.id]}")


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
        told = {name: getattr(case, name) for name in _DEFAULTS if name not in (*_MEASURED, "id", "table", "split")}
        given = (f"{name}={value}" for name, value in told.items() if value != _DEFAULTS[name])
        print(f"{case.id}\n    {', '.join(given)}")
    print(f"{len(cases)} cases of {len({case.identity for case in cases})} identities")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
