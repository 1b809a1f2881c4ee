"""Units of an FSDP2 job, from the annotations that torch puts into its traces.

`fully_shard` marks its work on the host by `FSDP::all_gather (layers.0)`, `FSDP::pre_forward (layers.0)`,
`FSDP::post_backward_reduce (layers.0)` and others; the root's have no name after them. A collective belongs to the
mark during which it was launched. Where a trace has no launches, as on a CPU, it is the order that tells: both come in
the order of issue.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from backbeat.importers.trace_facts import KINDS, DeviceClock, Facts, Mark, Ready, Transfer, common, union, without
from backbeat.units import format_seconds

ROOT_UNIT = "root"
_MARK = re.compile(r"FSDP::(\w+)(?: \((.*)\))?(?: \[pg=\d+\])?$")
_ISSUES = {"all_gather": "all_gather", "post_backward_reduce": "reduce_scatter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUnit:
    """One unit, in medians over the trace."""

    name: str
    """Its modules, or `root`."""
    gathers: float
    """All-gathers an iteration: two where the unit is resharded after forward."""
    gather_bytes: int | None
    """Of the whole unit, in the parameters' dtype."""
    gather_s: float | None
    scatter_bytes: int | None
    """In the reduce dtype."""
    scatter_s: float | None
    reduce_s: float | None
    """HSDP's all-reduce of the copies."""
    exposed_s: float | None
    """Of its collectives, an iteration, while nothing is computed. None on a CPU, where computation and communication
    cannot be told apart."""
    overlap: float | None
    """Share of its communication behind computation."""
    forward_s: float | None
    """From its parameters' copy-out to its end; not known of the root, which runs between others."""


def measured_units(
    facts: Facts, clock: DeviceClock, iterations: int, world_size: int | None
) -> tuple[MeasuredUnit, ...]:
    """In the order of their first forward; empty where the trace is not FSDP2's."""
    marks = fsdp_marks(facts.marks)
    sent = unit_collectives(facts)
    if not sent:
        return ()
    computing = Computing(facts, clock)
    order = list(dict.fromkeys(unit for what, unit, _ in marks if what == "pre_forward"))
    order += [unit for unit, _ in sent if unit not in order]
    found = []
    for name in dict.fromkeys(order):
        mine = [transfer for unit, transfer in sent if unit == name]
        gathers, scatters, reduces = ([one for one in mine if one.kind == kind] for kind in KINDS)
        if not mine:
            continue
        talking = sum(one.end - one.start for one in mine)
        exposed = float(np.diff(_waits(mine, clock)).sum()) if clock.on_device else None
        found.append(
            MeasuredUnit(
                name=name,
                gathers=len(gathers) / max(iterations, 1),
                gather_bytes=_bytes(gathers, world_size),
                gather_s=_median([one.end - one.start for one in gathers]),
                scatter_bytes=_bytes(scatters),
                scatter_s=_median([one.end - one.start for one in scatters]),
                reduce_s=_median([one.end - one.start for one in reduces]),
                exposed_s=None if exposed is None else exposed / max(iterations, 1),
                overlap=None if exposed is None or talking <= 0 else 1 - exposed / talking,
                forward_s=_median(_forward_times(marks, name, computing)) if name != ROOT_UNIT else None,
            )
        )
    return tuple(found)


def fsdp_marks(marks: Iterable[Mark]) -> list[tuple[str, str, Mark]]:
    """(what, unit, mark) in the order of their start.

    >>> fsdp_marks([Mark("FSDP::pre_forward (layers.0)", 1.0, 2.0), Mark("FSDP::all_gather", 0.0, 1.0)])[0][:2]
    ('all_gather', 'root')
    """
    found = [(match[1], match[2] or ROOT_UNIT, mark) for mark in marks if (match := _MARK.match(mark.name))]
    return sorted(found, key=lambda one: one[2].start)


def _forward_times(marks: Sequence[tuple[str, str, Mark]], unit: str, computing: Computing) -> list[float]:
    """From the unit's pre-forward to its post-forward, on the device, without waiting for parameters."""
    begins = [mark.end for what, name, mark in marks if what == "pre_forward" and name == unit]
    ends = [mark.start for what, name, mark in marks if what == "post_forward" and name == unit]
    return [max(computing.done(end) - computing.done(begin), 0.0) for begin, end in zip(begins, ends, strict=False)]


def _owners(ready: Sequence[Ready], marks: Sequence[tuple[str, str, Mark]]) -> list[str]:
    """The unit of each gradient: that whose backward is under way, from its pre-backward to its reduction."""
    begun = [(mark.start, unit, True) for what, unit, mark in marks if what == "pre_backward" and unit != ROOT_UNIT]
    done = [(mark.start, unit, False) for what, unit, mark in marks if what == "post_backward_accumulate"]
    edges = sorted(begun + done)
    current, index, found = [ROOT_UNIT], 0, []
    for one in ready:
        while index < len(edges) and edges[index][0] <= one.start:
            _, unit, opens = edges[index]
            if opens:
                current.append(unit)
            elif unit in current[1:]:
                current.remove(unit)
            index += 1
        found.append(current[-1])
    return found


