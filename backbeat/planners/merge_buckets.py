"""Fewer buckets for the same time.

When a plan ends is decided by a few of its buckets; the sums of the others are back long before anything waits for
them. Each still costs the host a launch, of which no network file knows. So neighbours become one bucket where nothing
ends
later by it: as predicted; if every message took a quarter longer, since a plan without slack would pay for every error
of the model; and if no message took longer than the link needs for its bytes, since a latency that is saved is no gain
where the library hides it behind the message before. Nor does a bucket outgrow what was measured of the network, or
what stock DDP sends at once, where none did before: one bucket is what training needs in memory beside its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from backbeat.planners.baselines import DDP_BUCKET_BYTES
from backbeat.simulate.schedule import running_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from backbeat.cost import LinkCost
    from backbeat.model import Profile

SLOWER = 1.25
"""Times as long as predicted."""
_ROUNDING = 1e-12


def possible_costs(cost: LinkCost) -> tuple[LinkCost, ...]:
    """What messages may cost, as predicted and otherwise."""
    return cost, cost.slower(SLOWER), cost.without_latency()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under what consecutive buckets of members run, one after the other."""

    sums: NDArray[np.float64]
    """Bytes of the members before each, and of all at the end."""
    cost: LinkCost
    free_s: float = float("-inf")
    """When what ran before is done; by default nothing did."""
    ready: NDArray[np.float64] | None = None
    """When each member is there; a bucket waits for its last. None: all are."""
    due: NDArray[np.float64] | None = None
    """The latest end of a bucket that begins with each member. None: only the end of all counts."""

    @classmethod
    def behind_backward(cls, profile: Profile, cost: LinkCost) -> Conditions:
        """A profile's gradients, in ready order."""
        return cls(sums=running_sums(profile.sizes), cost=cost, ready=profile.ready)

    def finishes(self, ends: Sequence[int]) -> list[float]:
        """When each bucket is done."""
        sizes = np.diff(self.sums[[0, *ends]])
        alone, behind = self.cost.time(sizes).tolist(), self.cost.busy_time(sizes).tolist()
        found = []
        free = self.free_s
        for end, first, following in zip(ends, alone, behind, strict=True):
            free = self._finish(end, free, first, following)
            found.append(free)
        return found

    def finish(self, first: int, last: int, free_s: float) -> float:
        """When the members from `first` up to `last` are done as one bucket, behind what ends at `free_s`."""
        size = float(self.sums[last] - self.sums[first])
        return self._finish(last, free_s, self.cost.isolated.at(size), (self.cost.busy or self.cost.isolated).at(size))

    def _finish(self, last: int, free_s: float, alone_s: float, behind_s: float) -> float:
        if self.ready is None:
            return free_s + behind_s
        return max(float(self.ready[last - 1]) + alone_s, free_s + behind_s)

    def latest(self, ends: Sequence[int]) -> list[float]:
        """When each bucket must be done for those behind it to be in time."""
        behind = self.cost.busy_time(np.diff(self.sums[[0, *ends]])).tolist()
        limit = float("inf") if self.due is not None else self.finishes(ends)[-1]
        found = []
        for first, following in zip(reversed([0, *ends[:-1]]), reversed(behind), strict=True):
            found.append(limit)
            limit = min(limit, self._due(first)) - following
        return found[::-1]

    def in_time(self, first: int, finish_s: float, latest_s: float) -> bool:
        limit = min(latest_s, self._due(first))
        return finish_s <= limit + _ROUNDING * abs(limit)

    def _due(self, first: int) -> float:
        return float("inf") if self.due is None else float(self.due[first])


def merged(ends: Sequence[int], conditions: Sequence[Conditions]) -> list[int]:
    """The buckets merged with their neighbours, as far as nothing ends later in any of these conditions.

    Three members of 1 MB are there at once, a fourth at 10 ms; each message takes 1 ms + 1 ns/byte. One by one the
    first three are done at 2, 4 and 6 ms; as one at 4. Either way the last is done at 12.

    >>> from backbeat.cost import Curve, LinkCost
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9), None, {})
    >>> case = Conditions(sums=np.arange(5) * 1e6, cost=cost, ready=np.array([0, 0, 0, 1e-2]))
    >>> merged([1, 2, 3, 4], [case])
    [3, 4]
    """
    found = list(ends)
    # What was merged takes less time, and may leave some to what comes before it.
    while (shorter := _merged(found, conditions)) != found:
        found = shorter
    return found


def _merged(ends: Sequence[int], conditions: Sequence[Conditions]) -> list[int]:
    """From the front, each bucket as far as those behind it are in time as they are."""
    sums = conditions[0].sums
    most = largest_allowed(sums, ends, conditions[0].cost)
    latest = [case.latest(ends) for case in conditions]
    free = [case.free_s for case in conditions]
    kept: list[int] = []
    first = place = 0
    while place < len(ends):
        done = [case.finish(first, ends[place], at) for case, at in zip(conditions, free, strict=True)]
        while place + 1 < len(ends) and sums[ends[place + 1]] - sums[first] <= most:
            longer = [case.finish(first, ends[place + 1], at) for case, at in zip(conditions, free, strict=True)]
            if not all(
                case.in_time(first, finish, limits[place + 1])
                for case, finish, limits in zip(conditions, longer, latest, strict=True)
            ):
                break
            place, done = place + 1, longer
        kept.append(ends[place])
        free, first, place = done, ends[place], place + 1
    return kept


def largest_allowed(sums: NDArray[np.float64], ends: Sequence[int], cost: LinkCost) -> float:
    """How large buckets may become that are these now."""
    known = float("inf") if cost.isolated.is_affine else float(cost.isolated.sizes[-1])
    now = max(float(sums[last] - sums[first]) for first, last in pairwise([0, *ends]))
    return max(min(DDP_BUCKET_BYTES, known), now)
