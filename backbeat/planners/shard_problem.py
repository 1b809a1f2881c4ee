"""What a sharded planner chooses from: the parts of a model that units are made of, and a score for every choice.

Units are made of *atoms*: repeated blocks (`layers.3`), and the parts after the last of them (norm, head). A part after
them is no atom where it may share a weight with a part before the first, as a head does with its embedding. A profile
counts a tied weight once, with the part that holds it first. So a part with as many elements of its own has a weight of
its own. All other parts belong to the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from backbeat.model import Network, Profile, Sharding
from backbeat.model.blocks import MemoryPlan, Segment
from backbeat.model.plan import Plan
from backbeat.model.sharding import Mesh, ShardedDtype, ShardUnit
from backbeat.model.slowdown import slowdown_of
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.sharded_baselines import fsdp
from backbeat.planners.unit_programme import Atoms
from backbeat.steps.model_chain import Chain, ShardedChain, padded
from backbeat.steps.sharded_memory import sharded_memory
from backbeat.steps.unit_graph import ShardedCost, run_step

Between = Literal["reshard", "whole", "last"]
"""What units do between micro-batches: see `ShardChoice.accumulate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """Everything that is decided. The defaults are torch's own."""

    ends: tuple[int, ...]
    """Index after the last atom of each unit."""
    shard: int
    kept: tuple[bool, ...] = ()
    """Units that are not resharded after forward; none where empty."""
    prefetch: int = 0
    buffers: int = 1
    separate: bool = False
    recomputed: int = 0
    """How many blocks are computed again, in the order of `ShardProblem.recomputable`."""
    accumulate: Between = "reshard"
    """Under accumulation. `reshard`: free parameters after every backward. `whole`: keep them until the last. `last`:
    also reduce gradients only then."""

    def keeps(self, unit: int) -> bool:
        return bool(self.kept) and self.kept[unit]


class Scored(NamedTuple):
    """A choice, its step, and its peak (0 where the profile has no memory figures)."""

    seconds: float
    peak_bytes: int
    choice: ShardChoice


class ShardProblem:
    """One profile on one network, with every score that was asked for."""

    def __init__(self, profile: Profile, network: Network, options: StrategyOptions) -> None:
        self.profile, self.network = profile, network
        self.micro_batches = options.accumulation or profile.accumulation
        self.slowdown = slowdown_of(profile, network, sharded=True).factor
        self.whole = Chain.of_profile(profile)
        usual = fsdp(profile, network, options).sharding
        assert usual is not None
        self.usual = usual
        self.stock = [unit.modules[0] for unit in usual.units]
        self.names = [*self.stock, *_after_blocks(self.whole, self.stock, profile.index)]
        self.cost: Callable[[int], ShardedCost] = cache(self._cost)
        self.seconds: Callable[..., float] = cache(self._seconds)
        # The last is kept: its time and its peak are asked for one after the other.
        self.chain: Callable[[ShardChoice], ShardedChain] = lru_cache(maxsize=1)(self._chain)
        self.peaks: dict[ShardChoice, int] = {}
        self._chains: dict[int, Chain] = {0: self.whole}

    @cached_property
    def breaks(self) -> frozenset[int]:
        """Where a unit must end: the root holds parameters between these atoms."""
        joined = self.atoms(ShardChoice(ends=(len(self.names),), shard=self.network.workers)).joined
        return frozenset(index for index in range(1, len(joined)) if not joined[index])

    @cached_property
    def recomputable(self) -> list[str]:
        """Blocks that save something, those that free most for their time first, of like ones the earliest."""
        units, found = set(self.names), []
        for index, block in enumerate(self.profile.blocks):
            if block.saved_bytes > 0 and not block.changes_input and block.name in units:
                per_second = block.saved_bytes / max(block.forward_s, 1e-9)
                # Times differ by noise: within a quarter they count as alike.
                found.append((-round(math.log(per_second, 1.25)), index, block.name))
        return [name for _, _, name in sorted(found)]

    def sharding(self, choice: ShardChoice) -> Sharding:
        return msgspec.structs.replace(
            self.usual,
            mesh=Mesh(replicate=self.network.workers // choice.shard, shard=choice.shard),
            reduce_scatter_buffers=choice.buffers,
            separate_reduce_scatter=choice.separate,
            units=tuple(
                ShardUnit(
                    modules=tuple(self.names[first:last]), reshard=not choice.keeps(index), prefetch=choice.prefetch
                )
                for index, (first, last) in enumerate(pairwise((0, *choice.ends)))
            ),
            gradient_sync="last" if choice.accumulate == "last" else "every",
            reshard_after_backward=choice.accumulate == "reshard",
        )

    def memory(self, choice: ShardChoice) -> MemoryPlan | None:
        if not choice.recomputed:
            return None
        again = set(self.recomputable[: choice.recomputed])
        names = [block.name for block in self.profile.blocks if block.name in again]
        return MemoryPlan(segments=tuple(Segment(blocks=(name,), action="recompute") for name in names))

    def plan(self, choice: ShardChoice) -> Plan:
        return Plan(
            strategy="sharded",
            model=self.profile.model,
            workers=self.network.workers,
            sharding=self.sharding(choice),
            memory=self.memory(choice),
        )

    def _cost(self, shard: int) -> ShardedCost:
        choice = ShardChoice(ends=(len(self.names),), shard=shard)
        return ShardedCost.of(self.profile, self.network, self.sharding(choice))

    def chain_with(self, choice: ShardChoice) -> Chain:
        count = choice.recomputed
        if count not in self._chains:
            self._chains[count] = Chain.of_profile(self.profile, self.memory(choice))
        return self._chains[count]

    def _chain(self, choice: ShardChoice) -> ShardedChain:
        return ShardedChain.of(self.chain_with(choice), self.sharding(choice))

    def _seconds(self, choice: ShardChoice, reduced_in: ShardedDtype | None = None) -> float:
        """The step of one worker, by the engine; or with gradients `reduced_in` another dtype."""
        cost, update_s = self.cost(choice.shard), self.profile.update_s / choice.shard
        if reduced_in is not None:
            sharding = msgspec.structs.replace(self.sharding(choice), reduce_dtype=reduced_in)
            cost = ShardedCost.of(self.profile, self.network, sharding)
        chain, micro_batches = self.chain(choice), self.micro_batches
        _, times = run_step(chain, cost, update_s, micro_batches=micro_batches, slowdown=self.slowdown)
        return times.ends[-1]

    def peak(self, choice: ShardChoice) -> int:
        """0 where the profile has no memory figures."""
        # What hides behind what does not change what is held.
        alike = replace(choice, separate=False)
        if alike not in self.peaks:
            plan = self.plan(alike)
            held = sharded_memory(self.profile, plan, micro_batches=self.micro_batches, chain=self.chain(alike))
            self.peaks[alike] = held.peak_bytes if held is not None else 0
        return self.peaks[alike]

    def scored(self, choice: ShardChoice) -> Scored:
        return Scored(self.seconds(choice), self.peak(choice), choice)

    def atoms(self, choice: ShardChoice) -> Atoms:
        """For the programme, with padding and recomputation as in this choice."""
        index = {name: number for number, name in enumerate(self.names)}
        count, shard = len(self.names), choice.shard
        elements, forward, backward = np.zeros((3, count))
        gaps = np.zeros((2, count + 1))
        joined = np.zeros(count, dtype=bool)
        root = float(padded(self.whole.loose, shard))
        reached, apart, first_is_last = 0, True, None
        for piece in self.chain_with(choice).pieces:
            if piece.elements and first_is_last is None:
                first_is_last = piece.name in index
            at = index.get(piece.name)
            if at is None:
                gaps[:, reached] += piece.forward_s, piece.backward_s
                root += padded(piece.elements, shard)
                apart = apart or bool(piece.elements)
                continue
            elements[at], forward[at], backward[at] = padded(piece.elements, shard), piece.forward_s, piece.backward_s
            joined[at] = not apart
            reached, apart = at + 1, False
        return Atoms(elements, forward, backward, gaps[0], gaps[1], joined, root, bool(first_is_last))


def _after_blocks(chain: Chain, stock: Sequence[str], parameters: Container[str]) -> list[str]:
    """What follows the last repeated block and may be a unit. A parameter of the model itself is in no module."""
    holding = [piece for piece in chain.pieces if piece.elements]
    alike = set(stock)
    indices = [index for index, piece in enumerate(holding) if piece.name in alike]
    first, last = (indices[0], indices[-1] + 1) if indices else (0, 0)
    before = max((sum(piece.elements) for piece in holding[:first]), default=0)
    after = [piece for piece in holding[last:] if piece.name not in parameters]
    return [piece.name for piece in after] if any(sum(piece.elements) >= before for piece in after) else []
