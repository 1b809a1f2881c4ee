"""Pipeline schedules, as events and in closed form.

Events are those of `steps/stage_graph.py`, run by the engine.

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble (m + p - 1)·(t - W) +
max(1, m - p + 1)·W, where W is the weights' part of B and takes no longer than F or B - W. Sends add to it
(`_exposed_sends`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from backbeat.engine import run
from backbeat.engine.graph import MOST_OPS, check_size
from backbeat.model.framework import Streams
from backbeat.model.layout import PipelineSchedule
from backbeat.steps.stage_graph import StageGraph, StageTimes, stage_graph
from backbeat.steps.stage_programs import Operation

_SIMULATED_ROUNDS = 5
"""Of as many micro-batches as stages, at first, or fewer where these would be too many operations."""
_FEWEST_ROUNDS = 3
_OPS = 4
"""Of a graph for each micro-batch and chunk: forward and backward, and a transfer of each."""
_SAME = 1e-9
"""Of the time of a period: what rounding may make of equal ones."""


class Performed(NamedTuple):
    """One operation, when it ran."""

    stage: int
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """What a schedule makes of a step's forward and backward passes."""

    end_s: tuple[float, ...]
    """When each stage has done its last."""
    last_backward_s: tuple[float, ...]
    """When each stage starts the backward pass of its last micro-batch, in the chunk that comes first: from then on
    gradients become complete."""
    performed: tuple[Performed, ...] = ()
    simulated: bool = True
    """Otherwise in closed form."""

    @property
    def seconds(self) -> float:
        return max(self.end_s)


