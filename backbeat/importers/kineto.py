"""Profiles from Kineto traces, the files that torch.profiler exports.

A gradient is ready when its accumulation has returned on the host and everything launched before that has finished on
the device. What was used, guessed and missing ends up in the profile's notes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.importers.fsdp_units import Computing, MeasuredUnit, in_units, measured_units, unit_notes
from backbeat.importers.trace_events import TraceReader
from backbeat.importers.trace_facts import DeviceClock, Facts, Mark, Ready, arrays, collect, common, union
from backbeat.model.checks import at_least
from backbeat.model.files import Source, existing
from backbeat.model.profile import Dtype, Gradient, Profile
from backbeat.units import format_bytes, format_seconds

_IDLE = 0.1
"""Above this share of idle device time in backward, the host sets the pace, and profiling slows the host."""
_SHAPES_ADVICE = "profile again with record_shapes=True, or give --like with a profile of the same model"


class Trace(NamedTuple):
    """What a trace says about one worker."""

    profile: Profile
    units: tuple[MeasuredUnit, ...]
    """Of an FSDP2 job, in the order of forward."""


@dataclass(slots=True)
class _Iteration:
    """One iteration on the device's clock, in seconds from the start of backward."""

    forward_s: float | None
    backward_s: float
    update_s: float | None
    ready: list[Ready]
    ready_s: list[float]
    passes: int
    idle: float
    """Share of backward in which the device had nothing to do."""


