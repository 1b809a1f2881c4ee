"""What to keep, recompute or offload so that an iteration is fastest within a budget of device memory.

Candidates come from the programme in `segments`, at several prices for a byte copied, and from the uniform policies
(every block treated alike); all are scored by the simulation. The best are improved by small changes: a boundary moved,
two units merged, one split, another action; first by taking whatever helps, then by a walk that now and then accepts
what does not. The walk's random numbers are seeded and every limit counts evaluations, so the same profile and budget
give the same plan.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from backbeat.errors import InputError
from backbeat.model.blocks import MemoryPlan
from backbeat.planners.segments import Segmenter
from backbeat.simulate.holdings import Holdings
from backbeat.simulate.memory import FETCH, KEEP, OFFLOAD, RECOMPUTE, Chain, Run, plan_of
from backbeat.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from backbeat.model import Plan, Profile
    from backbeat.simulate.memory import Unit

    Score = Callable[[Run], tuple[float, ...]]

_PRICES = (0.2, 0.3, 0.5, 1.0)
"""Of a byte copied, in units of its time on the link one way."""
_AHEAD = (0.0, 2.0)
_ROOMS = (1.0, 0.95, 0.88)
"""Shares of the room to make candidates for: what the programme cannot know of copies may need the rest."""
_CLIMB = 900
"""Evaluations of each climb; one takes some 0.1 ms for 50 blocks."""
_WALK = 2500
_LOW_WALK = 800
_HALVINGS = 10
"""Steps of the search for the least peak."""


@dataclass(frozen=True)
class Chosen:
    """Units and what they do."""

    units: tuple[Unit, ...]
    run: Run


class Search:
    """The choice for one chain: budgets differ, everything else is worked out once."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.segmenter = Segmenter(chain)
        self.known: dict[tuple[Unit, ...], Run] = {}
        self._smallest: Chosen | None = None

    def run(self, units: tuple[Unit, ...]) -> Run:
        found = self.known.get(units)
        if found is None:
            found = self.known[units] = self.chain.run(units)
        return found

    @property
    def smallest(self) -> Chosen:
        """The least peak found, however slow."""
        if self._smallest is None:
            self._smallest = self._least_peak()
        return self._smallest

    def fastest(self, budget: int, *, quick: bool = False) -> Chosen | None:
        """The fastest units found with a peak within the budget; None where the least peak is above it."""
        chain = self.chain
        keep = _one_by_one(chain, KEEP)
        if self.run(keep).peak_bytes <= budget:
            return Chosen(keep, self.run(keep))
        smallest = self.smallest
        if smallest.run.peak_bytes > budget:
            return None

        def score(run: Run) -> tuple[float, ...]:
            return max(run.peak_bytes - budget, 0), run.time_s, run.peak_bytes

        found = {smallest.units, *uniform(chain).values()}
        room = budget - chain.base
        for price, ahead, share in product(_PRICES, _AHEAD, _ROOMS) if chain.has_host else ((0.0, 0.0, 1.0),):
            units = self.segmenter.least_time(room * share, price / chain.to_device, ahead)
            if units is not None:
                found.add(tuple(units))
        ranked = sorted(found, key=lambda units: (score(self.run(units)), units))
        if quick:
            return Chosen(ranked[0], self.run(ranked[0]))
        climbed = [self._climb(units, score, _CLIMB) for units in ranked[:3]]
        best = min(climbed, key=lambda units: (score(self.run(units)), units))
        plain = self.run(keep).time_s

        def energy(run: Run) -> float:
            # A peak a hundredth too high weighs as much as a twentieth of the time.
            return run.time_s / plain + 5 * max(run.peak_bytes / budget - 1, 0.0)

        best = self._climb(self._walk(best, score, energy, _WALK), score, _CLIMB)
        best = _without_empty_copies(chain, best)
        return Chosen(best, self.run(best))

    def _least_peak(self) -> Chosen:
        def score(run: Run) -> tuple[float, ...]:
            return run.peak_bytes, run.time_s

        chain = self.chain
        found = set(uniform(chain).values())
        for ahead in _AHEAD:
            low, high = 0.0, float(max(self.run(units).peak_bytes for units in found) - chain.base)
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                units = self.segmenter.least_time(middle, 0.0, ahead)
                if units is None:
                    low = middle
                else:
                    found.add(tuple(units))
                    high = middle
        ranked = sorted(found, key=lambda units: (score(self.run(units)), units))
        climbed = [self._climb(units, score, _CLIMB) for units in ranked[:2]]
        best = min(climbed, key=lambda units: (score(self.run(units)), units))
        above = max(self.run(best).peak_bytes - chain.base, 1)
        best = self._walk(best, score, lambda run: (run.peak_bytes - chain.base) / above, _LOW_WALK)
        return Chosen(best, self.run(best))

    def _climb(self, units: tuple[Unit, ...], score: Score, evaluations: int) -> tuple[Unit, ...]:
        """Take every change that scores better, until none does."""
        best = score(self.run(units))
        improved = True
        while improved:
            improved = False
            for changed in _changes(self.chain, units):
                if evaluations <= 0:
                    return units
                evaluations -= 1
                found = score(self.run(changed))
                if found < best and not _same(found, best):
                    units, best, improved = changed, found, True
                    break
        return units

    def _walk(
        self, units: tuple[Unit, ...], score: Score, energy: Callable[[Run], float], steps: int
    ) -> tuple[Unit, ...]:
        """Random changes, taken with a chance that falls with the harm and with the steps done."""
        draw = random.Random(0)
        here, at = units, energy(self.run(units))
        best = units
        for step in range(steps):
            warmth = 0.004 * (1 - step / steps) ** 2 + 1e-6
            changed = _random_change(self.chain, here, draw)
            if changed is None:
                continue
            run = self.run(changed)
            found = energy(run)
            if found <= at or draw.random() < math.exp((at - found) / warmth):
                here, at = changed, found
                if score(run) < score(self.run(best)):
                    best = changed
        return best


