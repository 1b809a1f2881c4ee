"""Pipeline schedules, as events and in closed form.

A stage does what its program says (`stage_programs`). A transfer starts when both of its ends have posted it and their
streams are free, so that schedules differ in how many of their sends a step waits for.

Closed forms, for p stages, m micro-batches and stages of equal time t = F + B and no sends:
GPipe and 1F1B (m + p - 1)·t; interleaved with v chunks m·t + (p - 1)·t/v; zero-bubble (m + p - 1)·(t - W) +
max(1, m - p + 1)·W, where W is the weights' part of B and takes no longer than F or B - W. Sends add to it
(`_exposed_sends`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from backbeat.errors import BackbeatError
from backbeat.layouts.stage_times import StageTimes
from backbeat.model.framework import Streams
from backbeat.steps.stage_programs import Operation, PipelineSchedule, Transfer, programs

_SIMULATED_ROUNDS = 6
"""Of as many micro-batches as stages, at first."""
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
    operation is to be `listed`, only in time.
    """
    simulated = partial(_simulated, schedule, stages, times=times, send_s=send_s, streams=streams, late_s=late_s)
    rounds = _SIMULATED_ROUNDS
    while rounds < count // stages and schedule != "gpipe" and stages > 1:
        first_count = rounds * stages + count % stages
        short = simulated(first_count)
        period = _period(short.performed, stages, first_count, by_rounds=schedule == "interleaved")
        if period is not None:
            periods, more = divmod(count - first_count, period.size)
            return _repeated(simulated(first_count + more) if more else short, period, periods, listed=listed)
        rounds *= 2
    return simulated(count)


class _Period(NamedTuple):
    """Micro-batches in the middle of a step, which repeat."""

    first: int
    size: int
    seconds: float
    """From one period to the next."""


