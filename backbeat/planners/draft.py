"""What strategies are given, and what most of them decide: where buckets end in ready order, on which communicators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from backbeat.cost import LinkCost
from backbeat.model import Profile
from backbeat.model.plan import Bucket, DynamicFusion, Plan
from backbeat.model.sharding import ShardedDtype
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import Schedule

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    """What the caller may fix. None leaves the choice to the strategy."""

    communicators: int | None = None
    """Communicators to use; for `best`, the most it may use."""
    bucket_bytes: int | None = None
    """`ddp`: the cap of every bucket. `horovod`: the fusion buffer."""
    cycle_s: float | None = None
    """`horovod`: time between ticks."""
    density: float | None = None
    """`compressed`: share of the elements that travel."""
    shards: int | None = None
    """`hsdp`: workers that hold one copy of the model; the GPUs of a node where None."""
    memory_bytes: int | None = None
    """Device memory that an iteration may take; for `sharded`, the device's own where None."""
    reserve: float | None = None
    """Of `memory_bytes`, left to what a profile cannot know: below 1 a share of it, otherwise bytes."""
    residuals: Literal["device", "host"] | None = None
    """`compressed`: where residuals live; the device where None, unless nothing fits there."""
    accumulation: int | None = None
    """Sharded strategies: micro-batches of an iteration; the profile's where None."""
    reduce_dtype: ShardedDtype | None = None
    """Sharded strategies: what gradients are reduced in; fp32 where None."""
    torch_version: str | None = None
    """`sharded`: what the plan will run on, like 2.13; what came after 2.10 is not chosen where None."""
    budget_s: float | None = None
    """`best`: stop improving after this long. None makes the search depend on the problem alone, not on the clock."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Consecutive buckets in ready order."""

    ends: list[int]
    """Index after the last gradient of each bucket."""
    communicators: int = 1
    assignment: list[int] | None = None
    """Communicator of each bucket; round robin where None."""
    dynamic: DynamicFusion | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_launches(cls, launches: Iterable[Sequence[int]], communicators: int) -> Draft:
        """Buckets by the number of their gradients and their communicator, as results of the lab keep them.

        >>> Draft.of_launches([[2, 0], [3, 1]], communicators=2).ends
        [2, 5]
        """
        counts, assignment = zip(*launches, strict=True)
        return cls(list(accumulate(counts)), communicators, list(assignment))

    def communicator_of_buckets(self) -> list[int]:
        if self.assignment is not None:
            return self.assignment
        return [index % self.communicators for index in range(len(self.ends))]

    def schedule(self, profile: Profile) -> Schedule:
        return Schedule.of_ends(profile, self.ends, self.communicator_of_buckets())

    def travel(self, profile: Profile) -> BucketTravel:
        return BucketTravel(self.schedule(profile), profile.backward_s)

    def end_s(self, profile: Profile, cost: LinkCost, below: float = math.inf) -> float:
        """When the last bucket is done, after backward starts; some earlier time where that is not `below`, if it is
        not either."""
        travel = self.travel(profile)
        if travel.several and below < math.inf and (least := travel.least_s(cost)) * (1 - _ROUNDING) >= below:
            return least
        return travel.at(cost)[0].end_s

    def contended_end_s(self, profile: Profile, cost: LinkCost, slowdown: float) -> float:
        """When the last bucket and backward are done, if computation takes `slowdown` times as long beside buckets."""
        flow, backward_end_s = self.travel(profile).at(cost, slowdown)
        return max(flow.end_s, backward_end_s)

    def named(self, profile: Profile, strategy: str, workers: int) -> Plan:
        names = [gradient.name for gradient in profile.gradients]
        starts = [0, *self.ends[:-1]]
        return Plan(
            strategy=strategy,
            model=profile.model,
            workers=workers,
            communicators=self.communicators,
            buckets=tuple(
                Bucket(gradients=tuple(names[first:last]), communicator=communicator)
                for first, last, communicator in zip(starts, self.ends, self.communicator_of_buckets(), strict=True)
            ),
            dynamic=self.dynamic,
            notes=self.notes,
        )


def soonest(drafts: Sequence[Draft], profile: Profile, cost: LinkCost) -> tuple[float, int]:
    """The end of the one that ends first, and which it is; of equal ones the first. What cannot be it is not run."""
    # Rounded, or the last bit of a sum would decide which of equal ones is first.
    bounds = [float(f"{draft.travel(profile).least_s(cost):.12g}") for draft in drafts]
    least = (math.inf, len(drafts))
    for index in sorted(range(len(drafts)), key=lambda one: (bounds[one], one)):
        if (bounds[index] * (1 + 10 * _ROUNDING), index) > least:
            break
        least = min(least, (drafts[index].end_s(profile, cost), index))
    return least