def uniform(chain: Chain) -> dict[str, tuple[Unit, ...]]:
    """Every block treated alike, where its place in the chain allows it."""
    policies = {"keep": _one_by_one(chain, KEEP), "recompute": _each_recomputed(chain, RECOMPUTE)}
    if chain.has_host:
        policies["recompute, inputs offloaded"] = _each_recomputed(chain, FETCH)
        policies["offload"] = _one_by_one(chain, OFFLOAD)
    return policies


def memory_plan(
    profile: Profile,
    budget_bytes: int,
    plan: Plan | None = None,
    *,
    residuals: Literal["device", "host"] = "device",
    workers: int | None = None,
) -> MemoryPlan:
    """The fastest plan found for this budget; refused where even the least peak is above it."""
    chain = Chain.of(profile, Holdings.of(profile, plan, residuals, workers))
    search = Search(chain)
    chosen = search.fastest(budget_bytes)
    if chosen is None:
        raise InputError(too_small(search, budget_bytes))
    return MemoryPlan(
        segments=plan_of(profile, chosen.units) if any(what != KEEP for _, _, what in chosen.units) else (),
        budget_bytes=budget_bytes,
        residuals=residuals,
        peak_bytes=chosen.run.peak_bytes,
    )


def too_small(search: Search, budget: int) -> str:
    """Why a budget is refused, and the smallest that would not be."""
    chain, run = search.chain, search.smallest.run
    if budget < chain.base:
        return (
            f"a memory budget of {format_bytes(budget)} is below what stays on the device whatever is done with "
            f"activations, {format_bytes(chain.base)} ({chain.holdings.described()}): "
            f"the smallest budget that fits is {run.peak_bytes} bytes ({_up(run.peak_bytes)})"
        )
    place = "the loss" if run.phase == "loss" else f"{run.phase} of {chain.names[run.block]}"
    return (
        f"a memory budget of {format_bytes(budget)} is too small: the smallest that fits is {run.peak_bytes} bytes "
        f"({_up(run.peak_bytes)}). Its peak is in the {place}: {format_bytes(run.peak_bytes - chain.base)} of "
        f"activations and their gradients, beside {chain.holdings.described()}. Give that much, or a smaller batch"
    )


