"""What to keep, recompute or offload so that an iteration is fastest within a budget of device memory.

Whether anything fits is known exactly (`memory_least_peak`). Candidates come from there, from the programme in
`memory_moves`, at several prices for a byte copied, and from the uniform policies (every block treated alike); the
simulation scores them all. The best are improved by small changes: a boundary moved, two ranges merged, one split,
another action. First every change that helps is taken (hill climbing), then a random walk now and then accepts one that
does not (simulated annealing). Random numbers are seeded and every limit counts evaluations, so the same profile and
budget give the same plan. For a chain with few plans all are tried.

`plan_within_memory` plans buckets and memory together. Each depends on the other: recomputing and offloading delay when
gradients are ready, and buckets and residuals take device memory from activations.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Literal

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRanges, MemoryPlan, segments_of
from backbeat.model.gpu_memory import kinds_in_words
from backbeat.model.resident import ResidentMemory
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.memory_least_peak import LeastPeak
from backbeat.planners.memory_moves import Segmenter, changes, count, every, one_by_one, random_change, uniform
from backbeat.steps.memory_timeline import BlockChain, ChainRun, memory_timeline
from backbeat.steps.predict import predict
from backbeat.units import format_bytes

Score = Callable[[ChainRun], tuple[float, ...]]

_PRICES = (0.2, 0.3, 0.5, 1.0)
"""Of a byte copied, in units of its time on the link one way."""
_AHEAD = (0.0, 2.0)
"""Further tensors on their way back from the host, for each one that is needed."""
_ROOMS = (1.0, 0.95, 0.88)
"""Shares of the budget that candidates are made for: copies on their way, which the programme does not see, may need
the rest."""
_CLIMB = 900
"""Evaluations of each climb; one takes some 0.1 ms for 50 blocks."""
_WALKS = 2
"""Random walks, each from the best plan so far."""
_WALK = 1500
"""Evaluations of each."""
_FEW = 3000
"""Chains with no more plans than this are searched exhaustively."""

_RESERVE = 100
_MOST_RESERVE = 64 * 2**20
"""A hundredth of a budget, and at most this, is left by default to what no profile counts (workspaces, rounding).
Measured peaks in `validation/memory` are up to 47 MB above predicted ones. Workspaces that cuDNN's benchmark mode tries
can take far more."""
_BENCHMARK_RESERVE = 0.08
"""With cuDNN's benchmark mode: one run took 6.1 % of its budget more than predicted (`validation/memory`)."""


def reserve_for(profile: Profile, reserve: float | None) -> float | None:
    """The reserve asked for, or what the profile calls for; None: the default of `usable`."""
    if reserve is None and profile.memory is not None and profile.memory.cudnn_benchmark:
        return _BENCHMARK_RESERVE
    return reserve


