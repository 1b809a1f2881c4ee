"""Networks from the output of nccl-tests: its text, by column names, and its `-J` JSON.

A file may hold several runs. What was used, guessed and missing ends up in the network's notes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from backbeat.cost.collectives import COLLECTIVES
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.model.accelerator import accelerator
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.topology import Topology
from backbeat.units import format_bytes

_PROGRAM = re.compile(r"(?<![a-z])((?:all_|reduce_)?[a-z]+)_perf")
_RANK = re.compile(
    r"Rank\s+([0-9]{1,7})\s+(?:Group\s+([0-9]{1,7})\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device(?:\s+\d+\s+\[\S+\]\s+(.+))?"
)
_TAG = re.compile(r"^\s*\[\d+,\d+\]<std(?:out|err)>:\s?")
_BLOCKING = "Blocking Enabled"
_TIMES = ("time", "cputime")
_JSON_NAMES = {"time": "time", "cputime": "cpu_time", "algbw": "alg_bw", "busbw": "bus_bw", "wrong": "nwrong"}
"""What JSON calls the columns of a table."""
_MOST_BYTES = 2**50
"""A larger size is damage, not a message."""

NODES_GUESSED = "guessed: one GPU a node, since the lines that list the devices are missing"

Placement = Literal["in-place", "out-of-place"]


def load(
    path: str | Path, *, workers: int | None = None, name: str | None = None, placement: Placement = "in-place"
) -> Network:
    """Read a file that nccl-tests wrote. `workers` chooses among runs, or says what the file does not."""
    where = files.existing(path, "the output of nccl-tests, as text or as its -J JSON")
    raw = files.read(where)
    if workers is not None and workers < 2:
        raise InputError(f"--gpus is {workers}: nothing travels between fewer than two")
    text = raw.decode("utf-8", errors="replace")
    runs = json_runs(raw, where) if text.lstrip()[:1] == "{" else text_runs(text)
    wrong = sum(run.wrong for run in runs)
    runs = [run for run in runs if run.rows]
    if not runs and wrong:
        raise InputError(f"{where}: all {wrong} rows have wrong results (#wrong): mend the cluster, then run it again")
    if not runs:
        raise InputError(
            f"{where}: no nccl-tests results in it: they follow a row that names their columns, like `#  size  count  "
            "type … time  algbw  busbw`, which is missing or has none; give the whole output of all_reduce_perf"
        )
    chosen, count, said = _choose(runs, workers, where)
    curves, notes = _curves(chosen, count, placement, where)
    notes = [*said, *notes]
    if any(run.host_times for run in chosen):
        notes.append("guessed: cputime (-C 1) taken as the time; it is the host's share, measure again without -C")
    if not all(run.blocking for run in chosen):
        notes.append(
            "guessed: times taken as isolated, though nccl-tests averages iterations sent back to back "
            "(its -z 1 would wait for each)"
        )
    wrong = sum(run.wrong for run in chosen)
    if wrong:
        notes.append(f"missing: {wrong} rows with wrong results were left out")
    if not any(run.devices for run in chosen):
        notes.append(NODES_GUESSED)
    gone = [one for one in COLLECTIVES if one not in curves]
    notes.append(
        f"missing: several communicators at once{', ' + ', '.join(gone) if gone else ''}: "
        "the nccl-tests run did not cover them"
    )
    return Network(
        name=name or where.stem,
        workers=count,
        topology=Topology(gpus_per_node=_per_node(chosen)),
        backend="nccl",
        accelerator=_accelerator(chosen),
        source=Source(method="imported", reference=f"nccl-tests output {where.name}"),
        notes=tuple(notes),
        **curves,
    )


def _choose(runs: list[NcclRun], wanted: int | None, where: Path) -> tuple[list[NcclRun], int, list[str]]:
    """The runs at one number of workers, that number, and notes."""
    counted = [(run, _workers(run)) for run in runs]
    known = sorted({count for _, count in counted if count is not None})
    listed = ", ".join(map(str, known))
    if wanted is not None:
        chosen = [run for run, count in counted if count == wanted] or [run for run, count in counted if count is None]
        if not chosen:
            # The user knows better than a table of devices that was cut short.
            if len(known) > 1:
                raise InputError(f"{where}: holds runs of {listed} workers, none of {wanted}: choose one of these")
            return runs, wanted, [f"used: {wanted} workers as asked for, though the file lists {known[0]}"]
        return chosen, wanted, []
    if len(known) > 1:
        raise InputError(f"{where}: holds runs of {listed} workers: choose one with --gpus")
    if known:
        if known[0] < 2:
            raise InputError(
                f"{where}: the run has 1 worker: nothing travels there; run nccl-tests across GPUs "
                "(built with MPI=1 across hosts), or give --gpus"
            )
        return runs, known[0], []
    raise InputError(
        f"{where}: the lines above the table that list the devices (`#  Rank  0 … device  0`) are missing, so nobody "
        "knows how many workers there were: give the whole output, or `backbeat import nccl-tests … --gpus N`"
    )


def _workers(run: NcclRun) -> int | None:
    if run.workers is not None:
        return run.workers
    if not run.devices:
        return None
    # With NCCL_TESTS_SPLIT every group of ranks runs the collective by itself.
    groups = Counter(group for _, group, _ in run.devices)
    if len(groups) > 1:
        return max(groups.values())
    return max(len({rank for rank, _, _ in run.devices}), 1 + max(rank for rank, _, _ in run.devices))


def _accelerator(runs: Sequence[NcclRun]) -> str | None:
    """The GPU that every device line names, where it is known here."""
    named = {name for run in runs for name in run.gpus if name}
    return next(iter(named)) if len(named) == 1 and all(map(accelerator, named)) else None


def _per_node(runs: Sequence[NcclRun]) -> int:
    """Ranks of one collective on one host; 1 where the device lines are missing."""
    counts = [count for run in runs for count in Counter((group, host) for _, group, host in run.devices).values()]
    return max(counts, default=1)


def _curves(runs: list[NcclRun], workers: int, placement: Placement, where: Path) -> tuple[dict[str, Any], list[str]]:
    """By collective, and notes."""
    notes: list[str] = []
    found: dict[str, dict[int, list[float]]] = {}
    other: list[str] = []
    fallbacks = 0
    for run in runs:
        collective = run.program or _by_file(where.name)
        if collective is None:
            collective = _guess_collective(run.rows[-1], workers)
            notes.append(
                f"guessed: {collective}, from redop, root and busbw / algbw; the file does not name the program"
            )
        if collective not in COLLECTIVES:
            other.append(collective)
            continue
        for row in run.rows:
            seconds = row.seconds.get(placement, max(row.seconds.values(), default=0.0))
            if seconds <= 0 or row.size <= 0:
                continue
            fallbacks += placement not in row.seconds
            found.setdefault(collective, {}).setdefault(row.size, []).append(seconds)
    if other:
        notes.append(f"missing: {', '.join(sorted(set(other)))} is not used by data-parallel training; left out")
    curves = {}
    for collective, sizes in found.items():
        if len(sizes) < 2:
            continue
        curves[collective] = CollectiveTimes(points=tuple((size, median(sizes[size])) for size in sorted(sizes)))
        notes.append(
            f"used: {collective}, {len(sizes)} sizes from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, "
            f"{placement}{f', median of up to {most} runs' if (most := max(map(len, sizes.values()))) > 1 else ''}"
        )
    if fallbacks:
        notes.append(f"guessed: {fallbacks} rows have no {placement} time; the other one was taken")
    if "all_reduce" not in curves:
        seen = ", ".join(sorted({*found, *other})) or "none"
        raise InputError(
            f"{where}: no all-reduce at two sizes or more (found: {seen}): "
            "add the output of `all_reduce_perf -b 1K -e 256M -f 2`"
        )
    return curves, notes


def _by_file(filename: str) -> str | None:
    named = _PROGRAM.search(filename)
    return named[1] if named else None


def _guess_collective(last: Row, workers: int) -> str:
    """By what the row says."""
    reduces = last.redop not in ("", "none")
    ratio = last.bus_over_algorithm
    if ratio is None:
        return "all_reduce"
    if abs(ratio - (workers - 1) / workers) < 0.02:
        return "reduce_scatter" if reduces else "all_gather"
    if reduces:
        return "reduce" if last.root is not None and last.root >= 0 else "all_reduce"
    return "all_reduce" if abs(ratio - 2 * (workers - 1) / workers) < 0.02 and workers > 2 else "broadcast"


@dataclass(slots=True)
class Row:
    """One size of one run."""

    size: int
    seconds: dict[Placement, float]
    """By placement, where the run says it."""
    redop: str = ""
    root: int | None = None
    bus_over_algorithm: float | None = None


@dataclass(slots=True)
class NcclRun:
    """One execution of one program."""

    program: str | None = None
    devices: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, group, host)"""
    gpus: set[str] = field(default_factory=set)
    """Their names."""
    workers: int | None = None
    """Where the file says it in another way than by its devices."""
    rows: list[Row] = field(default_factory=list)
    host_times: bool = False
    blocking: bool = False
    wrong: int = 0


