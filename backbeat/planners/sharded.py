"""`sharded`: units, resharding, prefetch, reduce-scatter inputs, mesh and recomputation, chosen together.

Every choice is a plan for stock `fully_shard`. Dtypes are never changed: parameters travel in the profile's precision
and gradients are reduced in fp32, as under `fsdp`, unless `reduce_dtype` says otherwise.

1. For each mesh (all workers; copies of whole nodes and of parts of one) and for units that are all resharded or all
   kept, `unit_programme` finds the units of the shortest step. That is exact for its sub-problem.
2. The engine scores these and the units that people use, `fsdp`, `hsdp` and `zero2` among them, with contention and
   accumulation. What does not fit the budget recomputes as few blocks as it takes, or keeps fewer units.
3. The fastest few are improved: forward prefetch, further reduce-scatter inputs and a communicator of their own where
   torch has them, boundaries moved.
4. Of all that fit and whose steps differ by less than 1 % the one with the fewest changes from `fsdp` is taken, and
   none that is slower than `fsdp` where that fits. So `hsdp` and `zero2`, where they fit, gain at most 1 %.

Nothing is random, and every limit counts evaluations: the same input gives the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from backbeat.cost.accelerators import accelerator
from backbeat.errors import InputError
from backbeat.model.blocks import MemoryPlan
from backbeat.planners.best import SIMPLER_WITHIN
from backbeat.planners.memory_plan import needed, reserve_for, usable
from backbeat.planners.shard_problem import Scored, ShardChoice, ShardProblem
from backbeat.planners.unit_programme import unit_ends
from backbeat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from backbeat.model import Network, Plan, Profile
    from backbeat.planners.draft import StrategyOptions

_NEWER_TORCH = (2, 13)
"""Has several reduce-scatter inputs, and a communicator for reduce-scatters."""
_IMPROVED = 3
"""How many of the fastest are improved."""
_ALL_LABELS = 4000
_MOST_LABELS = 24
"""Labels of the programme at every cut, for models of many blocks."""
_FEW_ATOMS = 12
"""With no more of them the programme keeps every label."""
_LONGEST = 96
"""Atoms of one unit that are tried, for models of many blocks."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The choice, as a plan."""

    problem: ShardProblem
    best: Scored
    budget_bytes: int | None
    notes: tuple[str, ...]

    def named(self, profile: Profile, strategy: str, workers: int) -> Plan:
        plan = self.problem.plan(self.best.choice, strategy)
        memory = plan.memory
        if self.budget_bytes is not None:
            memory = msgspec.structs.replace(
                memory or MemoryPlan(), budget_bytes=self.budget_bytes, peak_bytes=self.best.peak_bytes or None
            )
        return msgspec.structs.replace(plan, memory=memory, notes=(*self.problem.pieces.notes, *self.notes))


def sharded(profile: Profile, network: Network, options: StrategyOptions) -> Planned:
    """The simplest plan within 1 % of the fastest found that fits the budget, and not slower than `fsdp`."""
    problem = ShardProblem(profile, network, accumulation=options.accumulation, reduce_dtype=options.reduce_dtype)
    reserve = reserve_for(profile, options.reserve)
    budget = options.memory_bytes
    room = None if budget is None else usable(budget, reserve)
    if room is None and profile.memory is not None and (device := accelerator(profile.device)) is not None:
        room = usable(device.memory_bytes, reserve)
    search = ShardSearch(problem, room)
    newer = _newer(options.torch_version)
    found = search.run(newer=newer)
    if not found:
        raise InputError(search.too_small(budget or room or 0, reserve))
    notes = []
    best = search.simplest(found)
    if not newer:
        gained = search.simplest([*found, *search.with_knobs(found)])
        if gained.seconds < best.seconds * (1 - SIMPLER_WITHIN):
            knobs = " and ".join(_knob_words(gained.choice))
            notes.append(
                f"with torch 2.13, {knobs} would take {format_seconds(gained.seconds)} instead of "
                f"{format_seconds(best.seconds)}: plan with --torch 2.13 where it is installed"
            )
    return Planned(problem, best, budget, tuple(notes))


