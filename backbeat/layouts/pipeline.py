"""Pipeline schedules, as events and in closed form.

A stage runs its operations in the order its schedule says, each once the stage is free and its input has come. `F` is
forward, `B` backward; zero-bubble splits backward into `B` (the input's gradient, which the stage before waits for) and
`W` (gradients of weights, which fill the waiting).

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble m·t + (p - 1)·max(0, F + B - 2W)
with B whole, of which W is the weights' part.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from backbeat.errors import BackbeatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.layouts.layout import PipelineSchedule
    from backbeat.layouts.stage_times import StageTimes


class Operation(NamedTuple):
    """Forward or backward of one micro-batch through one chunk."""

    kind: str
    micro_batch: int
    chunk: int


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
    """When each stage starts the backward pass of its last micro-batch: from then on gradients are complete."""
    performed: tuple[Performed, ...] = ()

    @property
    def seconds(self) -> float:
        return max(self.end_s)


def order(schedule: PipelineSchedule, stage: int, stages: int, count: int, chunks: int) -> list[Operation]:
    """What a stage does, first to last.

    >>> " ".join(f"{each.kind}{each.micro_batch}" for each in order("1f1b", 0, 2, 3, 1))
    'F0 F1 B0 F2 B1 B2'
    """
    if schedule == "interleaved" and stages > 1:
        total = count * chunks
        ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
        forward = [_interleaved(place, stages, chunks) for place in range(total)]
        backward = [(micro, chunks - 1 - chunk) for micro, chunk in forward]
    else:
        ahead = count if schedule == "gpipe" else min(stages - stage - 1, count)
        forward = backward = [(micro, 0) for micro in range(count)]
    found = [Operation("F", *each) for each in forward[:ahead]]
    for place in range(ahead, len(forward)):
        found += [Operation("F", *forward[place]), Operation("B", *backward[place - ahead])]
    return found + [Operation("B", *each) for each in backward[len(forward) - ahead :]]


def _interleaved(place: int, stages: int, chunks: int) -> tuple[int, int]:
    """Rounds of `stages` micro-batches go through every chunk before the next round starts."""
    rounds, within = divmod(place, stages * chunks)
    chunk, micro = divmod(within, stages)
    return rounds * stages + micro, chunk


def run(schedule: PipelineSchedule, stages: int, count: int, times: Sequence[StageTimes], send_s: float) -> PipelineRun:
    """The step as events. `times` are of every chunk in the order of layers: chunk c of stage s is c·stages + s."""
    chunks = len(times) // stages
    split = schedule == "zero-bubble" and stages > 1
    queues = [deque(order(schedule, stage, stages, count, chunks)) for stage in range(stages)]
    held: list[deque[Operation]] = [deque() for _ in range(stages)]
    last = len(times) - 1
    ready: dict[tuple[str, int, int], float] = {("F", micro, 0): 0.0 for micro in range(count)}
    free = [0.0] * stages
    done: list[Performed] = []
    last_backward = [0.0] * stages
    going = True
    while going:
        going = False
        for stage in range(stages):
            queue = queues[stage]
            while queue:
                operation = queue[0]
                place = operation.chunk * stages + stage
                kind, micro = operation.kind, operation.micro_batch
                there = ready.get((kind, micro, place))
                if there is None:
                    break
                going = True
                # Where a stage would wait, it computes gradients of weights it has put off, if one fits.
                while split and held[stage] and free[stage] + 0.5 * times[place].weight_s <= there:
                    _perform(held[stage].popleft(), stage, free, times[stage].weight_s, free[stage], done)
                queue.popleft()
                one = times[place]
                seconds = one.forward_s if kind == "F" else one.input_s if split else one.backward_s
                if kind == "B" and micro == count - 1:
                    last_backward[stage] = max(there, free[stage])
                _perform(operation, stage, free, seconds, there, done)
                if split and kind == "B":
                    held[stage].append(Operation("W", micro, operation.chunk))
                _release(ready, kind, micro, place, last, free[stage], send_s)
    if any(queues):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    for stage in range(stages):
        while held[stage]:
            _perform(held[stage].popleft(), stage, free, times[stage].weight_s, free[stage], done)
    return PipelineRun(tuple(free), tuple(last_backward), tuple(done))


def _perform(
    operation: Operation, stage: int, free: list[float], seconds: float, there: float, done: list[Performed]
) -> None:
    start = max(there, free[stage])
    free[stage] = start + seconds
    done.append(Performed(stage, operation, start, free[stage]))


def _release(
    ready: dict[tuple[str, int, int], float], kind: str, micro: int, place: int, last: int, now: float, send_s: float
) -> None:
    """What can start once this is done: the next chunk, or backward where there is none."""
    if kind == "F" and place == last:
        ready["B", micro, place] = now
    elif kind == "F":
        ready["F", micro, place + 1] = now + send_s
    elif place > 0:
        ready["B", micro, place - 1] = now + send_s


def closed_form(
    schedule: PipelineSchedule, stages: int, count: int, times: Sequence[StageTimes], send_s: float
) -> PipelineRun:
    """The slowest stage sets the pace; the others fill and drain once. Sends delay each round trip."""
    chunks = len(times) // stages
    totals = [sum(one.total_s for one in times[stage::stages]) for stage in range(stages)]
    slowest = max(totals)
    if stages == 1:
        return _uniform(stages, count * slowest, times)
    fill = (sum(totals) - slowest) / chunks
    trips = 2 * send_s * (stages - 1)
    if schedule == "zero-bubble":
        weight = sum(one.weight_s for one in times) / stages
        fill = max(0.0, fill - 2 * weight * (stages - 1))
    steady = 0.0 if schedule in ("gpipe", "interleaved") else 2 * send_s * (stages - 1) / stages
    return _uniform(stages, count * (slowest + steady) + fill + trips - steady, times)


def _uniform(stages: int, seconds: float, times: Sequence[StageTimes]) -> PipelineRun:
    """Every stage is taken to end with the last: what it communicates then hides behind its own backward alone."""
    last = [seconds - max(one.backward_s for one in times[stage::stages]) for stage in range(stages)]
    return PipelineRun((seconds,) * stages, tuple(last))


def in_flight(schedule: PipelineSchedule, stage: int, stages: int, count: int, chunks: int) -> float:
    """Micro-batches whose activations a stage holds at most, each counted for all of its chunks.

    >>> in_flight("1f1b", 0, 4, 16, 1), in_flight("gpipe", 0, 4, 16, 1), in_flight("interleaved", 0, 4, 16, 2)
    (4.0, 16.0, 5.5)
    """
    if schedule == "gpipe":
        return float(count)
    if schedule == "interleaved" and stages > 1:
        return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, count * chunks) / chunks
    return float(min(stages - stage, count))