def _period(performed: Sequence[Performed], stages: int, count: int, *, by_rounds: bool) -> _Period | None:
    """The period that a step of `count` micro-batches has settled into by its middle; None where it has not.

    After the first micro-batches every stage does the same again and again, later by the same time. How many
    micro-batches one period has depends on schedule and streams. Often it is one, so that a round of as many as there
    are stages repeats, too. Transfers that wait for each other in a queue have periods of their own: of two
    micro-batches, say, which on three stages repeat only after two rounds. Interleaved steps take micro-batches by
    rounds, and whole rounds repeat.
    """
    starts: list[dict[int, float]] = [{} for _ in range(stages)]
    for each in performed:
        if each.operation.kind == "F" and each.operation.chunk == 0:
            starts[each.stage][each.operation.micro_batch] = each.start_s
    first = count // stages // 2 * stages
    # A round first: where it repeats, a step of any length ends as a short one does.
    step = stages if by_rounds else 1
    for size in (stages, *range(step, (count - first) // 2 + 1, step)):
        # The slowest stage sets the pace; others may still be ahead of it.
        seconds = max(own[first + size] - own[first] for own in starts)
        if all(
            math.isclose(own[micro + size] - own[micro], seconds, rel_tol=_SAME)
            for own in starts
            for micro in range(first, count - size)
        ):
            return _Period(first, size, seconds)
    return None


def _repeated(short: PipelineRun, period: _Period, periods: int, *, listed: bool) -> PipelineRun:
    """The step with so many more periods in the middle."""
    performed: list[Performed] = []
    for each in short.performed if listed else ():
        micro = each.operation.micro_batch - period.first
        later = range(periods + 1) if 0 <= micro < period.size else (0,) if micro < 0 else (periods,)
        for number in later:
            operation = each.operation._replace(micro_batch=each.operation.micro_batch + number * period.size)
            shift_s = number * period.seconds
            performed.append(Performed(each.stage, operation, each.start_s + shift_s, each.end_s + shift_s))
    ends, last = (
        tuple(moment + periods * period.seconds for moment in moments)
        for moments in (short.end_s, short.last_backward_s)
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
) -> PipelineRun:
    split = schedule == "zero-bubble" and stages > 1
    seconds = [
        {"F": each.forward_s, "B": each.input_s if split else each.backward_s, "W": each.weight_s} for each in times
    ]
    transfers = _Transfers(stages, send_s, streams, late_s)
    acts = programs(schedule, stages, count, len(times) // stages, early=streams == "direction")
    left = [deque(each) for each in acts]
    free = [0.0] * stages
    waiting: set[int] = set()
    performed: list[Performed] = []
    stages_free = [(0.0, stage) for stage in range(stages)]
    while stages_free or transfers.next_s < float("inf"):
        if not stages_free or transfers.next_s <= stages_free[0][0]:
            now = transfers.next_s
            for stage in transfers.finish() & waiting:
                waiting.remove(stage)
                heapq.heappush(stages_free, (now, stage))
            continue
        now, stage = heapq.heappop(stages_free)
        free[stage] = now
        # Time stands still while a stage posts; what it computes makes it free later.
        while left[stage] and free[stage] == now:
            verb, what = left[stage][0]
            if isinstance(what, Operation):
                free[stage] += seconds[what.chunk * stages + stage][what.kind]
                performed.append(Performed(stage, what, now, free[stage]))
            elif verb == "post":
                transfers.post(stage, what, now)
            elif not transfers.done.issuperset((one, stage) for one in what):
                waiting.add(stage)
                break
            left[stage].popleft()
        if left[stage] and stage not in waiting:
            heapq.heappush(stages_free, (free[stage], stage))
    if any(left):
        raise BackbeatError(f"schedule {schedule} with {stages} stages and {count} micro-batches cannot go on")
    # Of several chunks the one that comes first: the others' gradients become complete one after the other.
    last = {each.stage: each.start_s for each in reversed(performed) if each.operation[:2] == ("B", count - 1)}
    return PipelineRun(tuple(free), tuple(last[stage] for stage in range(stages)), tuple(performed))


@dataclass(slots=True)
class _Batch:
    """Transfers that one end has posted together, and that run together."""

    queue: Hashable
    left: list[Transfer]
    """What is still to come."""


class _Transfers:
    """Sends and receives on their way.

    A transfer starts when its batch is the first in the queues of both ends. Where receivers have buffers, its sender's
    queue is enough, and the sender is done when all but `late_s` has arrived. What leaves a stage at the same time
    shares its NIC, and so does what comes in; only `direction` has a NIC for each.
    """

    def __init__(self, stages: int, send_s: float, streams: Streams, late_s: float | None) -> None:
        self._stages, self._send_s, self._streams = stages, send_s, streams
        self._buffers = late_s is not None
        self._late_s = min(late_s or 0.0, send_s)
        self._queues: defaultdict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._posted: defaultdict[Transfer, dict[int, _Batch]] = defaultdict(dict)
        """By the ends that have posted it and are not done with it."""
        self._left_s: dict[Transfer, float] = {}
        """What each that has started would still take alone."""
        self._received: set[Transfer] = set()
        """Those of them whose receiver is ready."""
        self._unheard: dict[Transfer, Transfer] = {}
        """Receives of which the sender does not know yet, and what the receiver sends it before it tells."""
        self._stops: dict[Transfer, tuple[float, float]] = {}
        """What is left of each when something next changes with it, and how soon that is."""
        self._now = 0.0
        self.next_s = float("inf")
        """When something next changes."""
        self.done: set[tuple[Transfer, int]] = set()
        """Transfers, each with an end that is done with it."""

    def post(self, stage: int, transfers: tuple[Transfer, ...], now: float) -> None:
        batches: dict[Hashable, _Batch] = {}
        for transfer in transfers:
            queue = self._queue(transfer, stage)
            batch = batches.setdefault(queue, _Batch(queue, []))
            batch.left.append(transfer)
            self._posted[transfer][stage] = batch
        for queue, batch in batches.items():
            self._queues[queue].append(batch)
            if self._streams == "connection":
                self._tell(batch, stage)
            self._start(batch, now)
        if self._now == now:
            self._look_ahead()

    def finish(self) -> set[int]:
        """Let what is next happen; the stages that are done with a transfer."""
        self._move(self.next_s)
        touched: set[int] = set()
        for transfer in self._stops:
            origin, to = self._ends(transfer)
            if self._left_s[transfer] <= self._late_s and origin in self._posted[transfer]:
                self._release(transfer, origin)
                touched.add(origin)
            if self._left_s[transfer] <= 0 and transfer in self._received:
                self._release(transfer, to)
                touched.add(to)
                self._received.remove(transfer)
                del self._left_s[transfer], self._posted[transfer]
                self._hear(transfer)
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
        """What is first at both ends; at its sender's alone where a buffer takes it."""
        for transfer in batch.left:
            sends, receives = (self._reached(transfer, end) for end in self._ends(transfer))
            if sends and (receives or self._buffers) and transfer not in self._unheard:
                if now > self._now:
                    self._move(now)
                self._left_s.setdefault(transfer, self._send_s)
                if receives:
                    self._received.add(transfer)

    def _reached(self, transfer: Transfer, end: int) -> bool:
        """Whether an end has come to it in its queue."""
        batch = self._posted[transfer].get(end)
        return (transfer, end) in self.done if batch is None else self._queues[batch.queue][0] is batch

    def _release(self, transfer: Transfer, end: int) -> None:
        """An end is done with it, and comes to what it has posted next."""
        self.done.add((transfer, end))
        batch = self._posted[transfer].pop(end)
        batch.left.remove(transfer)
        queue = self._queues[batch.queue]
        if not batch.left:
            queue.popleft()
            if queue:
                self._start(queue[0], self._now)

    def _tell(self, batch: _Batch, stage: int) -> None:
        """A receiver tells the sender that it is ready, behind what it is sending to it."""
        for transfer in batch.left:
            origin, to = self._ends(transfer)
            before = [one for one in self._left_s if self._ends(one) == (to, origin)]
            if stage == to and before:
                self._unheard[transfer] = before[0]

    def _hear(self, done: Transfer) -> None:
        for transfer in [one for one, before in self._unheard.items() if before == done]:
            del self._unheard[transfer]
            for batch in tuple(self._posted[transfer].values()):
                self._start(batch, self._now)

    def _stop_s(self, transfer: Transfer) -> float | None:
        """What is left when its sender is done or when it has arrived; None where it waits for its receiver."""
        if self._ends(transfer)[0] in self._posted[transfer]:
            return min(self._left_s[transfer], self._late_s)
        return 0.0 if transfer in self._received else None

    def _move(self, now: float) -> None:
        for transfer, (stop_s, soon_s) in self._stops.items():
            if now >= self._now + soon_s:
                self._left_s[transfer] = stop_s
            else:
                self._left_s[transfer] -= (self._left_s[transfer] - stop_s) * (now - self._now) / soon_s
        self._now = now

    def _look_ahead(self) -> None:
        stops = {one: stop_s for one in self._left_s if (stop_s := self._stop_s(one)) is not None}
        slowed = self._slowed([one for one, stop_s in stops.items() if self._left_s[one] > stop_s])
        self._stops = {
            one: (stop_s, (self._left_s[one] - stop_s) * slowed.get(one, 1)) for one, stop_s in stops.items()
        }
        self.next_s = self._now + min((soon_s for _, soon_s in self._stops.values()), default=float("inf"))

    def _slowed(self, moving: list[Transfer]) -> dict[Transfer, int]:
        """How many share the busier of the two NICs that each crosses."""
        if self._streams == "direction":
            return {}
        ends = {transfer: self._ends(transfer) for transfer in moving}
        out, into = (Counter(each) for each in zip(*ends.values(), strict=True)) if ends else (Counter(), Counter())
        return {transfer: max(out[origin], into[to]) for transfer, (origin, to) in ends.items()}


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
    return PipelineRun((seconds,) * stages, tuple(last))