def usable(budget: int, reserve: float | None = None) -> int:
    """The part of a budget that a plan may fill. A reserve below 1 is a share of the budget, others are bytes.

    >>> usable(8 * 10**9, 0.05), usable(8 * 10**9, 500 * 10**6), 8 * 10**9 - usable(8 * 10**9)
    (7600000000, 7500000000, 67108864)
    """
    if reserve is None:
        return budget - min(budget // _RESERVE, _MOST_RESERVE)
    return budget - math.ceil(budget * reserve if reserve < 1 else reserve)


def needed(peak: int, reserve: float | None = None) -> int:
    """The smallest budget that a predicted peak fits into.

    >>> [(usable(needed(990, r), r), usable(needed(990, r) - 1, r)) for r in (None, 0.05, 20)]
    [(990, 989), (990, 989), (990, 989)]
    """
    share = reserve if reserve is not None and reserve < 1 else 0.0
    budget = math.floor(peak / (1 - share)) - 1
    while (missing := peak - usable(budget, reserve)) > 0:
        budget += missing
    return budget


@dataclass(frozen=True)
class Chosen:
    """A plan and its simulation."""

    ranges: BlockRanges
    run: ChainRun


class MemorySearch:
    """Searches plans for one chain, at any number of budgets; simulations are kept from one budget to the next."""

    def __init__(self, chain: BlockChain) -> None:
        self.chain = chain
        self.segmenter = Segmenter(chain)
        self.run: Callable[[BlockRanges], ChainRun] = cache(chain.run)
        self.every = tuple(every(chain)) if count(chain) <= _FEW else ()

    @cached_property
    def smallest(self) -> Chosen:
        """The least peak there is, however slow."""
        ranges = LeastPeak(self.chain).ranges()
        return Chosen(ranges, self.run(ranges))

    def fastest(self, budget: int) -> Chosen | None:
        """The fastest ranges found with a peak within the budget; None where the least peak is above it."""
        chain = self.chain
        keep = one_by_one(chain, KEEP)
        if self.run(keep).peak_bytes <= budget:
            return Chosen(keep, self.run(keep))
        smallest = self.smallest
        if smallest.run.peak_bytes > budget:
            return None

        def score(run: ChainRun) -> tuple[float, ...]:
            return max(run.peak_bytes - budget, 0), run.time_s, run.peak_bytes

        def rank(ranges: BlockRanges) -> tuple[tuple[float, ...], BlockRanges]:
            return score(self.run(ranges)), ranges

        if self.every:
            return self._simpler(min(self.every, key=rank))
        found = {smallest.ranges, *uniform(chain).values()}
        room = budget - chain.base
        for price, ahead, share in product(_PRICES, _AHEAD, _ROOMS) if chain.has_host else ((0.0, 0.0, 1.0),):
            ranges = self.segmenter.least_time(room * share, price / chain.to_device, ahead)
            if ranges is not None:
                found.add(tuple(ranges))
        best = min((self._climb(ranges, score) for ranges in sorted(found, key=rank)[:3]), key=rank)
        plain = self.run(keep).time_s

        def energy(run: ChainRun) -> float:
            # A peak 1 % above the budget weighs as much as 5 % of the time.
            return run.time_s / plain + 5 * max(run.peak_bytes / budget - 1, 0.0)

        for seed in range(_WALKS):
            best = self._walk(best, score, energy, seed)
        return self._simpler(self._climb(best, score))

    def _simpler(self, ranges: BlockRanges) -> Chosen:
        """The plan without copies to the host that gain neither time nor a lower peak; and with segments as short as
        that allows, because gradients of a segment are ready only once all of it has been recomputed."""
        for index, (first, last, what) in enumerate(ranges):
            if what in (FETCH, OFFLOAD):
                instead = (first, last, RECOMPUTE if what == FETCH else KEEP)
                changed = (*ranges[:index], instead, *ranges[index + 1 :])
                if _no_worse(self.run(changed), self.run(ranges)):
                    ranges = changed
        index = 0
        while index < len(ranges):
            first, last, what = ranges[index]
            # Cut as early as is no worse, without a further copy if possible.
            for middle, rest in product(range(first + 1, last), dict.fromkeys((RECOMPUTE, what))):
                changed = (*ranges[:index], (first, middle, what), (middle, last, rest), *ranges[index + 1 :])
                if self.chain.may_begin[middle] and _no_worse(self.run(changed), self.run(ranges)):
                    ranges = changed
                    break
            index += 1
        return Chosen(ranges, self.run(ranges))

    def _climb(self, ranges: BlockRanges, score: Score) -> BlockRanges:
        """Take every change that scores better, until none does."""
        best, left, improved = score(self.run(ranges)), _CLIMB, True
        while improved:
            improved = False
            for changed in changes(self.chain, ranges):
                if left <= 0:
                    return ranges
                left -= 1
                found = score(self.run(changed))
                # The last bit of a sum is not worth a change.
                close = (math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in zip(found, best, strict=True))
                if found < best and not all(close):
                    ranges, best, improved = changed, found, True
                    break
        return ranges

    def _walk(self, ranges: BlockRanges, score: Score, energy: Callable[[ChainRun], float], seed: int) -> BlockRanges:
        """Simulated annealing: a random change that makes things worse is taken with a chance that falls with the harm
        and with the steps done."""
        draw = random.Random(seed)
        # The fewer blocks, the more one change weighs.
        hottest = max(0.004, 1 / self.chain.count**2)
        here, at = ranges, energy(self.run(ranges))
        best = ranges
        for step in range(_WALK):
            temperature = hottest * (1 - step / _WALK) ** 2 + 1e-6
            changed = random_change(self.chain, here, draw)
            if changed is None:
                continue
            run = self.run(changed)
            found = energy(run)
            if found <= at or draw.random() < math.exp((at - found) / temperature):
                here, at = changed, found
                if score(run) < score(self.run(best)):
                    best = changed
        return best


def memory_plan(
    profile: Profile,
    budget_bytes: int,
    plan: Plan | None = None,
    *,
    residuals: Literal["device", "host"] = "device",
    workers: int | None = None,
    reserve: float | None = None,
) -> MemoryPlan:
    """The fastest plan found for this budget less its reserve; refused where even the least peak is above that."""
    reserve = reserve_for(profile, reserve)
    chain = BlockChain(profile, ResidentMemory.of(profile, plan, residuals, workers))
    search = MemorySearch(chain)
    chosen = search.fastest(usable(budget_bytes, reserve))
    if chosen is None:
        raise InputError(too_small(search, budget_bytes, reserve))
    return MemoryPlan(
        segments=segments_of(profile, chosen.ranges) if any(what != KEEP for _, _, what in chosen.ranges) else (),
        budget_bytes=budget_bytes,
        residuals=residuals,
        peak_bytes=chosen.run.peak_bytes,
    )


def plan_within_memory(
    profile: Profile, network: Network, schedule: Callable[[Profile], Plan], options: StrategyOptions
) -> Plan:
    """The schedule with a memory plan that fits the budget.

    First a schedule for the profile as it is, then a memory plan beside it, then a second schedule for the later ready
    times. Of the two schedules the faster that fits is taken. Residuals go to the host where asked for, or where
    nothing fits otherwise.
    """
    first = schedule(profile)
    if options.memory_bytes is None:
        return replace(first, memory=MemoryPlan(residuals=options.residuals or "device"))
    memory = _fitting(profile, first, options.memory_bytes, network.workers, options)
    room = usable(options.memory_bytes, reserve_for(profile, options.reserve))
    plans = [replace(first, memory=memory)]
    if memory.segments:
        changed = memory_timeline(profile, memory, first, workers=network.workers).profile
        plans.append(replace(schedule(changed), memory=memory))
    fitting = []
    for index, plan in enumerate(plans):
        peak = memory_timeline(profile, memory, plan, workers=network.workers).peak_bytes
        if peak <= room:
            made = replace(plan, memory=replace(memory, peak_bytes=peak))
            fitting.append((predict(profile, network, made).iteration_s, index, made))
    return min(fitting)[2]


def _fitting(profile: Profile, plan: Plan, budget: int, workers: int, options: StrategyOptions) -> MemoryPlan:
    def planned(residuals: Literal["device", "host"]) -> MemoryPlan:
        return memory_plan(profile, budget, plan, residuals=residuals, workers=workers, reserve=options.reserve)

    try:
        return planned(options.residuals or "device")
    except InputError:
        if options.residuals is not None or not plan.compressed or profile.host_link is None:
            raise
    return planned("host")


def too_small(search: MemorySearch, budget: int, reserve: float | None = None) -> str:
    """Why a budget is refused, and the smallest that would not be."""
    chain, run = search.chain, search.smallest.run
    least = needed(run.peak_bytes, reserve)
    if budget < chain.base:
        return (
            f"a memory budget of {format_bytes(budget)} is below what stays on the device whatever is done with "
            f"activations, {format_bytes(chain.base)} ({kinds_in_words(chain.resident.by_kind)}): "
            f"the smallest budget that fits is {least} bytes ({_up(least)})"
        )
    return (
        f"a memory budget of {format_bytes(budget)} is too small: the smallest that fits is {least} bytes "
        f"({_up(least)}). Its peak is {run.moment}: {format_bytes(run.peak_bytes - chain.base)} of activations and "
        f"their gradients, beside {kinds_in_words(chain.resident.by_kind)}. Give that much, or a smaller batch"
    )


def _up(size: int) -> str:
    """Rounded up to three figures, so that what is printed does fit."""
    scale = 10 ** max(len(str(size)) - 3, 0)
    return format_bytes(-(-size // scale) * scale)


def _no_worse(one: ChainRun, other: ChainRun) -> bool:
    return one.peak_bytes <= other.peak_bytes and one.time_s <= other.time_s * (1 + 1e-9)