def text_runs(text: str) -> list[NcclRun]:
    runs: list[NcclRun] = []
    header: list[str] = []

    def next_run(**known: Any) -> NcclRun:
        runs.append(NcclRun(**known))
        return runs[-1]

    run = next_run()
    for line in text.splitlines():
        line = _TAG.sub("", line)
        tokens = line.replace("#wrong", "wrong").lstrip("# \t").split()
        if rank := _RANK.search(line):
            # A further rank 0 after a table opens the next run.
            if header:
                run, header = next_run(), []
            run.devices.append((int(rank[1]), int(rank[2] or 0), rank[3]))
            run.gpus.add((rank[4] or "").strip())
        elif _is_header(tokens):
            if run.rows:
                # Several tables under one list of devices: another type, operation or program.
                run = next_run(devices=run.devices, gpus=run.gpus, program=run.program, blocking=run.blocking)
            header = tokens
            run.host_times = "cputime" in tokens
        elif header and (row := _row(tokens, header, run)) is not None:
            run.rows.append(row)
        elif named := _PROGRAM.search(line):
            if "concluded" in line:
                continue
            if run.rows:
                run, header = next_run(), []
            run.program = named[1]
        elif _BLOCKING in line:
            run.blocking = True
        elif "nThread" in line and "nGpus" in line and run.rows:
            run, header = next_run(), []
    return runs