def _newer(version: str | None) -> bool:
    """Whether this torch has the knobs of 2.13; an unsaid one is taken not to."""
    if version is None:
        return False
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise InputError(f"torch_version is {version!r}: it must be like 2.11")
    return (int(parts[0]), int(parts[1])) >= _NEWER_TORCH


def _knob_words(choice: ShardChoice) -> list[str]:
    words = []
    if choice.buffers > 1:
        words.append(f"{choice.buffers} reduce-scatter inputs")
    if choice.separate:
        words.append("a communicator for reduce-scatters")
    return words


class ShardSearch:
    """Choices for one problem within a room of device memory; None: any."""

    def __init__(self, problem: ShardProblem, room: int | None) -> None:
        self.problem, self.room = problem, room
        count = len(problem.names)
        self.stock_ends = tuple(range(1, len(problem.stock) + 1))
        self.single = tuple(range(1, count + 1))
        self.most, self.longest = (_ALL_LABELS, count) if count <= _FEW_ATOMS else (_MOST_LABELS, _LONGEST)

    def run(self, *, newer: bool) -> list[Scored]:
        """Everything that was found to fit."""
        rough = sorted(
            (self.problem.seconds(choice), place, choice) for place, choice in enumerate(dict.fromkeys(self.starts()))
        )
        found = [*self.baselines()]
        for seconds, _, choice in rough:
            if len(found) > 8 and seconds > min(one.seconds for one in found) * 1.05:
                break
            found += self.fitted(choice)
        found += self.further(found)
        if newer:
            found += self.with_knobs(found)
        return found

    def shards(self) -> list[int]:
        workers, node = self.problem.network.workers, self.problem.network.topology.gpus_per_node
        return [
            count
            for count in range(workers, 1, -1)
            if workers % count == 0 and (count % node == 0 or node % count == 0)
        ] or [workers]

    def starts(self) -> Iterator[ShardChoice]:
        """Units by the programme on every mesh, resharded and kept."""
        for shard in self.shards():
            for keep in (False, True):
                base = self._choice(self.single, shard, keep)
                if self.stock_ends:
                    yield self._choice(self.stock_ends, shard, keep)
                yield base
                if self.problem.names:
                    ends = self._programme(base, keep)
                    if ends is not None:
                        yield self._choice(ends, shard, keep)

    def _choice(self, ends: tuple[int, ...], shard: int, keep: bool) -> ShardChoice:
        several = self.problem.micro_batches > 1
        return ShardChoice(
            ends=ends,
            shard=shard,
            kept=(True,) * len(ends) if keep else (),
            accumulate="last" if keep and several else "reshard",
        )

    def _programme(self, base: ShardChoice, keep: bool) -> tuple[int, ...] | None:
        cost = self.problem.cost(base.shard)
        found = unit_ends(self.problem.atoms(base), cost, reshard=not keep, most=self.most, longest=self.longest)
        return tuple(found.ends) if found is not None else None

    def baselines(self) -> Iterator[Scored]:
        """`fsdp`, `hsdp` and `zero2`, where they fit."""
        workers, node = self.problem.network.workers, self.problem.network.topology.gpus_per_node
        several = self.problem.micro_batches > 1
        choices = [ShardChoice(ends=self.stock_ends, shard=workers)]
        if node > 1 and workers % node == 0:
            choices.append(ShardChoice(ends=self.stock_ends, shard=node))
        kept = ShardChoice(ends=self.stock_ends, shard=workers, kept=(True,) * len(self.stock_ends))
        choices += [replace(kept, accumulate=how) for how in ("whole", "last")] if several else [kept]
        for choice in choices:
            if self.fits(choice):
                yield self.problem.scored(choice)

    def fits(self, choice: ShardChoice) -> bool:
        return self.room is None or self.problem.peak(choice) <= self.room

    def fitted(self, choice: ShardChoice) -> list[Scored]:
        """The choice itself, or with as few blocks recomputed, or as many units kept, as fit."""
        if self.fits(choice):
            return [self.problem.scored(choice)]
        found = [self._least(choice, "recomputed", len(self.problem.recomputable))]
        if choice.kept:
            found.append(self._most_kept(choice))
        return [self.problem.scored(one) for one in found if one is not None]

    def _least(self, choice: ShardChoice, field: str, most: int) -> ShardChoice | None:
        """The least number that fits, by bisection; None where the most does not."""
        if not most or not self.fits(replace(choice, recomputed=most)):
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(replace(choice, recomputed=middle)) else (middle, high)
        return replace(choice, recomputed=high)

    def _most_kept(self, choice: ShardChoice) -> ShardChoice | None:
        """With the last units kept, as many as fit."""
        count = len(choice.ends)

        def kept(last: int) -> ShardChoice:
            flags = (False,) * (count - last) + (True,) * last
            return replace(choice, kept=flags if last else (), accumulate="reshard")

        if not self.fits(kept(1)):
            return None
        low, high = 1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(kept(middle)) else (low, middle)
        return kept(low)

    def further(self, found: list[Scored]) -> list[Scored]:
        """The fastest with forward prefetch."""
        more = []
        for one in self._fastest(found):
            more += self.fitting(replace(one.choice, prefetch=depth) for depth in (2, 3))
        return more

    def with_knobs(self, found: list[Scored]) -> list[Scored]:
        """The fastest with what torch 2.13 has."""
        more = []
        for one in self._fastest(found):
            choice = one.choice
            more += self.fitting(
                replace(choice, buffers=buffers, separate=separate)
                for buffers in (1, 2, 4)
                for separate in (False, True)
                if (buffers, separate) != (1, False)
            )
        return more

    def fitting(self, choices: Iterable[ShardChoice]) -> list[Scored]:
        return [self.problem.scored(choice) for choice in choices if self.fits(choice)]

    def _fastest(self, found: list[Scored]) -> list[Scored]:
        return sorted(found, key=self._rank)[:_IMPROVED]

    def simplest(self, found: list[Scored]) -> Scored:
        """The fewest changes from `fsdp` within 1 % of the fastest, and not slower than what people use."""
        limit = min(one.seconds for one in found) * (1 + SIMPLER_WITHIN)
        stock = ShardChoice(ends=self.stock_ends, shard=self.problem.network.workers)
        if self.fits(stock):
            limit = min(limit, self.problem.seconds(stock))
        limit = max(limit, min(one.seconds for one in found))
        return min(
            (one for one in found if one.seconds <= limit), key=lambda one: (self.changes(one.choice), *self._rank(one))
        )

    def _rank(self, one: Scored) -> tuple[float, tuple[int, ...], int]:
        return float(f"{one.seconds:.9g}"), self.changes(one.choice), one.peak_bytes

    def changes(self, choice: ShardChoice) -> tuple[int, ...]:
        """What differs from `fsdp`: how many kinds of things, then how much of each."""
        kinds = (
            choice.ends != self.stock_ends,
            bool(choice.kept),
            choice.shard != self.problem.network.workers,
            bool(choice.prefetch),
            choice.buffers > 1,
            choice.separate,
            choice.recomputed > 0,
            choice.accumulate != "reshard",
        )
        mixed = 0 < sum(choice.kept) < len(choice.kept)
        return sum(kinds), choice.recomputed, int(mixed), choice.prefetch, choice.buffers, -len(choice.ends)

    def too_small(self, budget: int, reserve: float | None) -> str:
        """Why nothing fits, and the smallest budget that would."""
        choices = [
            replace(choice, recomputed=count)
            for shard in self.shards()[:1]
            for choice in (self._choice(self.single, shard, False), self._choice(self.stock_ends, shard, False))
            for count in (0, len(self.problem.recomputable))
        ]
        least = needed(min(self.problem.peak(choice) for choice in choices), reserve)
        return (
            f"a memory budget of {format_bytes(budget)} is too small: sharded over {self.shards()[0]} workers, with "
            f"every block recomputed, the smallest that fits is {least} bytes ({format_bytes(least)}). Give that much, "
            "more workers, or a smaller batch"
        )
