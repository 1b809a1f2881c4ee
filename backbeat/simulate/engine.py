"""When buckets travel: a recursion on one communicator, events on several, which share one link. They may also form at
run time, as Horovod's do.

On one communicator every bucket starts when it is ready and the one before it is done. On several, buckets start in
plan order from one thread. A bucket launches no earlier than the one before it in the plan, no earlier than it is
ready, and not while its communicator carries another. It spends its latency on the communicator alone, then its work on
the link. All buckets on the link get equal shares, and n of them together do e(n) seconds of work a second, so each
gets e(n)/n. Latencies overlap; where they were measured to slow each other down, each of n advances at 1/u(n). A link
that has been idle may give a bucket a head start, where isolated messages were measured to take less than those in a
row; never more than it was idle for.

Run-time fusion is as Horovod does it: at each tick with the communicator free, whatever is ready travels together.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost, MessageTimes
from backbeat.model import DynamicFusion, Profile
from backbeat.simulate.schedule import Flow, Schedule

_NEVER = float("inf")


def communicate(schedule: Schedule, cost: LinkCost, communicators: int) -> Flow:
    """The recursion where one communicator is used, the events otherwise."""
    return one_communicator(schedule, cost) if communicators == 1 else several_communicators(schedule, cost)


def one_communicator(schedule: Schedule, cost: LinkCost) -> Flow:
    """F_k = max(R_k, F_(k-1)) + T(M_k); where back-to-back times were measured, max(R_k + T, F_(k-1) + T_busy).

    Two buckets of 1 MB, ready at 0 and 1 ms, each taking 1 ms + 1 ns/byte: the second waits for the first.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = Schedule(np.array([0.0, 1e-3]), np.array([1e6, 1e6]), [0, 0])
    >>> one_communicator(two, LinkCost(Curve.affine(1e-3, 1e-9))).finishes.tolist()
    [0.002, 0.004]
    """
    return one_by_one(schedule.ready, cost.times(schedule.sizes))


def one_by_one(ready: NDArray[np.float64], times: MessageTimes) -> Flow:
    """Messages that take these times, on one communicator."""
    starts: list[float] = []
    finishes: list[float] = []
    free = -_NEVER
    for moment, alone, busy in zip(ready.tolist(), times.alone.tolist(), times.busy.tolist(), strict=True):
        starts.append(max(moment, free))
        free = max(moment + alone, free + busy)
        finishes.append(free)
    begun, ends = np.array(starts), np.array(finishes)
    # A head start on an idle link is no message sent before it was there.
    return Flow(begun, np.maximum(ends - times.transfer, begun), ends)


class _Shared:
    """Buckets that advance together, each at `rates[n]` while there are n of them.

    Equal rates make one number enough: `served`, what each member has received since it was last empty. A bucket
    that arrives needing some seconds leaves when `served` has grown by them, so the next to leave tops a heap.
    """

    __slots__ = ("members", "rates", "served", "since")

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self.members: list[tuple[float, int]] = []
        self.served = 0.0
        self.since = 0.0

    def leaves(self) -> float:
        """When the next member leaves, if nobody arrives before."""
        if not self.members:
            return _NEVER
        return self.since + (self.members[0][0] - self.served) / self.rates[len(self.members)]

    def enter(self, bucket: int, seconds: float, now: float) -> None:
        if self.members:
            self.served += (now - self.since) * self.rates[len(self.members)]
        else:
            self.served = 0.0
        self.since = now
        heappush(self.members, (self.served + seconds, bucket))

    def leave(self, now: float) -> int:
        self.served, bucket = heappop(self.members)
        self.since = now
        return bucket


def several_communicators(schedule: Schedule, cost: LinkCost) -> Flow:
    """Run the buckets through their communicators and the shared link.

    Two buckets of 1 MB ready together on two communicators, each 1 ms of latency and 1 ms of link: the latencies
    overlap, the transfers share the link, and both end after 1 + 2 ms.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1])
    >>> several_communicators(two, LinkCost(Curve.affine(1e-3, 1e-9))).finishes.round(6).tolist()
    [0.003, 0.003]
    """
    alone, busy, works = (times.tolist() for times in cost.times(schedule.sizes))
    ready = schedule.ready.tolist()
    communicators = schedule.communicators
    count = len(ready)
    # Neither phase ever holds more buckets than there are communicators.
    counts = range(1, len(set(communicators)) + 1)
    starting = _Shared([1.0] + [1 / cost.stretch(n) for n in counts])
    sending = _Shared([1.0] + [cost.efficiency(n) / n for n in counts])
    coming: deque[tuple[float, int, float]] = deque()
    free: dict[int, float] = dict.fromkeys(communicators, -_NEVER)
    carrying: set[int] = set()
    starts, on_link, finishes, on_idle_link = ([0.0] * count for _ in range(4))
    launched, last_launch, idle_since = 0, -_NEVER, -_NEVER

    while True:
        while launched < count and communicators[launched] not in carrying:
            communicator = communicators[launched]
            # After a bucket of its own communicator the communicator keeps the order; only another communicator's
            # launch holds it.
            same = launched > 0 and communicators[launched - 1] == communicator
            floor = ready[launched] if same else max(ready[launched], last_launch)
            unshared = max(floor + alone[launched], free[communicator] + busy[launched])
            last_launch = max(last_launch, ready[launched], free[communicator])
            starts[launched] = last_launch
            begins = max(unshared - works[launched], last_launch)
            on_idle_link[launched] = unshared - begins
            carrying.add(communicator)
            coming.append((last_launch, launched, begins - last_launch))
            launched += 1
        arrival = coming[0][0] if coming else _NEVER
        started, sent = starting.leaves(), sending.leaves()
        now = min(sent, started, arrival)
        if now == _NEVER:
            break
        if sent == now:
            bucket = sending.leave(now)
            if not sending.members:
                idle_since = now
            finishes[bucket] = now
            free[communicators[bucket]] = now
            carrying.discard(communicators[bucket])
        elif started == now:
            bucket = starting.leave(now)
            on_link[bucket] = now
            head_start = 0.0 if sending.members else now - idle_since
            sending.enter(bucket, max(works[bucket] - head_start, on_idle_link[bucket]), now)
        else:
            _, bucket, latency = coming.popleft()
            starting.enter(bucket, latency, now)
    return Flow(np.array(starts), np.array(on_link), np.array(finishes))


@dataclass(frozen=True, slots=True)
class FusedFlow(Flow):
    """Buckets as they come about at run time."""

    ends: list[int]
    """Where each ends in ready order: the index after its last gradient."""


def fuse(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, ready_s: NDArray[np.float64] | None = None
) -> FusedFlow:
    """The buckets that come about, and when they travel; `ready_s` where gradients are ready at other times.

    A bucket of several tensors is copied into the fusion buffer and out again; a tensor alone is sent from its place. A
    tensor larger than the buffer travels alone.
    """
    ready, sizes = (profile.ready if ready_s is None else ready_s).tolist(), profile.sizes.tolist()
    count = len(sizes)
    ends: list[int] = []
    times: list[tuple[float, float, float]] = []
    free, first = -_NEVER, 0
    while first < count:
        # A ready time that is a tick, but for rounding, is caught by that tick.
        tick = math.ceil(max(ready[first], free) / settings.cycle_s - 1e-9) * settings.cycle_s
        last, total = first + 1, sizes[first]
        while last < count and ready[last] <= tick and total + sizes[last] <= settings.buffer_bytes:
            total += sizes[last]
            last += 1
        copy = total / settings.copy_bytes_per_s if last - first > 1 else 0.0
        alone, busy, work = (float(part) for part in cost.times(total))
        reduced = max(tick + copy + alone, free + copy + busy)
        ends.append(last)
        times.append((tick, max(reduced - work, tick + copy), reduced + copy))
        free, first = reduced + copy, last
    starts, on_link, finishes = np.array(times).T
    return FusedFlow(starts, on_link, finishes, ends)