def _is_header(tokens: list[str]) -> bool:
    return tokens[:1] == ["size"] and any(name in tokens for name in _TIMES) and "algbw" in tokens and "busbw" in tokens


def _row(tokens: list[str], header: list[str], run: NcclRun) -> Row | None:
    """A line of figures by its header's names; None where it is none."""
    if not tokens or not re.fullmatch(r"[0-9]{1,15}", tokens[0]):
        return None
    first = min(header.index(name) for name in _TIMES if name in header)
    lead, measured = header[:first], header[first:]
    figures = tokens[len(lead) :]
    if measured[-1] == "timestamp":
        # A date and an hour under one name.
        measured, figures = measured[:-1], figures[:-2]
    period = len(measured) // 2 if sum(measured.count(name) for name in _TIMES) == 2 else len(measured)
    halves: list[dict[str, float | None]]
    if len(figures) == len(measured):
        halves = [
            dict(zip(measured[at : at + period], map(_number, figures[at : at + period]), strict=True))
            for at in range(0, len(measured), period)
        ]
    elif len(figures) == period:
        halves = [{}, dict(zip(measured[:period], map(_number, figures), strict=True))]
    else:
        return None
    named = dict(zip(lead, tokens, strict=False))
    return _made(run, int(tokens[0]), named.get("redop", ""), named.get("root"), halves)


def _made(run: NcclRun, size: int, redop: str, root: object, halves: list[dict[str, float | None]]) -> Row | None:
    if any((half.get("wrong") or 0) > 0 for half in halves):
        run.wrong += 1
        return None
    micros = [next((half[name] for name in _TIMES if half.get(name) is not None), None) for half in halves]
    places: tuple[Placement, ...] = ("out-of-place", "in-place")
    whole = next((half for half in reversed(halves) if half), {})
    algorithm, bus = whole.get("algbw"), whole.get("busbw")
    return Row(
        size=size,
        seconds={place: one * 1e-6 for place, one in zip(places, micros, strict=False) if one is not None},
        redop=redop,
        root=int(number) if (number := _number(root)) is not None else None,
        bus_over_algorithm=bus / algorithm if bus is not None and algorithm is not None and algorithm > 0.5 else None,
    )


def _number(value: object) -> float | None:
    """A finite number, however it is written; None for N/A, nan and everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _count(value: object, least: int) -> int:
    """A plausible number of things, or the least there can be."""
    number = _number(value)
    return int(number) if number is not None and least <= number < 1e7 else least


def json_runs(raw: bytes, where: Path) -> list[NcclRun]:
    """One document, or several one after the other."""
    runs = []
    for part in re.split(rb"(?<=\})\s*(?=\{\s*\"version\")", raw.strip()):
        try:
            document = msgspec.json.decode(part, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{where}: the JSON is damaged or cut short ({error}): copy or write it again") from None
        results = document.get("results")
        if not isinstance(results, list):
            raise InputError(f"{where}: no list `results` in it: it is not what nccl-tests writes with -J")
        runs.append(_json_run(document, results))
    return runs


def _json_run(document: dict[str, Any], results: list[Any]) -> NcclRun:
    run = NcclRun()
    arguments = document.get("args")
    for argument in arguments if isinstance(arguments, list) else []:
        if isinstance(argument, str) and (program := _PROGRAM.search(argument)):
            run.program = program[1]
            break
    config = document.get("config")
    if isinstance(config, dict):
        run.blocking = config.get("blocking_collectives") in (True, "true", 1)
        listed = config.get("devices")
        for device in listed if isinstance(listed, list) else []:
            if isinstance(device, dict):
                rank, group = (_count(device.get(key), least=0) for key in ("rank", "group"))
                run.devices.append((rank, group, str(device.get("hostname", ""))))
                run.gpus.add(str(device.get("device_name", device.get("name", ""))).strip())
        # One device is listed for each process, which drives all of its threads' GPUs.
        each = math.prod(_count(config.get(key), least=1) for key in ("nthreads", "ngpus"))
        if run.devices and each > 1:
            run.workers = each * len(run.devices)
    for entry in results:
        size = _number(entry.get("size")) if isinstance(entry, dict) else None
        if size is None or not 0 <= size <= _MOST_BYTES:
            continue
        halves = [_json_half(entry.get(key), run) for key in ("out_of_place", "in_place")]
        redop = entry.get("redop")
        row = _made(run, int(size), redop if isinstance(redop, str) else "", entry.get("root"), halves)
        if row is not None:
            run.rows.append(row)
    return run


def _json_half(half: object, run: NcclRun) -> dict[str, float | None]:
    if not isinstance(half, dict):
        return {}
    run.host_times |= "cpu_time" in half
    return {column: _number(half.get(name)) for column, name in _JSON_NAMES.items()}