def load(
    path: str | Path,
    *,
    batch_size: int | None = None,
    model: str | None = None,
    name: str | None = None,
    like: Profile | None = None,
) -> Trace:
    """Read a trace, `.json` or `.json.gz`. `like` gives names and sizes, from a profile of the same model."""
    where = existing(path, "a trace that torch.profiler exported")
    if batch_size is not None:
        at_least("--batch", batch_size, 1)
    reader = TraceReader(where)
    facts = collect(reader)
    facts.ready = sorted(facts.ready or facts.outer_ready, key=lambda one: one.start)
    if not facts.ready:
        raise InputError(
            f"{where}: no gradient is accumulated in its {facts.events} events: profile whole training iterations, "
            "with ProfilerActivity.CPU among the activities"
        )
    clock = DeviceClock(facts)
    windows, notes = _windows(facts.marks)
    units = measured_units(facts, clock, len(windows), _world_size(reader.top))
    # Under FSDP computation waits for parameters: what it waits is not its own time.
    computing = Computing(facts, clock) if units else None
    iterations = [found for window in windows if (found := _iteration(facts, clock, window, computing)) is not None]
    chosen, said = _alike(iterations, where)
    notes += said
    sizes = [ready.bytes for ready in chosen[0].ready]
    if units:
        # A profile holds gradients in fp32; FSDP2 may compute them in the parameters' dtype.
        sizes = [ready.bytes and ready.bytes // ready.element_bytes * 4 for ready in chosen[0].ready]
        like = None if like is None else _in_fp32(like)
    named, said = _named(sizes, like, where)
    notes += said
    forward: list[float | None] = [None] * len(named)
    if units and like is None:
        named, forward = in_units(facts, clock, named, chosen[0].ready, chosen[0].forward_s, units)
    middle, said = _middle(chosen)
    notes += said
    if batch_size is None:
        batch_size, said = _batch(facts, like)
        notes += said
    precision, said = _precision(facts, like)
    notes += [*said, *_communication_notes(facts, clock, len(windows), sharded=bool(units))]
    notes += unit_notes(units, on_device=clock.on_device)
    stem = where.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
    times = [one.passes * ((one.forward_s or 0.0) + one.backward_s) + (one.update_s or 0.0) for one in chosen]
    profile = Profile(
        name=name or stem or "trace",
        model=model or (like.model if like else stem or "unknown"),
        batch_size=batch_size,
        precision=precision,
        device=_device(reader.top, facts),
        forward_s=max(0.0, middle.forward_s or 0.0),
        backward_s=middle.backward_s,
        update_s=max(0.0, middle.update_s or 0.0),
        gradients=tuple(
            Gradient(name=label, bytes=size, ready_s=moment, forward_s=forward_s)
            for (label, size), moment, forward_s in zip(named, middle.ready_s, forward, strict=True)
        ),
        gradient_dtype="fp32" if units else _gradient_dtype(facts, chosen[0].ready, like),
        # With other workers, an iteration contains their slowness too.
        iteration_s=() if facts.transfers else tuple(times),
        accumulation=middle.passes,
        source=Source(method="imported", reference=f"torch.profiler trace {where.name}"),
        notes=tuple(notes),
    )
    return Trace(profile, units)


def _world_size(top: dict[str, Any]) -> int | None:
    facts = top.get("distributedInfo")
    found = facts.get("world_size") if isinstance(facts, dict) else None
    return found if isinstance(found, int) and 0 < found < 2**31 else None


def _windows(marks: Sequence[Mark]) -> tuple[list[tuple[float, float, list[Mark]]], list[str]]:
    """One interval of host time for each iteration, with the marks that start in it; and notes."""
    steps = sorted((mark for mark in marks if mark.name.startswith("ProfilerStep#")), key=lambda mark: mark.start)
    updates = sorted((mark for mark in marks if mark.name.startswith("Optimizer.step#")), key=lambda mark: mark.start)
    if steps:
        edges = [(step.start, step.end) for step in steps]
        note = f"used: {len(steps)} profiler steps"
    elif updates:
        edges = [(before, update.end) for before, update in zip([-np.inf, *(u.end for u in updates)], updates)]  # noqa: B905
        note = f"guessed: {len(updates)} iterations, each ending with an optimizer step; ProfilerStep marks are missing"
    else:
        edges = [(-np.inf, np.inf)]
        note = "guessed: the trace is one iteration; ProfilerStep and optimizer marks are missing"
    return [(low, high, [mark for mark in marks if low <= mark.start < high]) for low, high in edges], [note]


def _iteration(
    facts: Facts, clock: DeviceClock, window: tuple[float, float, list[Mark]], computing: Computing | None
) -> _Iteration | None:
    low, high, marks = window
    first_in, first_after = (bisect_left(facts.ready, edge, key=lambda one: one.start) for edge in (low, high))
    ready = facts.ready[first_in:first_after]
    if not ready:
        return None
    passes = _passes(facts, ready, low, high)
    first, last, fired = passes[-1]
    if len(passes) > 1 and any(_sizes(one[2]) != _sizes(fired) for one in passes):
        # Several losses with parameters of their own: one backward pass, from the first of them.
        passes = [(passes[0][0], last, ready)]
        first, last, fired = passes[0]
    done = clock.done if computing is None else computing.done
    begun = done(first)
    forward = _forward_start(marks, passes, first, low)
    updates = [mark for mark in marks if mark.name.startswith("Optimizer.step#") and mark.start >= first]
    moments = np.maximum.accumulate([max(0.0, done(one.end) - begun) for one in fired])
    return _Iteration(
        forward_s=begun - done(forward) if forward is not None else None,
        backward_s=max(done(last) - begun, float(moments[-1])),
        update_s=sum(clock.busy_s(update) for update in updates) if updates else None,
        ready=fired,
        ready_s=[float(moment) for moment in moments],
        passes=len(passes),
        idle=clock.idle(clock.done(first), clock.done(last)) if computing is None else 0.0,
    )


def _passes(facts: Facts, ready: list[Ready], low: float, high: float) -> list[tuple[float, float, list[Ready]]]:
    """(start, end, accumulations) of each backward pass on the host.

    The engine runs the latest node of the graph first, so a node later than all before it opens another pass.
    Nodes inside other nodes belong to those: reentrant checkpointing runs a backward within the backward.
    """
    starts, ends, numbers = arrays(facts.nodes.start, facts.nodes.end, facts.nodes.tag)
    threads = np.asarray(facts.node_threads, dtype=np.int64)
    inside = np.flatnonzero((starts >= low) & (starts < high))
    passes: list[tuple[float, float, list[Ready]]] = []
    latest, until = -1, dict[int, float]()
    waiting = deque(ready)
    for node in inside[np.argsort(starts[inside], kind="stable")]:
        thread = int(threads[node])
        if starts[node] < until.get(thread, -np.inf):
            continue
        until[thread] = float(ends[node])
        if not passes or (numbers[node] > latest and passes[-1][2]):
            passes.append((float(starts[node]), float(ends[node]), []))
            latest = -1
        latest = max(latest, int(numbers[node]))
        while waiting and waiting[0].start <= ends[node]:
            passes[-1][2].append(waiting.popleft())
        passes[-1] = (passes[-1][0], max(passes[-1][1], float(ends[node])), passes[-1][2])
    if not passes:
        return [(ready[0].start, ready[-1].end, ready)]
    passes[-1][2].extend(waiting)
    return [one for one in passes if one[2]]


def _forward_start(
    marks: Iterable[Mark], passes: list[tuple[float, float, list[Ready]]], first: float, low: float
) -> float | None:
    if len(passes) > 1:
        return passes[-2][1]
    before = [mark for mark in marks if mark.start < first]
    wrapped = [
        mark.start for mark in before if mark.name in ("DistributedDataParallel.forward", "FSDP::root_pre_forward")
    ]
    if wrapped:
        return max(wrapped)
    cleared = [mark.end for mark in before if mark.name.startswith("Optimizer.zero_grad#")]
    if cleared:
        return max(cleared)
    return low if np.isfinite(low) else None


def _sizes(fired: Iterable[Ready]) -> tuple[int | None, ...]:
    return tuple(one.bytes for one in fired)


def _alike(iterations: list[_Iteration], where: Path) -> tuple[list[_Iteration], list[str]]:
    """The iterations that accumulate the same gradients in the same order, most of them; and notes."""
    if not iterations:
        raise InputError(
            f"{where}: no iteration with gradients lies within the profiler's steps: profile whole iterations"
        )
    common, _ = Counter(_sizes(one.ready) for one in iterations).most_common(1)[0]
    chosen = [one for one in iterations if _sizes(one.ready) == common]
    notes = [f"used: {len(chosen)} iterations with {len(common)} gradients each, medians"]
    if len(chosen) < len(iterations):
        notes.append(f"missing: {len(iterations) - len(chosen)} iterations with other gradients were left out")
    return chosen, notes


def _named(sizes: list[int | None], like: Profile | None, where: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Names and bytes in ready order, and notes."""
    if like is None:
        unknown = sum(size is None for size in sizes)
        if unknown:
            raise InputError(f"{where}: {unknown} of {len(sizes)} gradients have no recorded shape: {_SHAPES_ADVICE}")
        note = "guessed: names gradient.0, gradient.1, … in ready order; --like takes them from a profile"
        return [(f"gradient.{index}", size or 0) for index, size in enumerate(sizes)], [note]
    if len(like.gradients) != len(sizes):
        raise InputError(
            f"{where}: has {len(sizes)} gradients, but the profile {like.name!r} has {len(like.gradients)}: "
            "give a profile of the same model"
        )
    left = list(like.gradients)
    named = []
    for index, size in enumerate(sizes):
        match = next((one for one in left if size is None or one.bytes == size), None)
        if match is None:
            raise InputError(
                f"{where}: gradient {index} has {size} bytes, and no gradient of the profile {like.name!r} with this "
                "size is left: give a profile of the same model"
            )
        left.remove(match)
        named.append((match.name, match.bytes))
    moved = sum(name != gradient.name for (name, _), gradient in zip(named, like.gradients, strict=True))
    how = f"guessed: names from {like.name!r}" if moved or None in sizes else f"used: names from {like.name!r}"
    note = f"{how}, by order{' and size' if None not in sizes else ''}{f'; {moved} stand elsewhere' if moved else ''}"
    return named, [note]


def _in_fp32(like: Profile) -> Profile:
    whole = tuple(replace(one, bytes=one.bytes // like.element_bytes * 4) for one in like.gradients)
    return replace(like, gradients=whole, gradient_dtype="fp32")


def _middle(chosen: list[_Iteration]) -> tuple[_Iteration, list[str]]:
    """The medians of alike iterations, and notes."""
    notes: list[str] = []

    def known(what: str, values: list[float]) -> float | None:
        if not values:
            notes.append(f"missing: the {what} time; taken as 0, since the trace does not mark it")
        return median(values) if values else None

    ready = np.maximum.accumulate([median(moments) for moments in zip(*(one.ready_s for one in chosen), strict=True)])
    forward = known("forward", [one.forward_s for one in chosen if one.forward_s is not None])
    update = known("update", [one.update_s for one in chosen if one.update_s is not None])
    idle = median(one.idle for one in chosen)
    if idle > _IDLE:
        notes.append(
            f"missing: the device waited {idle:.0%} of backward for a host that the profiler slows down: ready times "
            "are stretched; raise the batch size, trace without shapes and give --like, or use `backbeat profile`"
        )
    accumulation = Counter(one.passes for one in chosen).most_common(1)[0][0]
    if accumulation > 1:
        notes.append(f"used: the last of {accumulation} backward passes an iteration, as gradient accumulation")
    middle = _Iteration(
        forward_s=forward,
        backward_s=max(median(one.backward_s for one in chosen), float(ready[-1])),
        update_s=update,
        ready=chosen[0].ready,
        ready_s=ready.tolist(),
        passes=accumulation,
        idle=idle,
    )
    return middle, notes


def _batch(facts: Facts, like: Profile | None) -> tuple[int, list[str]]:
    if facts.batch is not None and facts.batch[2] < 2**31:
        _, operator, size = facts.batch
        return size, [f"guessed: batch size {size}, from the input of {operator}; --batch says it"]
    if like is not None:
        return like.batch_size, [f"guessed: batch size {like.batch_size}, from {like.name!r}"]
    return 1, ["missing: the batch size; taken as 1, --batch says it"]


def _precision(facts: Facts, like: Profile | None) -> tuple[str, list[str]]:
    for kind, label in (("c10::BFloat16", "bf16"), ("c10::Half", "fp16")):
        if kind in facts.types:
            return label, [f"guessed: precision {label}, from the operators' inputs"]
    if not facts.types and like is not None:
        return like.precision, []
    return "fp32", ["guessed: precision fp32, no operator has 16-bit inputs; tf32 leaves no mark in a trace"]


def _gradient_dtype(facts: Facts, ready: Sequence[Ready], like: Profile | None) -> Dtype:
    """What most bytes of gradients are in."""
    known = [one for one in ready if one.bytes]
    if not known:
        return like.gradient_dtype if like is not None else "fp32"
    half = sum(one.bytes or 0 for one in known if one.element_bytes == 2)
    if 2 * half <= sum(one.bytes or 0 for one in known):
        return "fp32"
    return "bf16" if "c10::BFloat16" in facts.types else "fp16"


def _device(top: dict[str, Any], facts: Facts) -> str:
    properties = top.get("deviceProperties")
    if facts.kernels.start and isinstance(properties, list) and properties and isinstance(properties[0], dict):
        found = properties[0].get("name")
        if isinstance(found, str) and found:
            return found[:100]
    return "cuda" if facts.kernels.start else "cpu"


def _communication_notes(facts: Facts, clock: DeviceClock, windows: int, *, sharded: bool) -> list[str]:
    transfers = sorted(facts.transfers, key=lambda transfer: transfer.start)
    if not transfers:
        return ["missing: collectives; this is the trace of a single worker"]
    kinds: dict[tuple[str, int | None], list[float]] = {}
    for transfer in transfers:
        kinds.setdefault((transfer.name, transfer.bytes), []).append(transfer.end - transfer.start)
    shown = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    listed = ", ".join(
        f"{len(times)} × {name}{f' {format_bytes(size)}' if size is not None else ''} {format_seconds(median(times))}"
        for (name, size), times in shown[:4]
    )
    notes = [f"used: {len(transfers)} collectives in {windows} iterations: {listed}{', …' if len(shown) > 4 else ''}"]
    talking = union(np.array([[one.start, one.end] for one in transfers]))
    talking_s = float((talking[:, 1] - talking[:, 0]).sum())
    if talking_s > 0:
        host = np.stack(arrays(facts.operators.start, facts.operators.end), axis=1)
        overlap = common(talking, clock.busy if clock.on_device else union(host)) / talking_s
        notes.append(f"used: overlap ratio {overlap:.2f} (time computing while communicating / time communicating)")
    if not sharded:
        notes.append(
            "guessed: ready times of a distributed run taken as one worker's; communication may have slowed them"
        )
    return notes