def run_pipeline(
    schedule: PipelineSchedule,
    stages: int,
    count: int,
    times: Sequence[StageTimes],
    send_s: float,
    streams: Streams = "direction",
    late_s: float | None = None,
    *,
    listed: bool = True,
) -> PipelineRun:
    """The step as events. `times` are of every chunk in the order of layers: chunk c of stage s is c·stages + s.
    `late_s` is what is left of a send whose receiver is ready only after its buffer has taken what it can; None where
    nothing is sent before a receiver is ready.

    Of a step of many micro-batches the ends are simulated, and what repeats in the middle is repeated; unless every
    operation is to be `listed`, only in time. Of so many stages that three rounds are too many operations the closed
    form is given.
    """
    simulated = partial(
        _simulated, schedule, stages, times=times, send_s=send_s, streams=streams, late_s=late_s, listed=listed
    )
    each = _OPS + (schedule == "zero-bubble") + (0 if late_s is None else 2)
    most = MOST_OPS // (each * len(times))
    # Under GPipe transfers pile up for stages that are slower, so that ends may come at another pace.
    whole = schedule == "gpipe" and count <= most
    rounds = min(_SIMULATED_ROUNDS, most // stages)
    if count > most and (rounds < _FEWEST_ROUNDS or rounds * stages + count % stages > most):
        return closed_form(schedule, stages, count, times, send_s)
    while rounds < count // stages and not whole:
        first_count = rounds * stages + count % stages
        short = simulated(first_count)
        period = _period(short.performed, schedule, stages, first_count, settled=2 * rounds * stages <= most)
        if period is not None:
            periods, more = divmod(count - first_count, period.size)
            return _repeated(simulated(first_count + more) if more else short, period, periods, listed=listed)
        rounds *= 2
    found = simulated(count)
    return found if listed else replace(found, performed=())


class _Period(NamedTuple):
    """Micro-batches in the middle of a step, which repeat."""

    first: int
    size: int
    seconds: Mapping[str, Sequence[float]]
    """From one period to the next, by kind of operation and stage."""
    backward_later: bool
    """All of backward follows all of forward (GPipe), and moves by what forward takes longer."""

    def later_s(self, kind: str, stage: int, number: int, periods: int) -> float:
        """By how much an operation moves that stands behind so many of all additional periods."""
        before = periods * max(self.seconds["F"]) if self.backward_later and kind != "F" else 0.0
        return before + number * self.seconds[kind][stage]


def _period(
    performed: Sequence[Performed], schedule: PipelineSchedule, stages: int, count: int, *, settled: bool
) -> _Period | None:
    """The period that a step of `count` micro-batches has settled into by its middle; None where it has not, unless
    it need not be `settled`: then it is the mean of a round.

    After the first micro-batches every stage does the same again and again, later by the same time. How many
    micro-batches one period has depends on schedule and streams. Often it is one, so that a round of as many as there
    are stages repeats, too. Transfers that wait for each other in a queue have periods of their own: of two
    micro-batches, say, which on three stages repeat only after two rounds. Interleaved steps take micro-batches by
    rounds, and whole rounds repeat. Under GPipe forward and backward repeat apart, and each stage at a pace of its own.
    """
    apart = schedule == "gpipe"
    starts: dict[str, list[dict[int, float]]] = {kind: [{} for _ in range(stages)] for kind in ("FB" if apart else "F")}
    for each in performed:
        if each.operation.kind in starts and each.operation.chunk == 0:
            starts[each.operation.kind][each.stage][each.operation.micro_batch] = each.start_s
    first = count // stages // 2 * stages
    # A round first: where it repeats, a step of any length ends as a short one does.
    step = stages if schedule == "interleaved" else 1
    for size in (stages, *range(step, (count - first) // 2 + 1, step)):
        paces = {kind: [own[first + size] - own[first] for own in every] for kind, every in starts.items()}
        if not apart:
            # The slowest stage sets the pace; others may still be ahead of it.
            paces = dict.fromkeys("FBW", [max(paces["F"])] * stages)
        if not settled or all(
            math.isclose(own[micro + size] - own[micro], seconds, rel_tol=_SAME)
            for kind, every in starts.items()
            for own, seconds in zip(every, paces[kind], strict=True)
            for micro in range(first, count - size)
        ):
            return _Period(first, size, paces, apart)
    return None


def _repeated(short: PipelineRun, period: _Period, periods: int, *, listed: bool) -> PipelineRun:
    """The step with so many more periods in the middle."""
    performed: list[Performed] = []
    for each in short.performed if listed else ():
        kind, micro, chunk = each.operation
        inside = micro - period.first
        later = range(periods + 1) if 0 <= inside < period.size else (0,) if inside < 0 else (periods,)
        for number in later:
            operation = Operation(kind, micro + number * period.size, chunk)
            shift_s = period.later_s(kind, each.stage, number, periods)
            performed.append(Performed(each.stage, operation, each.start_s + shift_s, each.end_s + shift_s))
    slowest = max(range(len(short.end_s)), key=lambda stage: period.seconds["B"][stage])
    ends = tuple(moment + period.later_s("B", slowest, periods, periods) for moment in short.end_s)
    last = tuple(
        moment + period.later_s("B", stage, periods, periods) for stage, moment in enumerate(short.last_backward_s)
    )
    return PipelineRun(ends, last, tuple(sorted(performed, key=lambda each: each.start_s)))


def _simulated(
    schedule: PipelineSchedule,
    stages: int,
    count: int,
    times: Sequence[StageTimes],
    send_s: float,
    streams: Streams,
    late_s: float | None = None,
    *,
    listed: bool = True,
) -> PipelineRun:
    """Where not every operation is to be `listed`, those are that show a period."""
    if streams == "direction" and late_s is None:
        made = _passes(schedule, stages, count, len(times))
        graph = made.on(times, send_s)
    else:
        made = stage_graph(schedule, stages, count, times, send_s, streams, late_s)
        graph = made.graph
    check_size(graph)
    found = run(graph)
    performed = [
        Performed(stage, operation, found.starts[op], found.ends[op])
        for stage, own in enumerate(made.ops)
        for operation, op in own.items()
        if listed or (operation.chunk == 0 and operation.kind in ("F", "B"))
    ]
    performed.sort(key=lambda each: each.start_s)
    return PipelineRun(made.ends(found), made.last_backward(found), tuple(performed))


@lru_cache(maxsize=8)
def _passes(schedule: PipelineSchedule, stages: int, count: int, chunks: int) -> StageGraph:
    """Many layouts have the same passes."""
    return stage_graph(schedule, stages, count, [StageTimes()] * chunks, 0.0)


def closed_form(
    schedule: PipelineSchedule, stages: int, count: int, times: Sequence[StageTimes], send_s: float
) -> PipelineRun:
    """The slowest stage sets the pace; the others fill and drain once."""
    chunks = len(times) // stages
    totals = [sum(one.total_s for one in times[stage::stages]) for stage in range(stages)]
    slowest = max(totals)
    if stages == 1:
        return _uniform(stages, count * slowest, times)
    fill = (sum(totals) - slowest) / chunks
    if schedule == "zero-bubble":
        forward_s, input_s, weight_s = (
            sum(each) / stages
            for each in zip(*((one.forward_s, one.input_s, one.weight_s) for one in times), strict=True)
        )
        whole = (count + stages - 1) * (forward_s + input_s + weight_s)
        fill = max(0.0, fill - whole + _zero_bubble(stages, count, forward_s, input_s, weight_s))
    return _uniform(stages, count * slowest + fill + _exposed_sends(schedule, stages, count, chunks) * send_s, times)


def _zero_bubble(stages: int, count: int, forward_s: float, input_s: float, weight_s: float) -> float:
    """Equal stages. The first backward pass leaves after a forward through all, and all of them go back through all.
    Between the two a stage computes what it has left: the last one every other forward pass, the first one every other
    gradient of weights. Stages put off as many of these as there are stages before them, so that with few micro-batches
    none fills the waiting. A stage that never waits in between ends after its own work."""
    more = max(count - stages, 0)
    through = stages * forward_s + (stages + count - 1) * input_s + weight_s
    last, first = (count - 1) * forward_s + more * weight_s, more * forward_s + (count - 1) * weight_s
    return max(through + max(last, first), (stages - 1) * forward_s + count * (forward_s + input_s + weight_s))


def _exposed_sends(schedule: PipelineSchedule, stages: int, count: int, chunks: int) -> int:
    """Sends that lengthen a step of equal stages, where one takes less than a pass."""
    if schedule == "gpipe":
        return 2 * (count + stages - 2)
    if schedule == "1f1b":
        return count + 1 if stages == 2 else max(2 * (count + stages) - 5, 2 * (stages - 1))
    if schedule == "interleaved":
        return 2 * (stages * chunks - 1)
    return 2 * (stages - 1) + 2 * max(0, min(count - 2, stages - 1))


def _uniform(stages: int, seconds: float, times: Sequence[StageTimes]) -> PipelineRun:
    """Every stage is taken to end with the last: what it communicates then hides behind its own backward alone."""
    # Chunks that a stage takes backward from its first chunk's last micro-batch on: rounds of as many as stages.
    between = len(times) - stages + 1
    last = [seconds - between * max(one.backward_s for one in times[stage::stages]) for stage in range(stages)]
    return PipelineRun((seconds,) * stages, tuple(last), simulated=False)