def in_units(
    facts: Facts,
    clock: DeviceClock,
    named: list[tuple[str, int]],
    ready: Sequence[Ready],
    forward_s: float | None,
    units: Sequence[MeasuredUnit],
) -> tuple[list[tuple[str, int]], list[float | None]]:
    """Gradients named after the unit that they belong to, and its forward shared by them where all units have one."""
    mine = _owners(ready, fsdp_marks(facts.marks))
    renamed = [
        (label if unit == ROOT_UNIT else f"{unit.partition(',')[0]}.{label}", size)
        for unit, (label, size) in zip(mine, named, strict=True)
    ]
    known = {unit.name: unit.forward_s for unit in units if unit.name != ROOT_UNIT}
    if not clock.on_device or forward_s is None or any(seconds is None for seconds in known.values()):
        return renamed, [None] * len(named)
    inside = sum(seconds or 0.0 for seconds in known.values())
    known[ROOT_UNIT] = max(forward_s - inside, 0.0)
    counts = Counter(mine)
    return renamed, [(known.get(unit) or 0.0) / counts[unit] for unit in mine]


def unit_notes(units: Sequence[MeasuredUnit], *, on_device: bool) -> list[str]:
    """What a reader should know of them."""
    if not units:
        return []
    kept = sum(unit.gathers < 2 for unit in units)
    notes = [f"used: {len(units)} FSDP2 units, {len(units) - kept} of them resharded after forward"]
    if not on_device:
        notes.append("missing: exposed time of the units; on a CPU communication is part of the host's own calls")
        return notes
    exposed = sum(unit.exposed_s or 0.0 for unit in units)
    notes.append(f"used: {format_seconds(exposed)} of each iteration exposed, which times of computation leave out")
    notes.append("guessed: copies into and out of collectives' buffers are counted as computation")
    return notes


class Computing:
    """When the device has done what the host asked, on a clock that stands still while it waits for collectives."""

    def __init__(self, facts: Facts, clock: DeviceClock) -> None:
        self.clock = clock
        self.gaps = np.zeros((0, 2))
        if clock.on_device and facts.transfers:
            self.gaps = _waits(facts.transfers, clock)

    def done(self, moment: float) -> float:
        moment = self.clock.done(moment)
        if not self.gaps.size or moment <= self.gaps[0, 0]:
            return moment
        return moment - common(np.array([[self.gaps[0, 0], moment]]), self.gaps)


def unit_collectives(facts: Facts) -> list[tuple[str, Transfer]]:
    """(unit, collective) of each; none where the trace is not FSDP2's."""
    marks = fsdp_marks(facts.marks)
    issues = [(unit, mark, _ISSUES[what]) for what, unit, mark in marks if what in _ISSUES]
    if not issues:
        return []
    wanted = {one.correlation for one in facts.transfers}
    launched = {
        tag: start for tag, start in zip(facts.launches.tag, facts.launches.start, strict=True) if tag in wanted
    }
    starts = [mark.start for _, mark, _ in issues]
    found, left = [], []
    for one in sorted(facts.transfers, key=lambda transfer: transfer.start):
        moment = launched.get(one.correlation)
        if moment is None:
            left.append(one)
            continue
        index = bisect_right(starts, moment) - 1
        # Marks of one host nest: the latest that began and has not ended.
        while index >= 0 and issues[index][1].end < moment:
            index -= 1
        if index >= 0:
            found.append((issues[index][0], one))
    return found or _by_order(left, issues)


def _by_order(transfers: Sequence[Transfer], issues: Sequence[tuple[str, Mark, str]]) -> list[tuple[str, Transfer]]:
    """The n-th reduction is the n-th issue's; gloo reduces and scatters by an all-reduce. Where there are twice as many
    as issues, each issues two: a reduce-scatter and the all-reduce of the copies."""
    found = []
    for kind in set(_ISSUES.values()):
        issued = [unit for unit, _, one in issues if one == kind]
        kinds = (kind,) if kind == "all_gather" else ("reduce_scatter", "all_reduce")
        sent = [one for one in transfers if one.kind in kinds]
        each, over = divmod(len(sent), len(issued)) if issued else (0, 1)
        if not over:
            found += [
                (issued[index // each], replace(one, name="all_reduce" if index % each else kind))
                for index, one in enumerate(sent)
            ]
    return sorted(found, key=lambda one: one[1].start)


def _waits(transfers: Sequence[Transfer], clock: DeviceClock) -> NDArray[np.float64]:
    """Intervals in which the device communicates and computes nothing."""
    return without(union(np.array([[one.start, one.end] for one in transfers])), clock.busy)


def _bytes(transfers: Sequence[Transfer], shards: int | None = 1) -> int | None:
    """Of the whole unit: an all-gather's input is one shard of it."""
    sizes = []
    for one in transfers:
        count = 1 if shards == 1 else one.workers or shards
        if one.bytes is not None and count is not None:
            sizes.append(one.bytes * count)
    return max(sizes, default=None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
