"""Merge small buckets with their neighbours, for the same time.

A few buckets decide when a plan ends; the others are done long before anything waits for them. Each still costs the
host a launch, which no network file has a time for. So two neighbours become one bucket where the plan then ends no
later. That must hold in three cases. Messages take as long as predicted. Every message takes a quarter longer: a plan
without slack pays for every error of the model. No message takes longer than the link needs for its bytes: where the
library hides a latency behind the message before, saving it gains nothing. A bucket grows no larger than the largest
message measured or a bucket of stock DDP, unless the plan had a larger one: training needs the largest bucket in memory
beside its gradients.

On one communicator `merged` knows when every bucket must be done. On several only the engine knows when they end
(`simplified`): first all buckets but the last few, which decide when the plan ends, are merged up to a size; then
single boundaries are dropped, many neighbouring ones at once, then ever fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import Profile
from backbeat.model.framework import DDP_BUCKET_BYTES
from backbeat.planners.draft import Draft
from backbeat.steps.schedule import one_by_one, running_sums

SLOWER = 1.25
"""Times as long as predicted."""
_RUNS = 600
"""Engine runs to spend on several communicators."""
_BUCKETS = 200_000
"""Buckets to simulate in all of these runs: plans of many buckets get fewer runs."""
_ROUNDING = 1e-12


def possible_costs(cost: LinkCost) -> tuple[LinkCost, ...]:
    """The three cases: as predicted, on a slower link, with every latency hidden."""
    return cost, cost.slower(SLOWER), cost.without_latency()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions a sequence of buckets runs under, one after the other on one communicator."""

    sums: NDArray[np.float64]
    """Bytes of the gradients before each one, and of all at the end."""
    cost: LinkCost
    ready: NDArray[np.float64]
    """When each gradient is ready; a bucket waits for its last."""
    until_s: float = float("-inf")
    """The last bucket may end this late, even if it ends earlier before anything is merged."""

    def finishes(self, ends: Sequence[int]) -> list[float]:
        """When each bucket is done."""
        sizes = np.diff(self.sums[[0, *ends]])
        finishes: list[float] = one_by_one(self.ready[np.asarray(ends) - 1], self.cost.times(sizes)).finishes.tolist()
        return finishes

    def finish(self, first: int, last: int, free_s: float) -> float:
        """When gradients `first` up to `last` are done as one bucket, on a communicator that is free at `free_s`."""
        size = float(self.sums[last] - self.sums[first])
        alone, busy = self.cost.isolated.at(size), (self.cost.busy or self.cost.isolated).at(size)
        return max(float(self.ready[last - 1]) + alone, free_s + busy)

    def latest(self, ends: Sequence[int]) -> list[float]:
        """When each bucket must be done for those after it to be in time."""
        busy = self.cost.busy_time(np.diff(self.sums[[0, *ends]])).tolist()
        limit = max(self.finishes(ends)[-1], self.until_s)
        found = []
        for following in reversed(busy):
            found.append(limit)
            limit -= following
        return found[::-1]


def merged(ends: Sequence[int], conditions: Sequence[Conditions]) -> list[int]:
    """The buckets merged with their neighbours, as far as all are in time under each of these conditions.

    Three gradients of 1 MB are ready at once, a fourth at 10 ms; each message takes 1 ms + 1 ns/byte. One by one the
    first three are done at 2, 4 and 6 ms; as one at 4. Either way the last is done at 12.

    >>> from backbeat.cost import Curve, LinkCost
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> case = Conditions(sums=np.arange(5) * 1e6, cost=cost, ready=np.array([0, 0, 0, 1e-2]))
    >>> merged([1, 2, 3, 4], [case])
    [3, 4]
    """
    found = list(ends)
    # A merged bucket takes less time than its parts, which may let those before it merge too.
    while (shorter := _merged(found, conditions)) != found:
        found = shorter
    return found


def _merged(ends: Sequence[int], conditions: Sequence[Conditions]) -> list[int]:
    """From the front, each bucket merged with those after it as long as the rest, unmerged, is still in time."""
    sums = conditions[0].sums
    most = largest_allowed(sums, ends, conditions[0].cost)
    latest = [case.latest(ends) for case in conditions]
    free = [float("-inf")] * len(conditions)
    kept: list[int] = []
    first = index = 0
    while index < len(ends):
        done = [case.finish(first, ends[index], at) for case, at in zip(conditions, free, strict=True)]
        while index + 1 < len(ends) and sums[ends[index + 1]] - sums[first] <= most:
            longer = [case.finish(first, ends[index + 1], at) for case, at in zip(conditions, free, strict=True)]
            if not all(
                finish <= limits[index + 1] + _ROUNDING * abs(limits[index + 1])
                for finish, limits in zip(longer, latest, strict=True)
            ):
                break
            index, done = index + 1, longer
        kept.append(ends[index])
        free, first, index = done, ends[index], index + 1
    return kept


