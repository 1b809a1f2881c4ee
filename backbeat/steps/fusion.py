"""Buckets that form at run time, as Horovod's do: at each tick with the communicator free, whatever is ready travels
together.

That is no graph: which gradients travel together depends on when they are ready, which depends on what travels beside
computation. So they run again and again (`contended`), each time with the ready times that the last run gave. What
happens until some moment depends on nothing after it. So each run or two puts one more message right; the runs end when
ready times no longer change.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import DynamicFusion, Profile
from backbeat.steps.schedule import UNDISTURBED, ComputeClock, Flow, busy_periods

_SAME = 1e-12
"""Ready times this close to those of the run before, relative to the last, are the same."""


def fuse(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, ready_s: NDArray[np.float64] | None = None
) -> tuple[Flow, list[int]]:
    """When the buckets that come about travel, and where each ends in ready order: the index after its last gradient.
    `ready_s` where gradients are ready at other times.

    A bucket of several tensors is copied into the fusion buffer and out again; a tensor alone is sent from its place. A
    tensor larger than the buffer travels alone.
    """
    ready, sizes = (profile.ready if ready_s is None else ready_s).tolist(), profile.sizes.tolist()
    count = len(sizes)
    ends: list[int] = []
    times: list[tuple[float, float, float]] = []
    free, first = -math.inf, 0
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
    return Flow(starts, on_link, finishes), ends


def fuse_beside(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, slowdown: float
) -> tuple[Flow, ComputeClock, list[int]]:
    """The same, and the computation that takes `slowdown` times as long beside them."""
    ends: list[int] = []

    def travel(ready: NDArray[np.float64]) -> Flow:
        flow, ends[:] = fuse(profile, cost, settings, ready)
        return flow

    return *contended(travel, profile.ready, slowdown), ends


def contended(
    travel: Callable[[NDArray[np.float64]], Flow], ready: NDArray[np.float64], slowdown: float
) -> tuple[Flow, ComputeClock]:
    """Messages that leave when `travel` sends them, given when each is ready, and the computation they slow down.

    `ready` is when messages would be ready without communication. One of 2 s, ready at 1 s, and one of 1 s, ready at
    2 s; computation beside them takes twice as long. The second is ready at 3 s, just as the first is done, and what
    would be done at 4 s is done at 5.5: both messages, 3 s, cost half of their time.

    >>> from backbeat.steps.schedule import Flow
    >>> def one_by_one(ready):
    ...     first = ready[0] + 2
    ...     second = max(first, ready[1])
    ...     return Flow(np.array([ready[0], second]), np.array([ready[0], second]), np.array([first, second + 1]))
    >>> flow, clock = contended(one_by_one, np.array([1.0, 2.0]), 2.0)
    >>> flow.finishes.tolist(), clock.when([2.0, 4.0]).tolist()
    ([3.0, 4.0], [3.0, 5.5])
    """
    clock = UNDISTURBED
    flow = travel(ready)
    if slowdown == 1 or not len(ready):
        return flow, clock
    moments = ready
    for _ in range(4 * len(ready) + 4):
        clock = _clock(flow, clock, slowdown)
        later = clock.when(ready)
        same = float(np.abs(later - moments).max()) <= _SAME * float(later.max())
        moments = later
        flow = travel(moments)
        if same:
            break
    return flow, clock


def _clock(flow: Flow, before: ComputeClock, slowdown: float) -> ComputeClock:
    """Computation beside these messages. A busy period begins after as much computation as it did before: what made
    its first message ready."""
    periods = busy_periods(flow.starts, flow.finishes)
    done, at = [0.0], [0.0]
    for (begin, end), anchor in zip(periods, before.done_by([begin for begin, _ in periods]).tolist(), strict=True):
        length = end - begin
        start = max(anchor, done[-1])
        arrives = at[-1] + (start - done[-1])
        done += [start, start + length / slowdown]
        at += [arrives, arrives + length]
    return ComputeClock(np.array(done), np.array(at))
