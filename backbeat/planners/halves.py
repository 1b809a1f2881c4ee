"""`halves`: buckets for the two halves of an all-reduce, chosen separately and exactly.

The scatters behind backward are the one-communicator programme of `optimal` on the reduce-scatter's cost: an earlier
end of the last one never hurts what follows.

The gathers behind forward: a bucket must be complete before its first layer starts. Say forward is to end by D. Then
the bucket that starts with layer i is due at D less the computation from i on, and the least finish time of the first
j,

    C[j] = min over i < j of  C[i] + T(S_j - S_i)   such that it is no later than i's due time,

decides whether D can be met, because an earlier finish is never worse. The least D is found by bisection.

Both programmes ask for the earliest finishes, also where nothing waits for them: buckets are merged as far as neither
half ends later.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from backbeat.cost import Curve, LinkCost
from backbeat.model import Network, Profile
from backbeat.model.plan import Bucket, Plan
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.merge_buckets import Conditions, merged, possible_costs
from backbeat.planners.optimal import quadratic_programme, queue_programme
from backbeat.simulate.gather_scatter import Halves
from backbeat.simulate.halves_step import Layers
from backbeat.simulate.schedule import running_sums

_PRECISION = 1e-6
"""Of the least forward end, relative."""


def halves(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """Reduce-scatter buckets in ready order, then all-gather buckets in the order of the next forward."""
    options.need_one_communicator("plans in halves")
    scatter_ends, gather_ends = earliest(profile, network)
    costs, layers = Halves.of(network), Layers.of(profile)
    scatters = [Conditions.during_backward(profile, cost) for cost in possible_costs(LinkCost(costs.scatter))]
    gathers = [
        _during_forward(layers, cost, gather_ends, conditions.finishes(scatter_ends)[-1] - profile.backward_s)
        for cost, conditions in zip(possible_costs(LinkCost(costs.gather)), scatters, strict=True)
    ]
    plan = plan_in_halves(profile, merged(scatter_ends, scatters), merged(gather_ends, gathers), network.workers)
    notes = ("forward times are guessed from backward's",) if layers.guessed else ()
    return msgspec.structs.replace(plan, notes=notes)


def plan_in_halves(
    profile: Profile, scatter_ends: list[int], gather_ends: list[int], workers: int, strategy: str = "halves"
) -> Plan:
    """Scatters end there in ready order, gathers in the order of the next forward."""
    names = [gradient.name for gradient in profile.gradients]
    halves: tuple[tuple[Literal["reduce_scatter", "all_gather"], list[str], list[int]], ...] = (
        ("reduce_scatter", names, scatter_ends),
        ("all_gather", names[::-1], gather_ends),
    )
    return Plan(
        strategy=strategy,
        model=profile.model,
        workers=workers,
        communicators=1,
        buckets=tuple(
            Bucket(gradients=tuple(order[first:last]), communicator=0, phase=phase)
            for phase, order, ends in halves
            for first, last in pairwise([0, *ends])
        ),
    )


def earliest(profile: Profile, network: Network) -> tuple[list[int], list[int]]:
    """Where scatters and gathers end in the two programmes, before any are merged."""
    halves, layers = Halves.of(network), Layers.of(profile)
    scatter_ends = queue_programme(profile.ready.tolist(), profile.sizes.tolist(), halves.scatter)
    scattered_s = Conditions.during_backward(profile, LinkCost(halves.scatter)).finishes(scatter_ends)[-1]
    return scatter_ends, gather_programme(layers, halves.gather, scattered_s - profile.backward_s)


def _during_forward(layers: Layers, cost: LinkCost, ends: list[int], free_s: float) -> Conditions:
    """These gathers, and when each layer must have its own for forward to end as early as it does with them."""
    # All are ready, whenever the communicator is free.
    ready = np.full(len(layers.sizes), -np.inf)
    conditions = Conditions(sums=running_sums(layers.sizes), cost=cost, ready=ready, free_s=free_s)
    # What each layer and those after it compute.
    after = np.cumsum(layers.compute_s[::-1])[::-1]
    waits = [finish + float(after[first]) for first, finish in zip([0, *ends], conditions.finishes(ends), strict=False)]
    return replace(conditions, due=max(float(after[0]), *waits) - after)


def gather_programme(layers: Layers, cost: Curve, free_s: float) -> list[int]:
    """Where gather buckets end, in forward order, when the link is free `free_s` after forward may start.

    Two layers of 1 MB and 5 ms of computation each, messages of 1 ms + 1 ns/byte, link free at once. Together they
    arrive at 3 ms and forward ends at 13; one by one the first arrives at 2 ms, the second at 4, long before it is
    needed, and forward ends at 12.

    >>> from backbeat.cost import Curve
    >>> two = Layers(np.array([5e-3, 5e-3]), np.array([1e6, 1e6]), False)
    >>> gather_programme(two, Curve.affine(1e-3, 1e-9), 0.0)
    [1, 2]
    """
    total = float(layers.compute_s.sum())
    everything = float(cost.time(layers.sizes.sum()))
    low, high = max(total, 0.0), max(free_s, 0.0) + everything + total
    found = [len(layers.sizes)]
    # Everything in one bucket always meets `high`.
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        ends = _meets(layers, cost, free_s, middle)
        if ends:
            found, high = ends, middle
        else:
            low = middle
    return found


def _meets(layers: Layers, cost: Curve, free_s: float, end_s: float) -> list[int]:
    """Buckets with which forward ends by `end_s`; none where it cannot."""
    due: NDArray[np.float64] = end_s - np.cumsum(layers.compute_s[::-1])[::-1]

    def finishes(j: int, messages: NDArray[np.float64], earliest: NDArray[np.float64]) -> NDArray[np.float64]:
        times = earliest + cost.time(messages)
        return np.where(times <= due[:j], times, np.inf)

    return quadratic_programme(layers.sizes, finishes, free_s)