def _up(size: int) -> str:
    """Rounded up to three figures, so that what is printed does fit."""
    scale = 10 ** max(len(str(size)) - 3, 0)
    return format_bytes(-(-size // scale) * scale)


def _one_by_one(chain: Chain, action: int) -> tuple[Unit, ...]:
    return tuple((k, k + 1, action) for k in range(chain.count))


def _each_recomputed(chain: Chain, action: int) -> tuple[Unit, ...]:
    """A block that nothing can begin with joins the one before it, or is kept."""
    units: list[Unit] = []
    for k in range(chain.count):
        if chain.may_begin[k]:
            units.append((k, k + 1, action))
        elif units and chain.may_go_on[k] and units[-1][2] != KEEP:
            units[-1] = (units[-1][0], k + 1, action)
        else:
            units.append((k, k + 1, KEEP))
    return tuple(units)


def _changes(chain: Chain, units: tuple[Unit, ...]) -> Iterator[tuple[Unit, ...]]:
    """Everything one change away, from the front, where tensors are largest."""
    for place in range(len(units)):
        for replaced, by in _at(chain, units, place):
            yield (*units[:place], *by, *units[place + replaced :])


def _random_change(chain: Chain, units: tuple[Unit, ...], draw: random.Random) -> tuple[Unit, ...] | None:
    place = draw.randrange(len(units))
    options = list(_at(chain, units, place))
    if not options:
        return None
    replaced, by = options[draw.randrange(len(options))]
    return (*units[:place], *by, *units[place + replaced :])


def _at(chain: Chain, units: tuple[Unit, ...], place: int) -> Iterator[tuple[int, tuple[Unit, ...]]]:
    """(how many units from `place` on are replaced, by which)."""
    first, last, what = units[place]
    again = (RECOMPUTE, FETCH) if chain.has_host else (RECOMPUTE,)
    begins = chain.may_begin[first]
    if last - first == 1:
        for action in (KEEP, *(again if begins else ()), *((OFFLOAD,) if chain.has_host else ())):
            if action != what:
                yield 1, ((first, last, action),)
    elif what in again:
        for action in again:
            if action != what:
                yield 1, ((first, last, action),)
        yield 1, tuple((k, k + 1, KEEP) for k in range(first, last))
        for middle in dict.fromkeys((first + 1, (first + last) // 2, last - 1)):
            if chain.may_begin[middle]:
                for action in again:
                    yield 1, ((first, middle, what), (middle, last, action))
            if middle == last - 1:
                yield 1, ((first, middle, what), (middle, last, KEEP))
            if middle == first + 1 and chain.may_begin[middle]:
                yield 1, ((first, middle, KEEP), (middle, last, what))
    if place + 1 == len(units):
        return
    _, beyond, other = units[place + 1]
    if not chain.may_go_on[last] or not begins:
        return
    # The two become one, or the boundary between them moves.
    if what in again or other in again:
        for action in again:
            if _may_merge(chain, first, beyond):
                yield 2, ((first, beyond, action),)
    if what in again and other in again:
        for moved in (last - 1, last + 1):
            if first < moved < beyond and chain.may_begin[moved]:
                yield 2, ((first, moved, what), (moved, beyond, other))
    # The same actions the other way round, so that what is kept can wander.
    if other != what and beyond - first == 2 and (what not in again or chain.may_begin[last]):
        yield 2, ((first, last, other), (last, beyond, what))


def _without_empty_copies(chain: Chain, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A segment that only the batch enters has no input to offload."""
    return tuple(
        (first, last, RECOMPUTE if what == FETCH and not chain.input[first] else what) for first, last, what in units
    )


def _may_merge(chain: Chain, first: int, beyond: int) -> bool:
    return all(chain.may_go_on[k] for k in range(first + 1, beyond))


def _same(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    """Equal but for rounding: the last bit of a sum is not worth a change."""
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in zip(one, two, strict=True))