def latest_end(profile: Profile, end_s: float, slack: float) -> float:
    """The latest end of communication with which an iteration takes at most `slack` longer, as a share, than with this
    one."""
    exposed = max(end_s, profile.backward_s)
    return exposed + slack * iteration_s(profile, end_s)


def iteration_s(profile: Profile, end_s: float) -> float:
    """An iteration whose communication ends this long after backward starts, before buffers and stragglers."""
    earlier = (profile.accumulation - 1) * (profile.forward_s + profile.backward_s)
    return earlier + profile.forward_s + max(end_s, profile.backward_s) + profile.update_s


def largest_allowed(sums: NDArray[np.float64], ends: Sequence[int], cost: LinkCost) -> float:
    """How large a merged bucket may become: stock DDP's bucket or the largest message measured, whichever is smaller,
    or the largest bucket now."""
    known = float("inf") if cost.isolated.is_affine else float(cost.isolated.sizes[-1])
    now = max(float(sums[last] - sums[first]) for first, last in pairwise([0, *ends]))
    return max(min(DDP_BUCKET_BYTES, known), now)


def simplified(
    draft: Draft, profile: Profile, cost: LinkCost, *, slack: float = 0.0, deadline: float = float("inf")
) -> Draft:
    """The draft with buckets merged as long as an iteration takes no more than `slack` longer, as a share, in each of
    `possible_costs`."""
    sums = running_sums(profile.sizes)
    largest = largest_allowed(sums, draft.ends, cost)
    judge = _Judge(draft, profile, cost, slack, deadline)
    for packed in _packings(draft.ends, sums, largest):
        if judge.out_of_runs:
            return draft
        if judge.allows(packed):
            draft = judge.with_ends(packed)
            break
    last, inner = draft.ends[-1], draft.ends[:-1]
    # Powers of two: on two communicators an even number less leaves those after it where they are.
    stride = 1 << len(inner).bit_length()
    while stride >= 1:
        index = 0
        while index < len(inner):
            if judge.out_of_runs:
                return judge.with_ends([*inner, last])
            merged_end = inner[index + stride] if index + stride < len(inner) else last
            if sums[merged_end] - sums[inner[index - 1] if index else 0] > largest:
                index += 1
                continue
            fewer = [*inner[:index], *inner[index + stride :]]
            if judge.allows([*fewer, last]):
                inner = fewer
            else:
                index += stride
        stride //= 2
    return judge.with_ends([*inner, last])


class _Judge:
    """Says whether other buckets are in time, as long as it has engine runs left."""

    def __init__(self, draft: Draft, profile: Profile, cost: LinkCost, slack: float, deadline: float) -> None:
        self._draft, self._profile, self._deadline = draft, profile, deadline
        self._left = min(_RUNS, _BUCKETS // len(draft.ends))
        self._limits = [
            (one, latest_end(profile, draft.end_s(profile, one), slack) * (1 + _ROUNDING))
            for one in possible_costs(cost)
        ]

    @property
    def out_of_runs(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline

    def with_ends(self, ends: list[int]) -> Draft:
        return Draft(ends, self._draft.communicators, notes=self._draft.notes)

    def allows(self, ends: list[int]) -> bool:
        candidate = self.with_ends(ends)
        for cost, limit in self._limits:
            self._left -= 1
            if candidate.end_s(self._profile, cost, limit * (1 + _ROUNDING)) > limit:
                return False
        return True


def _packings(ends: list[int], sums: NDArray[np.float64], largest: float) -> Iterator[list[int]]:
    """All buckets merged up to a size, but for the last few, which decide when the plan ends."""
    for cap in (largest, largest / 4, largest / 16):
        tail = 0
        while tail < len(ends):
            head = len(ends) - tail
            yield [*_packed(ends[:head], sums, cap), *ends[head:]]
            tail = 2 * tail or 1


def _packed(ends: list[int], sums: NDArray[np.float64], cap: float) -> list[int]:
    """The buckets merged from the front, up to this many bytes each."""
    found: list[int] = []
    first = 0
    for end, following in pairwise(ends):
        if sums[following] - sums[first] > cap:
            found.append(end)
            first = end
    return [*found, ends[-1]]
