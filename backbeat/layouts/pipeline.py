"""Pipeline schedules, as events and in closed form.

A stage does what its program says (`stage_programs`). A transfer starts when both of its ends have posted it and their
streams are free, so that schedules differ in how many of their sends a step waits for.

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble m·t + (p - 1)·max(0, F + B - 2W)
with B whole, of which W is the weights' part. Sends add to it (`_exposed_sends`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from backbeat.errors import BackbeatError
from backbeat.layouts.stage_programs import Act, Operation, Transfer, programs

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from backbeat.layouts.layout import PipelineSchedule
    from backbeat.layouts.stage_times import StageTimes

Streams = Literal["direction", "connection", "pair", "rank"]
"""Which transfers of a stage run one after the other, in the order they were posted.

`direction`: those to one neighbour, and those from it, each on a NIC of its own, with receives posted early: nothing
holds up what is ready, which meets published rows of Megatron's best. The others are torch's, and share a NIC.
`connection`: the same, but a stage tells its neighbour that it is ready to receive behind what it is sending to it, so
that a swap takes two sends (gloo). `pair`: all with one neighbour (NCCL in torch 2.13). `rank`: all (NCCL before)."""


class Performed(NamedTuple):
    """One operation, when it ran."""

    stage: int
    operation: Operation
    start_s: float
    end_s: float


_SIMULATED_ROUNDS = 4
"""Of as many micro-batches as stages."""
_NOTHING_S = 1e-12
"""What is left of transfers that end together."""


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """What a schedule makes of a step's forward and backward passes."""

    end_s: tuple[float, ...]
    """When each stage has done its last."""
    last_backward_s: tuple[float, ...]
    """When each stage starts the backward pass of its last micro-batch, in the chunk that comes first: from then on
    gradients become complete."""
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
    *,
    listed: bool = True,
) -> PipelineRun:
    """The step as events. `times` are of every chunk in the order of layers: chunk c of stage s is c·stages + s.

    Of a step of many micro-batches the ends are simulated, and what repeats in the middle is repeated; unless every
    operation is to be `listed`, only in time.
    """
    rounds = count // stages - _SIMULATED_ROUNDS
    if schedule == "gpipe" or stages == 1 or rounds <= 0:
        return _simulated(schedule, stages, count, times, send_s, streams)
    short = _simulated(schedule, stages, count - rounds * stages, times, send_s, streams)
    begins = {(each.stage, each.operation): each.start_s for each in short.performed}
    middle = range(_SIMULATED_ROUNDS // 2 * stages, (_SIMULATED_ROUNDS // 2 + 1) * stages)
    # The slowest stage sets the pace; others may still be ahead of it.
    period_s = max(
        begins[stage, Operation("F", middle.stop, 0)] - begins[stage, Operation("F", middle.start, 0)]
        for stage in range(stages)
    )
    performed: list[Performed] = []
    for each in short.performed if listed else ():
        micro = each.operation.micro_batch
        later = range(rounds + 1) if micro in middle else (0,) if micro < middle.start else (rounds,)
        for turn in later:
            operation = each.operation._replace(micro_batch=micro + turn * stages)
            shift_s = turn * period_s
            performed.append(Performed(each.stage, operation, each.start_s + shift_s, each.end_s + shift_s))
    ends, last = (
        tuple(moment + rounds * period_s for moment in moments) for moments in (short.end_s, short.last_backward_s)
    )
    return PipelineRun(ends, last, tuple(sorted(performed, key=lambda each: each.start_s)))


def _simulated(
    schedule: PipelineSchedule, stages: int, count: int, times: Sequence[StageTimes], send_s: float, streams: Streams
) -> PipelineRun:
    split = schedule == "zero-bubble" and stages > 1
    transfers = _Transfers(stages, send_s, streams)
    played = _Played(stages, times, split, transfers)
    chunks = len(times) // stages
    left = [deque(each) for each in programs(schedule, stages, count, chunks, early=streams == "direction")]
    turns = [(0.0, stage) for stage in range(stages)]
    while turns or transfers.next_s < float("inf"):
        if not turns or transfers.next_s <= turns[0][0]:
            now = transfers.next_s
            for stage in transfers.finish():
                if played.waiting[stage]:
                    played.waiting[stage] = False
                    heapq.heappush(turns, (now, stage))
            continue
        now, stage = heapq.heappop(turns)
        played.free[stage] = now
        # Time stands still while a stage posts; what it computes makes it free later.
        while left[stage] and played.free[stage] == now and played.act(stage, left[stage][0]):
            left[stage].popleft()
        if left[stage] and not played.waiting[stage]:
            heapq.heappush(turns, (played.free[stage], stage))
    if any(left):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    # Of several chunks the one that comes first: the others' gradients become complete one after the other.
    last = {each.stage: each.start_s for each in reversed(played.done) if each.operation[:2] == ("B", count - 1)}
    return PipelineRun(tuple(played.free), tuple(last[stage] for stage in range(stages)), tuple(played.done))


class _Played:
    """What stages have computed so far, and when."""

    def __init__(self, stages: int, times: Sequence[StageTimes], split: bool, transfers: _Transfers) -> None:
        self._stages, self._times, self._split, self._transfers = stages, times, split, transfers
        self.free = [0.0] * stages
        self.waiting = [False] * stages
        self.done: list[Performed] = []

    def act(self, stage: int, act: Act) -> bool:
        """Do it, unless it waits for something that has not come."""
        if isinstance(act.what, Operation):
            self._do(stage, act.what)
        elif act.verb == "post":
            self._transfers.post(stage, act.what, self.free[stage])
        else:
            self.waiting[stage] = not self._transfers.done.issuperset(act.what)
        return not self.waiting[stage]

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
    left: list[Transfer]
    """What is still to come."""


class _Transfers:
    """Sends and receives on their way.

    A transfer starts when its batch is the first in the queue of either end. Whatever leaves a stage at the same time
    shares its NIC, and so does what comes in; only `direction` has one for each.
    """

    def __init__(self, stages: int, send_s: float, streams: Streams) -> None:
        self._stages, self._send_s, self._streams = stages, send_s, streams
        self._queues: defaultdict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._posted: defaultdict[Transfer, list[_Batch]] = defaultdict(list)
        self._moving: dict[Transfer, float] = {}
        """Seconds that each would still take alone."""
        self._unheard: dict[Transfer, Transfer] = {}
        """Receives of which the sender does not know yet, and what the receiver sends it before it tells."""
        self._shares: Counter[tuple[int, bool]] = Counter()
        """Transfers out of a stage, and into it."""
        self._now = 0.0
        self.next_s = float("inf")
        """When the next is done."""
        self.done: set[Transfer] = set()

    def post(self, stage: int, transfers: tuple[Transfer, ...], now: float) -> None:
        batches: dict[Hashable, _Batch] = {}
        for transfer in transfers:
            queue = self._queue(transfer, stage)
            batch = batches.setdefault(queue, _Batch(queue, []))
            batch.left.append(transfer)
            self._posted[transfer].append(batch)
        for queue, batch in batches.items():
            self._queues[queue].append(batch)
            if self._streams == "connection":
                self._tell(batch, stage)
            self._start(batch, now)

    def finish(self) -> set[int]:
        """Let the next be done; the stages that it joined."""
        now = self.next_s
        self._move(now)
        touched: set[int] = set()
        # The next is done by definition: times are sums of shares, and what is left of it may not be quite zero.
        nothing = max(_NOTHING_S, min(self._moving.values()))
        for transfer in [one for one, left_s in self._moving.items() if left_s <= nothing]:
            origin, to = self._ends(transfer)
            touched |= {origin, to}
            del self._moving[transfer]
            self._shares[origin, True] -= 1
            self._shares[to, False] -= 1
            self.done.add(transfer)
            for heard in [one for one, before in self._unheard.items() if before == transfer]:
                del self._unheard[heard]
                self._start(self._posted[heard][0], now)
            for batch in self._posted.pop(transfer):
                batch.left.remove(transfer)
                queue = self._queues[batch.queue]
                if not batch.left:
                    queue.popleft()
                    if queue:
                        self._start(queue[0], now)
        self._look_ahead()
        return touched

    def _ends(self, transfer: Transfer) -> tuple[int, int]:
        to = transfer[2] % self._stages
        return (to + (-1 if transfer[0] == "F" else 1)) % self._stages, to

    def _queue(self, transfer: Transfer, stage: int) -> Hashable:
        if self._streams == "rank":
            return stage
        origin, to = self._ends(transfer)
        peer = origin if stage == to else to
        return (stage, peer) if self._streams == "pair" else (stage, peer, stage == to)

    def _start(self, batch: _Batch, now: float) -> None:
        """Start what is first at both ends."""
        for transfer in batch.left:
            posted = self._posted[transfer]
            if len(posted) < 2 or transfer in self._unheard or transfer in self._moving:
                continue
            if all(self._queues[each.queue][0] is each for each in posted):
                self._move(now)
                origin, to = self._ends(transfer)
                self._moving[transfer] = self._send_s
                self._shares[origin, True] += 1
                self._shares[to, False] += 1
                self._look_ahead()

    def _tell(self, batch: _Batch, stage: int) -> None:
        """A receiver tells the sender that it is ready, behind what it is sending to it."""
        for transfer in batch.left:
            origin, to = self._ends(transfer)
            before = [one for one in self._moving if self._ends(one) == (to, origin)]
            if stage == to and before:
                self._unheard[transfer] = before[0]

    def _slowed(self, transfer: Transfer) -> int:
        if self._streams == "direction":
            return 1
        origin, to = self._ends(transfer)
        return max(self._shares[origin, True], self._shares[to, False])

    def _move(self, now: float) -> None:
        for transfer, left_s in self._moving.items():
            self._moving[transfer] = left_s - (now - self._now) / self._slowed(transfer)
        self._now = now

    def _look_ahead(self) -> None:
        ends = [left_s * self._slowed(transfer) for transfer, left_s in self._moving.items()]
        self.next_s = self._now + max(0.0, min(ends)) if ends else float("inf")


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
    between = len(times) - stages + 1
    """Chunks that a stage takes backward from its first chunk's last micro-batch on: rounds of as many as stages."""
    last = [seconds - between * max(one.backward_s for one in times[stage::stages]) for stage in range(stages)]
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
