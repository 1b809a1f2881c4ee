"""Networks from the output of nccl-tests: its text, by column names, and its `-J` JSON.

A file may hold several runs. What was used, guessed and missing ends up in the network's notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from backbeat.cost.collectives import COLLECTIVES
from backbeat.errors import InputError
from backbeat.importers.nccl_runs import PROGRAM, NcclRun, json_runs, text_runs
from backbeat.model import files
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.topology import Topology
from backbeat.units import format_bytes

Placement = Literal["in-place", "out-of-place"]


def load(
    path: str | Path, *, workers: int | None = None, name: str | None = None, placement: Placement = "in-place"
) -> Network:
    """Read a file that nccl-tests wrote. `workers` chooses among runs, or says what the file does not."""
    where = files.existing(path, "the output of nccl-tests, as text or as its -J JSON")
    return parse(files.read(where), where=str(where), workers=workers, name=name or where.stem, placement=placement)


def parse(
    raw: bytes, *, where: str, workers: int | None = None, name: str, placement: Placement = "in-place"
) -> Network:
    if workers is not None and workers < 2:
        raise InputError(f"--workers is {workers}: nothing travels between fewer than two")
    text = raw.decode("utf-8", errors="replace")
    runs = json_runs(raw, where) if text.lstrip()[:1] == "{" else text_runs(text)
    runs = [run for run in runs if run.rows]
    if not runs:
        raise InputError(
            f"{where}: no nccl-tests results in it: a table headed `size count type … time algbw busbw` was expected; "
            "give the whole output of all_reduce_perf"
        )
    notes: list[str] = []
    chosen, count = _choose(runs, workers, where, notes)
    curves = _curves(chosen, count, placement, Path(where).name, where, notes)
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
    gone = [one for one in COLLECTIVES if one not in curves]
    notes.append(
        f"missing: several communicators at once{', ' + ', '.join(gone) if gone else ''}: "
        "the nccl-tests run did not cover them"
    )
    return Network(
        name=name,
        workers=count,
        topology=Topology(gpus_per_node=_per_node(chosen)),
        backend="nccl",
        source=Source(method="imported", reference=f"nccl-tests output {Path(where).name}"),
        notes=tuple(notes),
        **curves,
    )


def _choose(runs: list[NcclRun], wanted: int | None, where: str, notes: list[str]) -> tuple[list[NcclRun], int]:
    """The runs at one number of workers, and that number."""
    counted = [(run, _workers(run)) for run in runs]
    known = sorted({count for _, count in counted if count is not None})
    listed = ", ".join(map(str, known))
    if wanted is not None:
        chosen = [run for run, count in counted if count == wanted] or [run for run, count in counted if count is None]
        if not chosen:
            # The user knows better than a table of devices that was cut short.
            if len(known) > 1:
                raise InputError(f"{where}: holds runs of {listed} workers, none of {wanted}: choose one of these")
            chosen = runs
            notes.append(f"used: {wanted} workers as asked for, though the file lists {known[0]}")
        return chosen, wanted
    if len(known) > 1:
        raise InputError(f"{where}: holds runs of {listed} workers: choose one with --workers")
    if known:
        if known[0] < 2:
            raise InputError(
                f"{where}: the run has 1 worker: nothing travels there; run nccl-tests across GPUs "
                "(built with MPI=1 across hosts), or give --workers"
            )
        return runs, known[0]
    guess = _guess_workers(runs)
    if guess is None:
        raise InputError(f"{where}: does not say how many workers there were: give --workers")
    notes.append(f"guessed: {guess} workers, from busbw / algbw; the device lines are missing")
    return runs, guess


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


def _guess_workers(runs: Iterable[NcclRun]) -> int | None:
    """busbw / algbw is 2(n-1)/n for an all-reduce, so n = 2 / (2 - ratio) where rounding leaves no doubt."""
    for run in runs:
        ratios = [row.bus_over_algorithm for row in run.rows[-3:] if row.redop not in ("", "none")]
        if ratios and all(ratio is not None and 0.99 <= ratio < 1.995 for ratio in ratios):
            count = 2 / (2 - median(ratio for ratio in ratios if ratio is not None))
            if abs(count - round(count)) < 0.1 and round(count) >= 2:
                return round(count)
    return None


def _per_node(runs: Sequence[NcclRun]) -> int:
    """Ranks of one collective on one host; 1 where the device lines are missing."""
    counts = [count for run in runs for count in Counter((group, host) for _, group, host in run.devices).values()]
    return max(counts, default=1)


def _curves(
    runs: list[NcclRun], workers: int, placement: Placement, filename: str, where: str, notes: list[str]
) -> dict[str, Any]:
    found: dict[str, dict[int, list[float]]] = {}
    other: list[str] = []
    fallbacks = 0
    for run in runs:
        collective = _collective(run, workers, filename, notes)
        if collective not in COLLECTIVES:
            other.append(collective)
            continue
        for row in run.rows:
            first, second = (
                (row.in_place, row.out_of_place) if placement == "in-place" else (row.out_of_place, row.in_place)
            )
            seconds = first if first is not None else second
            if seconds is None or seconds <= 0 or row.size <= 0:
                continue
            fallbacks += first is None
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
    return curves


def _collective(run: NcclRun, workers: int, filename: str, notes: list[str]) -> str:
    """By the program's name where the file has it, otherwise by what the rows say."""
    if run.program:
        return run.program
    if named := PROGRAM.search(filename):
        return named[1]
    last = run.rows[-1]
    reduces = last.redop not in ("", "none")
    ratio = last.bus_over_algorithm
    if ratio is None:
        guess = "all_reduce"
    elif abs(ratio - (workers - 1) / workers) < 0.02:
        guess = "reduce_scatter" if reduces else "all_gather"
    elif reduces:
        guess = "reduce" if last.root is not None and last.root >= 0 else "all_reduce"
    else:
        guess = "all_reduce" if abs(ratio - 2 * (workers - 1) / workers) < 0.02 and workers > 2 else "broadcast"
    notes.append(f"guessed: {guess}, from redop, root and busbw / algbw; the file does not name the program")
    return guess
