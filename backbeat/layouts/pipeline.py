"""Pipeline schedules, as events and in closed form.

A stage does what its program says (`stage_programs`). A transfer starts when both of its ends have posted it and their
streams are free, so that schedules differ in how many of their sends a step waits for.

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble m·t + (p - 1)·max(0, F + B - 2W)
with B whole, of which W is the weights' part. Sends add to it (`_exposed_sends`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from backbeat.errors import BackbeatError
from backbeat.layouts.stage_programs import Act, Operation, Transfer, programs

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from backbeat.layouts.layout import PipelineSchedule
    from backbeat.layouts.stage_times import StageTimes

Streams = Literal["direction", "pair", "rank"]
"""Which transfers of a stage run one after the other, in the order they were posted: those to or from one neighbour
(gloo, and frameworks that give each its own communicator), all with one neighbour (NCCL in torch 2.13), or all of them
(NCCL in torch before)."""


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


def run(
    schedule: PipelineSchedule,
    stages: int,
    count: int,
    times: Sequence[StageTimes],
    send_s: float,
    streams: Streams = "direction",
) -> PipelineRun:
    """The step as events. `times` are of every chunk in the order of layers: chunk c of stage s is c·stages + s."""
    split = schedule == "zero-bubble" and stages > 1
    played = _Played(stages, times, split, _Transfers(stages, send_s, streams))
    left = [deque(each) for each in programs(schedule, stages, count, len(times) // stages)]
    going = True
    while going:
        going = False
        for stage, acts in enumerate(left):
            while acts and played.act(stage, acts[0]):
                acts.popleft()
                going = True
    if any(left):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    last = {each.stage: each.start_s for each in played.done if each.operation[:2] == ("B", count - 1)}
    return PipelineRun(tuple(played.free), tuple(last[stage] for stage in range(stages)), tuple(played.done))


class _Played:
    """What stages have computed so far, and when."""

    def __init__(self, stages: int, times: Sequence[StageTimes], split: bool, transfers: _Transfers) -> None:
        self._stages, self._times, self._split, self._transfers = stages, times, split, transfers
        self.free = [0.0] * stages
        self.done: list[Performed] = []

    def act(self, stage: int, act: Act) -> bool:
        """Do it, unless it waits for something that is not yet under way."""
        if isinstance(act.what, Operation):
            self._do(stage, act.what)
        elif act.verb == "post":
            self._transfers.post(stage, act.what, self.free[stage])
        elif not all(transfer in self._transfers.ends for transfer in act.what):
            return False
        else:
            self.free[stage] = max(self.free[stage], *(self._transfers.ends[transfer] for transfer in act.what))
        return True

    def _do(self, stage: int, operation: Operation) -> None:
        times = self._times[operation.chunk * self._stages + stage]
        backward_s = times.input_s if self._split else times.backward_s
        start = self.free[stage]
        self.free[stage] += {"F": times.forward_s, "B": backward_s, "W": times.weight_s}[operation.kind]
        self.done.append(Performed(stage, operation, start, self.free[stage]))


@dataclass(slots=True)
class _Batch:
    """Transfers that one end has posted together, and that run together."""

    posted_s: float
    left: list[Transfer]
    end_s: float = 0.0


class _Transfers:
    """Sends and receives on their way. A transfer starts when its batch is the first in the queue of either end."""

    def __init__(self, stages: int, send_s: float, streams: Streams) -> None:
        self._stages, self._send_s, self._streams = stages, send_s, streams
        self._queues: defaultdict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._free_s: defaultdict[Hashable, float] = defaultdict(float)
        """When the batch before was done."""
        self.ends: dict[Transfer, float] = {}

    def post(self, stage: int, transfers: tuple[Transfer, ...], now: float) -> None:
        batches: dict[Hashable, _Batch] = {}
        for transfer in transfers:
            batches.setdefault(self._queue(transfer, stage), _Batch(now, [])).left.append(transfer)
        for queue, batch in batches.items():
            self._queues[queue].append(batch)
            self._advance(queue)

    def _ends(self, transfer: Transfer) -> tuple[int, int]:
        to = transfer[2] % self._stages
        return (to + (-1 if transfer[0] == "F" else 1)) % self._stages, to

    def _queue(self, transfer: Transfer, stage: int) -> Hashable:
        origin, to = self._ends(transfer)
        peer = origin if stage == to else to
        return {"rank": stage, "pair": (stage, peer), "direction": (stage, peer, stage == to)}[self._streams]

    def _advance(self, queue: Hashable) -> None:
        """Start what is first at both ends, and what that makes first."""
        changed = [queue]
        while changed:
            waiting = self._queues[changed.pop()]
            for transfer in tuple(waiting[0].left) if waiting else ():
                queues = [self._queue(transfer, end) for end in self._ends(transfer)]
                if all(self._queues[each] and transfer in self._queues[each][0].left for each in queues):
                    start = max(max(self._free_s[each], self._queues[each][0].posted_s) for each in queues)
                    self.ends[transfer] = start + self._send_s
                    changed += [each for each in queues if self._ended(each, transfer)]

    def _ended(self, queue: Hashable, transfer: Transfer) -> bool:
        """Whether the next batch is first now."""
        batch = self._queues[queue][0]
        batch.left.remove(transfer)
        batch.end_s = max(batch.end_s, self.ends[transfer])
        if batch.left:
            return False
        self._free_s[queue] = batch.end_s
        self._queues[queue].popleft()
        return True


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
