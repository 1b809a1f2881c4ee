"""Pipeline schedules, as events and in closed form.

A stage does what its program says (`stage_programs`). A transfer starts when both of its ends have posted it and their
streams are free, so that schedules differ in how many of their sends a step waits for.

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble m·t + (p - 1)·max(0, F + B - 2W)
with B whole, of which W is the weights' part. Sends add to it (`_exposed_sends`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from backbeat.errors import BackbeatError
from backbeat.layouts.stage_programs import Act, Operation, Transfer, programs

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from backbeat.layouts.layout import PipelineSchedule
    from backbeat.layouts.stage_times import StageTimes

Streams = Literal["direction", "connection", "pair", "rank"]
"""Which transfers of a stage run one after the other. In the order they were posted: those to or from one neighbour
(`direction`, where each has a communicator), all with one neighbour (`pair`: NCCL in torch 2.13), or all of them
(`rank`: NCCL in torch before). `connection`: as `direction`, and two stages send one thing at a time, whichever is
ready first (gloo)."""


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
    # What happens first is looked at first, so that transfers get a connection in the order they are ready.
    turns = [(0.0, stage) for stage in range(stages)]
    while turns:
        now, stage = heapq.heappop(turns)
        while left[stage] and played.free[stage] <= now:
            if not played.act(stage, left[stage][0]):
                break
            left[stage].popleft()
        else:
            if left[stage]:
                heapq.heappush(turns, (played.free[stage], stage))
        for woken in played.woken():
            heapq.heappush(turns, (max(now, played.free[woken]), woken))
    if any(left):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    last = {each.stage: each.start_s for each in played.done if each.operation[:2] == ("B", count - 1)}
    return PipelineRun(tuple(played.free), tuple(last[stage] for stage in range(stages)), tuple(played.done))


class _Played:
    """What stages have computed so far, and when."""

    def __init__(self, stages: int, times: Sequence[StageTimes], split: bool, transfers: _Transfers) -> None:
        self._stages, self._times, self._split, self._transfers = stages, times, split, transfers
        self._waiting: dict[int, tuple[Transfer, ...]] = {}
        self.free = [0.0] * stages
        self.done: list[Performed] = []

    def act(self, stage: int, act: Act) -> bool:
        """Do it, unless it waits for something that is not yet under way."""
        if isinstance(act.what, Operation):
            self._do(stage, act.what)
        elif act.verb == "post":
            self._transfers.post(stage, act.what, self.free[stage])
        elif not self._transfers.ends.keys() >= set(act.what):
            self._waiting[stage] = act.what
            return False
        else:
            self.free[stage] = max(self.free[stage], *(self._transfers.ends[transfer] for transfer in act.what))
        return True

    def woken(self) -> list[int]:
        """Stages that no longer have to wait for something to be posted."""
        found = []
        for stage in self._transfers.touched:
            if stage in self._waiting and self._transfers.ends.keys() >= set(self._waiting[stage]):
                del self._waiting[stage]
                found.append(stage)
        self._transfers.touched.clear()
        return found

    def _do(self, stage: int, operation: Operation) -> None:
        times = self._times[operation.chunk * self._stages + stage]
        backward_s = times.input_s if self._split else times.backward_s
        start = self.free[stage]
        self.free[stage] += {"F": times.forward_s, "B": backward_s, "W": times.weight_s}[operation.kind]
        self.done.append(Performed(stage, operation, start, self.free[stage]))


@dataclass(slots=True)
class _Batch:
    """Transfers that one end has posted together, and that run together."""

    queue: Hashable
    posted_s: float
    left: list[Transfer]
    """What is still to come."""
    end_s: float = 0.0


class _Transfers:
    """Sends and receives on their way.

    A transfer starts when its batch is the first in the queue of either end, and the sender's way out and the
    receiver's way in are free: whatever two neighbours send crosses the same NIC.
    """

    def __init__(self, stages: int, send_s: float, streams: Streams) -> None:
        self._stages, self._send_s, self._streams = stages, send_s, streams
        self._queues: defaultdict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._free_s: defaultdict[Hashable, float] = defaultdict(float)
        """When a queue's batch before was done, or the last transfer through a NIC or a connection."""
        self._posted: defaultdict[Transfer, list[_Batch]] = defaultdict(list)
        self.ends: dict[Transfer, float] = {}
        self.touched: list[int] = []
        """Stages whose transfers have started since this was last cleared."""

    def post(self, stage: int, transfers: tuple[Transfer, ...], now: float) -> None:
        batches: dict[Hashable, _Batch] = {}
        for transfer in transfers:
            queue = self._queue(transfer, stage)
            batch = batches.setdefault(queue, _Batch(queue, now, []))
            batch.left.append(transfer)
            self._posted[transfer].append(batch)
        for queue, batch in batches.items():
            self._queues[queue].append(batch)
            self._start(batch)

    def _ends(self, transfer: Transfer) -> tuple[int, int]:
        to = transfer[2] % self._stages
        return (to + (-1 if transfer[0] == "F" else 1)) % self._stages, to

    def _queue(self, transfer: Transfer, stage: int) -> Hashable:
        if self._streams == "rank":
            return stage
        origin, to = self._ends(transfer)
        peer = origin if stage == to else to
        return (stage, peer) if self._streams == "pair" else (stage, peer, stage == to)

    def _start(self, batch: _Batch) -> None:
        """Start what of it can, and what that makes first."""
        first = [batch]
        while first:
            looked_at = first.pop()
            for transfer in tuple(looked_at.left):
                posted = self._posted[transfer]
                if len(posted) == 2 and all(self._queues[each.queue][0] is each for each in posted):
                    self._carry(transfer, max(max(each.posted_s, self._free_s[each.queue]) for each in posted))
                    first += [found for each in posted if (found := self._next(each, transfer))]

    def _carry(self, transfer: Transfer, start: float) -> None:
        origin, to = self._ends(transfer)
        through: list[Hashable] = [("out", origin), ("in", to)]
        if self._streams == "connection":
            through.append(frozenset((origin, to)))
        start = max(start, *(self._free_s[each] for each in through))
        self.ends[transfer] = start + self._send_s
        for each in through:
            self._free_s[each] = self.ends[transfer]
        self.touched += (origin, to)

    def _next(self, batch: _Batch, transfer: Transfer) -> _Batch | None:
        """The batch that is first once this transfer is done."""
        batch.left.remove(transfer)
        batch.end_s = max(batch.end_s, self.ends[transfer])
        if batch.left:
            return None
        self._free_s[batch.queue] = batch.end_s
        queue = self._queues[batch.queue]
        queue.popleft()
        return queue[0] if queue else None


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
