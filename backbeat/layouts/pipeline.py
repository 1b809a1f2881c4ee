"""Pipeline schedules, as events and in closed form.

A stage runs its operations in the order its schedule says, each once the stage is free and its input has come. `F` is
forward, `B` backward; zero-bubble splits backward into `B` (the input's gradient, which the stage before waits for) and
`W` (gradients of weights, which fill the waiting).

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble m·t + (p - 1)·max(0, F + B - 2W)
with B whole, of which W is the weights' part. A transfer starts when both ends have posted it, so that schedules differ
in how many of their sends the step waits for (`_exposed_sends`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    """What a stage computes, first to last.

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
    found += [Operation("B", *each) for each in backward[len(forward) - ahead :]]
    return _split(found, stage) if schedule == "zero-bubble" and stages > 1 else found


def _split(operations: list[Operation], stage: int) -> list[Operation]:
    """Stage s computes the gradient of weights s backward passes later, as ZB-H1 does (Qi et al., 2024).

    >>> " ".join(f"{each.kind}{each.micro_batch}" for each in order("zero-bubble", 1, 2, 3, 1))
    'F0 B0 F1 B1 W0 F2 B2 W1 W2'
    """
    found = []
    put_off: deque[Operation] = deque()
    for operation in operations:
        found.append(operation)
        if operation.kind == "B":
            put_off.append(Operation("W", operation.micro_batch, operation.chunk))
            if len(put_off) > stage:
                found.append(put_off.popleft())
    return [*found, *put_off]


def _interleaved(place: int, stages: int, chunks: int) -> tuple[int, int]:
    """Rounds of `stages` micro-batches go through every chunk before the next round starts."""
    rounds, within = divmod(place, stages * chunks)
    chunk, micro = divmod(within, stages)
    return rounds * stages + micro, chunk


Transfer = tuple[str, int, int]
"""What a chunk waits for, by the operation that takes it: its kind, micro-batch and place among all chunks."""


class Act(NamedTuple):
    """One thing that a stage does next: wait for transfers, compute, or post sends and receives."""

    verb: Literal["wait", "do", "post"]
    what: tuple[Transfer, ...] | Operation


def program(schedule: PipelineSchedule, stage: int, stages: int, count: int, chunks: int) -> list[Act]:
    """A stage's operations with what it posts and waits for between them, as torch's schedules and Megatron's do it.

    GPipe posts a receive when it has nothing else to do, and waits for it. 1F1B does so too, and where it goes from
    forward to backward or back, it swaps an activation for a gradient with its neighbour and waits for both. The other
    schedules have posted their receives before; they wait for what they need alone.

    >>> [act.verb for act in program("1f1b", 0, 2, 2, 1)]
    ['do', 'post', 'do', 'wait', 'post', 'wait', 'do', 'post', 'wait', 'do']
    """
    last = stages * chunks - 1
    operations = order(schedule, stage, stages, count, chunks)
    inputs = [_input(each, stage, stages, last) for each in operations]
    outputs = [_output(each, stage, stages, last) for each in operations]
    ahead = schedule in ("interleaved", "zero-bubble")
    acts: list[Act] = []
    # Not yet posted, to be swapped for the next input; posted, and waited for before the next is.
    unsent: tuple[Transfer, ...] = ()
    sent: tuple[Transfer, ...] = ()
    for place, operation in enumerate(operations):
        if not ahead:
            acts.append(Act("post", unsent + inputs[place]))
        acts += [Act("wait", unsent + inputs[place]), Act("do", operation)]
        unsent = ()
        if schedule == "1f1b":
            acts.append(Act("wait", sent))
            sent = ()
            if place + 1 < len(operations) and operations[place + 1].kind != operation.kind:
                unsent = outputs[place]
                continue
        acts.append(Act("post", outputs[place]))
        sent = outputs[place]
    return [act for act in (*acts, Act("wait", sent)) if act.what]


