"""The search behind `sharded`: choices that fit a room of device memory, fast ones first.

A choice that is too large keeps fewer units whole after forward, recomputes as few blocks as needed, or both. Nothing
is random, and every limit counts evaluations: the same problem gives the same choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cached_property
from itertools import combinations, pairwise, product

from backbeat.model.rule import PLANS
from backbeat.planners.shard_problem import Between, Scored, ShardChoice, ShardProblem
from backbeat.planners.unit_programme import UnitEnds, unit_ends

Ends = tuple[int, ...]

_LABELS = ((12, 4000), (50, 100), (200, 24))
"""Up to so many atoms, so many labels of the programme."""
_FEWEST_LABELS = 4
_LENGTHS = (2, 4, 16, 64, 256)
"""Most atoms of a unit that are tried: what small units lose in latency they gain in memory."""
_MESHES = 3
"""How many meshes are looked into, by what the units of `fsdp` take on them."""
_IMPROVED = 2
"""How many of the fastest are improved."""
_MANY = 200
"""Above so many atoms, where every simulation takes long, fewer lengths and meshes are tried."""
_FITTED = 2
"""How many are then made to fit on each mesh, of those kept and of those freed."""
_FEW = 8
"""Up to so many blocks to recompute, every number is tried."""
_GRAIN = 64
"""Bisection counts in steps of so much of the whole."""
_IMPROVEMENTS = 1500
"""Units simulated to improve one of them by moving boundaries."""
_TIGHT = 6000
"""Atoms simulated to improve all of them, where a faster one did not fit."""
_SWAPPED = 16
"""Up to so many units, one is kept in place of another."""
_PREFETCH = (2, 3)
_BUFFERS = (1, 2, 4)


class ShardSearch:
    """Choices for one problem; `room` is the most device memory, None for any."""

    def __init__(self, problem: ShardProblem, room: int | None) -> None:
        self.problem, self.room = problem, room
        self.workers = problem.network.workers
        self.stock = ShardChoice(ends=tuple(range(1, len(problem.stock) + 1)), shard=self.workers)
        count = len(problem.names)
        self.labels = next((labels for most, labels in _LABELS if count <= most), _FEWEST_LABELS)
        many = count > _MANY
        self.lengths = [length for length in _LENGTHS[2 if many else 0 :: 2 if many else 1] if length < count]
        self.lengths += [count] * (count <= _LENGTHS[-1])
        self.many = many
        self.meshes, self.improved = (1, 1) if many else (_MESHES, _IMPROVED)
        self.tight = False  # something faster did not fit
        self._units: dict[tuple[object, ...], list[Ends]] = {}

    def run(self) -> list[Scored]:
        """What was found to fit, with what every torch has."""
        found = [*self.baselines()]
        tried: Counter[tuple[int, bool]] = Counter()
        starts = ((self.problem.seconds(choice), choice) for choice in dict.fromkeys(self.starts()))
        for seconds, choice in sorted(starts, key=lambda one: one[0]):
            # Whatever makes it fit makes it slower.
            if found and seconds > min(one.seconds for one in found) * (1 + PLANS):
                break
            kind = choice.shard, bool(choice.kept)
            if self.fits(choice) or not self.many or tried[kind] < _FITTED:
                tried[kind] += not self.fits(choice)
                found += self.fitted(choice)
        found = found or self._fitting([self.smallest])
        likely = self._likely(found)
        for one in likely:
            found += self._fitting(replace(one.choice, prefetch=depth) for depth in _PREFETCH)
            # Boundaries moved, dropped and added, and where not all fits, units kept and freed, as long as that gains.
            atoms = _TIGHT // len(likely) if self.tight else None
            found.append(self.problem.scored(self._climb(one.choice, self._faster, atoms)))
        return found

    def with_newer_settings(self, found: list[Scored]) -> list[Scored]:
        """The fastest with several reduce-scatter inputs, and with a communicator for reduce-scatters."""
        more = []
        for one in self._fastest(found):
            for buffers, separate in product(_BUFFERS, (False, True)):
                if (buffers, separate) != (1, False):
                    changed = replace(one.choice, buffers=buffers, separate=separate)
                    alike = len(set(one.choice.kept)) < 2 and not self.many
                    units = self._programme(changed)[:1] if alike else []
                    more += self._fitting(
                        _with_ends(changed, ends) for ends in dict.fromkeys([one.choice.ends, *units])
                    )
        return more

    def simplest(self, found: list[Scored]) -> Scored:
        """The fewest changes from `fsdp` within 1 % of the fastest, and not slower than `fsdp` where that fits."""
        fastest = min(one.seconds for one in found)
        limit = fastest * (1 + PLANS)
        if self.fits(self.stock):
            limit = max(min(limit, self.problem.seconds(self.stock)), fastest)
        return min((one for one in found if one.seconds <= limit), key=lambda one: (self.changes(one), one.seconds))

    def changes(self, one: Scored) -> tuple[int, ...]:
        """What differs from `fsdp`: how many kinds of things, then how much of each. Units of like lengths come first,
        and small ones, which take less memory."""
        choice = one.choice
        kinds = sum(getattr(choice, field.name) != getattr(self.stock, field.name) for field in fields(choice))
        how_much = choice.recomputed, len(set(choice.kept)), choice.prefetch, choice.buffers
        lengths = {last - first for first, last in pairwise((0, *choice.ends))}
        return kinds, *how_much, len(lengths), -len(choice.ends)

    def shards(self) -> list[int]:
        """All workers, then shard groups of whole nodes, or of equal parts of one."""
        node = self.problem.network.topology.gpus_per_node
        counts = (count for count in range(self.workers, 1, -1) if self.workers % count == 0)
        return [count for count in counts if count % node == 0 or node % count == 0] or [self.workers]

    def baselines(self) -> Iterator[Scored]:
        """`fsdp`, `hsdp` and `zero2`, where they fit."""
        choices = [replace(self.stock, shard=shard) for shard in self.shards()]
        choices += [self._choice(self.stock.ends, self.workers, True, how) for how in self._ways(True)]
        yield from self._fitting(choices)

    def starts(self) -> Iterator[ShardChoice]:
        """Units of every length on every mesh, resharded and kept."""
        if not self.problem.names:
            return
        usual = {shard: self.problem.seconds(replace(self.stock, shard=shard)) for shard in self.shards()}
        likely = sorted(usual, key=lambda shard: (usual[shard], -shard))[: self.meshes]
        for shard, keep in product(dict.fromkeys([self.workers, *likely]), (False, True)):
            for how in self._ways(keep):
                base = self._choice(tuple(range(1, len(self.problem.names) + 1)), shard, keep, how)
                for ends in dict.fromkeys([self.stock.ends, *self._alike(), *self._programme(base)]):
                    yield _with_ends(base, ends)

    def fitted(self, choice: ShardChoice) -> list[Scored]:
        """The choice itself, or with as many units kept as fit, as few blocks recomputed, or half of both."""
        if self.fits(choice):
            return [self.problem.scored(choice)]
        self.tight = True
        found = [self._refitted(choice)]
        if choice.kept:
            count = len(choice.ends)
            most = self._most(lambda more: _last_kept(choice, more), count) or 0
            found += [self._refitted(_last_kept(choice, number)) for number in {most, (most + count) // 2}]
        return [self.problem.scored(one) for one in found if one is not None]

    @cached_property
    def smallest(self) -> ShardChoice:
        """The least peak that is found. Recomputing a block can raise it: all it saves is there twice for a moment."""
        blocks, count = len(self.problem.recomputable), len(self.problem.names)
        some = sorted({*range(0, blocks + 1, max(blocks // 4, 1)), blocks}, reverse=True)

        def less(changed: ShardChoice, best: ShardChoice) -> ShardChoice | None:
            found = min((replace(changed, recomputed=number) for number in some), key=self.problem.peak)
            return found if self.problem.peak(found) < self.problem.peak(best) else None

        starts = [tuple(range(1, count + 1)), tuple(sorted({*self.problem.breaks, count}))]
        bases = [self._choice(ends, self.workers, False) for ends in starts]
        found = (self._climb(less(base, base) or base, less, _TIGHT // 2) for base in bases)
        return min(found, key=self.problem.peak)

    def fits(self, choice: ShardChoice) -> bool:
        return self.room is None or self.problem.peak(choice) <= self.room

    def _most(self, made: Callable[[int], ShardChoice], most: int) -> int | None:
        """The largest number up to `most` whose choice fits, by bisection; None where not even 0 does."""
        low, high = 0, most
        if not self.fits(made(0)):
            return None
        while high - low > max(most // _GRAIN, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(made(middle)) else (low, middle)
        return low

    def _refitted(self, choice: ShardChoice) -> ShardChoice | None:
        """With as few blocks recomputed as fit; None where no number of them makes it fit."""
        blocks = len(self.problem.recomputable)
        # More can take more memory: so few are tried one by one.
        for count in range(blocks + 1 if blocks <= _FEW else 1):
            if self.fits(replace(choice, recomputed=count)):
                return replace(choice, recomputed=count)
        kept = self._most(lambda more: replace(choice, recomputed=blocks - more), blocks) if blocks > _FEW else None
        return None if kept is None else replace(choice, recomputed=blocks - kept)

    def _choice(self, ends: Ends, shard: int, keep: bool, how: Between = "reshard") -> ShardChoice:
        return ShardChoice(ends=ends, shard=shard, kept=(True,) * len(ends) if keep else (), accumulate=how)

    def _ways(self, keep: bool) -> tuple[Between, ...]:
        """What to do between micro-batches."""
        return ("whole", "last") if keep and self.problem.micro_batches > 1 else ("reshard",)

    def _alike(self) -> Iterator[Ends]:
        """Units of as many atoms each."""
        count = len(self.problem.names)
        for length in (1, *self.lengths):
            yield tuple(sorted({*range(length, count, length), *self.problem.breaks, count}))

    def _programme(self, base: ShardChoice) -> list[Ends]:
        """Units up to every length, those of the shortest step first."""
        key = base.shard, bool(base.kept), base.buffers, base.recomputed
        if key not in self._units:
            atoms, cost = self.problem.atoms(base), self.problem.cost(base.shard)
            made: list[UnitEnds] = []
            for longest in reversed(self.lengths):
                # Where longer units were allowed and none is, these are the same.
                if not made or max(last - first for first, last in pairwise((0, *made[-1].ends))) > longest:
                    made.append(
                        unit_ends(
                            atoms, cost, reshard=not base.kept, buffers=base.buffers, most=self.labels, longest=longest
                        )
                    )
            self._units[key] = [tuple(one.ends) for one in sorted(made, key=lambda one: one.seconds)]
        return self._units[key]

    def _fitting(self, choices: Iterable[ShardChoice]) -> list[Scored]:
        return [self.problem.scored(choice) for choice in choices if self.fits(choice)]

    def _fastest(self, found: list[Scored]) -> list[Scored]:
        unique = {one.choice: one for one in found}.values()
        return sorted(unique, key=lambda one: (float(f"{one.seconds:.9g}"), self.changes(one)))[: self.improved]

    def _likely(self, found: list[Scored]) -> list[Scored]:
        """What to improve: the fastest. Where a faster one did not fit, also the fastest of those that keep no unit
        whole, of those that keep all, and of those that keep some."""
        fastest = self._fastest(found)
        if self.tight:
            for kind in ({False}, {True}, {True, False}):
                fastest += self._fastest([one for one in found if (set(one.choice.kept) or {False}) == kind])
        return list(dict.fromkeys(fastest))

    def _climb(
        self, best: ShardChoice, better: Callable[[ShardChoice, ShardChoice], ShardChoice | None], atoms: int | None
    ) -> ShardChoice:
        """Take the first better neighbour, again and again, until there is none or the limit is reached: this many
        `atoms` simulated, or, where that is None, `_IMPROVEMENTS` units."""
        flips, left = atoms is not None, _IMPROVEMENTS if atoms is None else atoms
        found: ShardChoice | None = best
        while found is not None:
            best, found = found, None
            for changed in _neighbours(best, self.problem.breaks, flips=flips):
                left -= len(self.problem.names) if flips else len(changed.ends)
                if left < 0:
                    return best
                found = better(changed, best)
                if found is not None:
                    break
        return best

    def _faster(self, changed: ShardChoice, best: ShardChoice) -> ShardChoice | None:
        """With as few blocks recomputed as fit."""
        limit = self.problem.seconds(best) * (1 - 1e-6)
        # Recomputing makes it slower.
        if self.problem.seconds(replace(changed, recomputed=0)) >= limit:
            return None
        found = self._refitted(changed) if self.tight else changed if self.fits(changed) else None
        return found if found is not None and self.problem.seconds(found) < limit else None


def _with_ends(choice: ShardChoice, ends: Ends) -> ShardChoice:
    """Other units, all resharded or kept as those of the choice."""
    if ends == choice.ends:
        return choice
    return replace(choice, ends=ends, kept=(True,) * len(ends) if choice.kept else ())


def _keeping(choice: ShardChoice, ends: Ends, kept: tuple[bool, ...]) -> ShardChoice:
    """These units, of which these are kept. Between micro-batches all are treated alike, or all resharded."""
    how = choice.accumulate if all(kept) else "reshard"
    return replace(choice, ends=ends, kept=kept if any(kept) else (), accumulate=how)


def _last_kept(choice: ShardChoice, count: int) -> ShardChoice:
    """Only the last units stay whole: they are gathered again soonest."""
    return _keeping(choice, choice.ends, (False,) * (len(choice.ends) - count) + (True,) * count)


def _neighbours(choice: ShardChoice, breaks: frozenset[int], *, flips: bool = False) -> Iterator[ShardChoice]:
    """A boundary dropped, moved by one, or set in the middle of a unit; with `flips`, units kept or freed."""
    ends, kept = choice.ends, choice.kept or (False,) * len(choice.ends)
    for index in range(len(ends) - 1):
        if ends[index] in breaks:
            continue
        low, high = ends[index - 1] if index else 0, ends[index + 1]
        for moved in (ends[index] - 1, ends[index] + 1):
            if low < moved < high:
                yield _keeping(choice, (*ends[:index], moved, *ends[index + 1 :]), kept)
        for flag in sorted({kept[index], kept[index + 1]}):
            yield _keeping(choice, (*ends[:index], *ends[index + 1 :]), (*kept[:index], flag, *kept[index + 2 :]))
    for index, (first, last) in enumerate(pairwise((0, *ends))):
        if last - first > 1:
            split = (*ends[:index], (first + last) // 2, *ends[index:])
            for halves in product((True, False), repeat=2) if flips else [(kept[index],) * 2]:
                yield _keeping(choice, split, (*kept[:index], *halves, *kept[index + 1 :]))
    if flips:
        for flags in _flipped(kept):
            yield _keeping(choice, ends, flags)


def _flipped(kept: tuple[bool, ...]) -> Iterator[tuple[bool, ...]]:
    """Runs of units kept or freed, long ones first; then one kept in place of another."""
    length = count = len(kept)
    while length:
        for first, flag in product(range(0, count, length), (True, False)):
            run = kept[first : first + length]
            if set(run) != {flag}:
                yield (*kept[:first], *(flag,) * len(run), *kept[first + length :])
        length //= 2
    if count <= _SWAPPED:
        for one, other in combinations(range(count), 2):
            if kept[one] != kept[other]:
                yield tuple(flag != (index in (one, other)) for index, flag in enumerate(kept))
