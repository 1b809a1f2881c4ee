"""The runs in a file that nccl-tests wrote: text by its column names, or the JSON of `-J`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backbeat.errors import InputError

PROGRAM = re.compile(r"(?<![a-z])((?:all_|reduce_)?[a-z]+)_perf")
_RANK = re.compile(r"Rank\s+([0-9]{1,7})\s+(?:Group\s+([0-9]{1,7})\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device")
_TAG = re.compile(r"^\s*\[\d+,\d+\]<std(?:out|err)>:\s?")
_BLOCKING = "Blocking Enabled"
_TIMES = ("time", "cputime")
_JSON_NAMES = {"time": "time", "cputime": "cpu_time", "algbw": "alg_bw", "busbw": "bus_bw", "wrong": "nwrong"}
"""What JSON calls the columns of a table."""
_MOST_BYTES = 2**50
"""A larger size is damage, not a message."""


@dataclass(slots=True)
class Row:
    """One size of one run; seconds, or None where the run does not say."""

    size: int
    in_place: float | None
    out_of_place: float | None
    redop: str = ""
    root: int | None = None
    bus_over_algorithm: float | None = None


@dataclass(slots=True)
class NcclRun:
    """One execution of one program."""

    program: str | None = None
    devices: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, group, host)"""
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
        elif _is_header(tokens):
            if run.rows:
                # Several tables under one list of devices: another type, operation or program.
                run = next_run(devices=run.devices, program=run.program, blocking=run.blocking)
            header = tokens
            run.host_times = "cputime" in tokens
        elif header and (row := _row(tokens, header, run)) is not None:
            run.rows.append(row)
        elif named := PROGRAM.search(line):
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
    seconds = [next((half[name] for name in _TIMES if half.get(name) is not None), None) for half in halves]
    whole = next((half for half in reversed(halves) if half), {})
    algorithm, bus = whole.get("algbw"), whole.get("busbw")
    return Row(
        size=size,
        out_of_place=seconds[0] * 1e-6 if seconds[0] is not None else None,
        in_place=seconds[1] * 1e-6 if len(seconds) > 1 and seconds[1] is not None else None,
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


def json_runs(raw: bytes, where: str) -> list[NcclRun]:
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
        if isinstance(argument, str) and (program := PROGRAM.search(argument)):
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