def _input(operation: Operation, stage: int, stages: int, last: int) -> tuple[Transfer, ...]:
    """What an operation waits for from another stage."""
    kind, micro, chunk = operation
    place = chunk * stages + stage
    waits = stages > 1 and {"F": place > 0, "B": place < last, "W": False}[kind]
    return ((kind, micro, place),) if waits else ()


def _output(operation: Operation, stage: int, stages: int, last: int) -> tuple[Transfer, ...]:
    """What it sends to another."""
    kind, micro, chunk = operation
    after = chunk * stages + stage + (1 if kind == "F" else -1)
    return ((kind, micro, after),) if stages > 1 and kind != "W" and 0 <= after <= last else ()


def run(schedule: PipelineSchedule, stages: int, count: int, times: Sequence[StageTimes], send_s: float) -> PipelineRun:
    """The step as events. `times` are of every chunk in the order of layers: chunk c of stage s is c·stages + s."""
    chunks = len(times) // stages
    played = _Played(schedule, stages, times, send_s)
    programs = [deque(program(schedule, stage, stages, count, chunks)) for stage in range(stages)]
    going = True
    while going:
        going = False
        for stage, acts in enumerate(programs):
            while acts and played.act(stage, acts[0]):
                acts.popleft()
                going = True
    if any(programs):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    last = {each.stage: each.start_s for each in played.done if each.operation[:2] == ("B", count - 1)}
    return PipelineRun(tuple(played.free), tuple(last[stage] for stage in range(stages)), tuple(played.done))


class _Played:
    """What stages have done so far, and when."""

    def __init__(self, schedule: PipelineSchedule, stages: int, times: Sequence[StageTimes], send_s: float) -> None:
        self._stages, self._times, self._send_s = stages, times, send_s
        self._split = schedule == "zero-bubble" and stages > 1
        self._ahead = schedule in ("interleaved", "zero-bubble")
        self._posted: dict[Transfer, float] = {}
        self._arrived: dict[Transfer, float] = {}
        self._link_free: dict[tuple[str, int], float] = {}
        self.free = [0.0] * stages
        self.done: list[Performed] = []

    def act(self, stage: int, act: Act) -> bool:
        """Do it, unless it waits for something that is not yet under way."""
        if isinstance(act.what, Operation):
            self._do(stage, act.what)
        elif act.verb == "post":
            for transfer in act.what:
                self._post(stage, transfer)
        elif not all(transfer in self._arrived for transfer in act.what):
            return False
        else:
            self.free[stage] = max(self.free[stage], *(self._arrived[transfer] for transfer in act.what))
        return True

    def _do(self, stage: int, operation: Operation) -> None:
        times = self._times[operation.chunk * self._stages + stage]
        backward_s = times.input_s if self._split else times.backward_s
        start = self.free[stage]
        self.free[stage] += {"F": times.forward_s, "B": backward_s, "W": times.weight_s}[operation.kind]
        self.done.append(Performed(stage, operation, start, self.free[stage]))

    def _post(self, stage: int, transfer: Transfer) -> None:
        """A transfer starts when both ends have posted it and the link between them is free."""
        if not self._ahead and transfer not in self._posted:
            self._posted[transfer] = self.free[stage]
            return
        link = (transfer[0], transfer[2] % self._stages)
        start = max(self.free[stage], self._posted.get(transfer, 0.0), self._link_free.get(link, 0.0))
        self._arrived[transfer] = self._link_free[link] = start + self._send_s


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
        weight = sum(one.weight_s for one in times) / stages
        fill = max(0.0, fill - 2 * weight * (stages - 1))
    return _uniform(stages, count * slowest + fill + _exposed_sends(schedule, stages, count, chunks) * send_s, times)


def _exposed_sends(schedule: PipelineSchedule, stages: int, count: int, chunks: int) -> int:
    """Sends that lengthen a step of equal stages and many micro-batches, where one takes less than a pass."""
    if schedule == "gpipe":
        return 2 * (count + stages - 2)
    if schedule == "1f1b":
        return count + 1 if stages == 2 else 2 * (count + stages) - 5
    if schedule == "interleaved":
        return 2 * (stages * chunks - 1)
    return 4 * (stages - 1)


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
