"""The exact one-communicator plan.

With gradients in ready order, prefix sums S and ready times r, the least finish time of the first j gradients with a
bucket ending at j is

    E[0] = 0,   E[j] = min over i < j of  max(r_j, E[i]) + T(S_j - S_i)

for any nondecreasing T, because a later E[i] never makes anything earlier. E itself is nondecreasing. So among the i
with E[i] <= r_j the largest is best (T does not fall with size), and for the others the term is E[i] + T(S_j - S_i).
Where T is linear with slope q, that is least where E[i] - q·S_i is least, over a window of i. The window's edges only
move right as j grows, so a monotonic queue finds the least in constant time on average. A curve of P segments needs P
queues: O(L·P) in all, O(L) when affine.

Where back-to-back times were measured the term is max(r_j + T, E[i] + T_busy), which no queue takes. That one and its
relatives, with other waits or costs, share `ends_by_trying_all`: O(L²), vectorised.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import Curve, LinkCost
from backbeat.model import Network, Profile
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.planners.merge_buckets import Conditions, latest_end, merged, possible_costs
from backbeat.steps.schedule import running_sums

Finishes = Callable[[int, NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def optimal(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """The exact optimum on one communicator, with neighbours merged where that costs nothing; asked for more
    communicators, the buckets of the earliest finishes round robin."""
    ends = best_ends(profile, network.cost)
    if options.communicators in (None, 1):
        ends = merged_ends(profile, network.cost, ends)
    return Draft(ends, options.communicators or 1)


def merged_ends(profile: Profile, cost: LinkCost, ends: list[int], slack: float | None = None) -> list[int]:
    """Fewer buckets on one communicator that end as early; or, with `slack`, with which an iteration takes no more than
    this share longer."""
    sums = running_sums(profile.sizes)
    conditions = [Conditions(sums=sums, cost=one, ready=profile.ready) for one in possible_costs(cost)]
    if slack is not None:
        conditions = [replace(case, until_s=latest_end(profile, case.finishes(ends)[-1], slack)) for case in conditions]
    return merged(ends, conditions)


def best_ends(profile: Profile, cost: LinkCost) -> list[int]:
    ready = profile.ready.tolist()
    if cost.busy is None:
        return ends_by_queues(ready, profile.sizes.tolist(), cost.isolated)

    def finishes(j: int, messages: NDArray[np.float64], earliest: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.maximum(ready[j - 1] + cost.time(messages), earliest + cost.busy_time(messages)))

    return ends_by_trying_all(profile.sizes, finishes)


def ends_by_queues(ready: list[float], sizes: list[float], curve: Curve) -> list[int]:
    """Where buckets end in the optimum for any nondecreasing piecewise linear cost.

    Three gradients of 1 MB ready at 0, 1 and 2 ms, each message 1 ms + 1 ns/byte. Alone they would end at 2, 4 and
    6 ms; sending the first alone and the other two together ends at 2 + 3 = 5 ms, and nothing does better.

    >>> from backbeat.cost import Curve
    >>> ends_by_queues([0.0, 1e-3, 2e-3], [1e6] * 3, Curve.affine(1e-3, 1e-9))
    [1, 3]
    """
    count = len(ready)
    segments = curve.segments()
    lows = [segment[0] for segment in segments]
    sums = [0.0] * (count + 1)
    earliest = [0.0] * (count + 1)
    bucket_start = [0] * (count + 1)
    queues: list[deque[tuple[float, int]]] = [deque() for _ in segments]
    entered = [0] * len(segments)
    idle = 0
    for j in range(1, count + 1):
        sums[j] = here = sums[j - 1] + sizes[j - 1]
        now = ready[j - 1]
        while idle + 1 < j and earliest[idle + 1] <= now:
            idle += 1
        message = here - sums[idle]
        _, _, intercept, slope = segments[max(bisect_right(lows, message) - 1, 0)]
        best, start = max(now, earliest[idle]) + intercept + slope * message, idle
        for index, (low, high, intercept, slope) in enumerate(segments):
            queue, newest = queues[index], entered[index]
            oldest = here - high
            while newest < j and sums[newest] <= here - low:
                value = earliest[newest] - slope * sums[newest]
                while queue and queue[-1][0] >= value:
                    queue.pop()
                queue.append((value, newest))
                newest += 1
            entered[index] = newest
            while queue and (queue[0][1] <= idle or sums[queue[0][1]] < oldest):
                queue.popleft()
            if queue and (candidate := queue[0][0] + intercept + slope * here) < best:
                best, start = candidate, queue[0][1]
        earliest[j], bucket_start[j] = best, start
    return _walk_back(bucket_start)


def plenty_ends(profile: Profile, cost: LinkCost) -> list[int]:
    """Buckets for plenty of communicators, where latency hides behind earlier transfers.

    E[j] = min over i of max(E[i], r_j + s(M)) + w(M): a candidate for the joint search, which scores it on the engine.
    """
    ready = profile.ready.tolist()

    def finishes(j: int, messages: NDArray[np.float64], earliest: NDArray[np.float64]) -> NDArray[np.float64]:
        alone, _, work = cost.times(messages)
        return np.asarray(np.maximum(earliest, ready[j - 1] + (alone - work)) + work)

    return ends_by_trying_all(profile.sizes, finishes, free_s=0.0)


def ends_by_trying_all(sizes: NDArray[np.float64], finishes: Finishes, free_s: float = -np.inf) -> list[int]:
    """Where buckets end:  E[0] = free_s,  E[j] = min over i < j of  finishes(j, S_j - S_i, E[i]).

    `finishes` says when a bucket ends that has j as its last member, for every index where it may start: all message
    sizes and earliest finishes at once.

    The three gradients of `ends_by_queues`:

    >>> ready, times = [0.0, 1e-3, 2e-3], lambda messages: 1e-3 + 1e-9 * messages
    >>> finishes = lambda j, messages, earliest: np.maximum(ready[j - 1], earliest) + times(messages)
    >>> ends_by_trying_all(np.array([1e6] * 3), finishes)
    [1, 3]
    """
    sums = running_sums(sizes)
    count = len(sizes)
    earliest = np.full(count + 1, free_s)
    bucket_start = [0] * (count + 1)
    for j in range(1, count + 1):
        found = finishes(j, sums[j] - sums[:j], earliest[:j])
        start = int(np.argmin(found))
        earliest[j], bucket_start[j] = found[start], start
    return _walk_back(bucket_start)


def _walk_back(bucket_start: list[int]) -> list[int]:
    ends = [len(bucket_start) - 1]
    while bucket_start[ends[-1]] > 0:
        ends.append(bucket_start[ends[-1]])
    return ends[::-1]
