"""What a sharded planner chooses from: the parts of a model that units are made of, and a score for every choice.

Units are made of *atoms*: repeated blocks (`layers.3`), and what follows the last of them (norm, head) where it cannot
hold a weight that is tied to what comes before the first (embedding): a tied weight counts where it is held first, so a
part with as many elements of its own has its own weight. What else there is belongs to the root.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from backbeat.model.blocks import MemoryPlan, Segment
from backbeat.model.plan import Plan
from backbeat.model.sharding import Mesh, Sharding, ShardUnit
from backbeat.planners.unit_programme import Atoms
from backbeat.simulate.sharded_cost import ShardedCost
from backbeat.simulate.sharded_memory import sharded_memory
from backbeat.simulate.sharded_step import run_step
from backbeat.simulate.sharded_units import ModelPieces, ShardedChain, repeated
from backbeat.simulate.slowdowns import slowdown_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Network, Profile
    from backbeat.model.sharding import Dtype


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
    accumulate: Literal["reshard", "whole", "last"] = "reshard"
    """Under accumulation: free parameters after every backward; keep them until the last; and reduce gradients then."""

    def keeps(self, unit: int) -> bool:
        return bool(self.kept) and self.kept[unit]


class Scored(NamedTuple):
    """A choice, its step, and its peak (0 where the profile has no memory figures)."""

    seconds: float
    peak_bytes: int
    choice: ShardChoice


class ShardProblem:
    """One profile on one network, with every score that was asked for."""

    def __init__(
        self, profile: Profile, network: Network, *, accumulation: int | None = None, reduce_dtype: Dtype = "fp32"
    ) -> None:
        self.profile, self.network = profile, network
        self.micro_batches = accumulation or profile.accumulation
        self.slowdown = slowdown_of(profile, network, sharded=True).factor
        self.pieces = ModelPieces.of(profile)
        dtypes: dict[str, Dtype] = {"bf16": "bf16", "fp16": "fp16"}
        self.param_dtype: Dtype = dtypes.get(profile.precision, "fp32")
        self.reduce_dtype: Dtype = reduce_dtype
        self.names, self.stock = _unit_names(self.pieces, set(profile.index))
        self._costs: dict[int, ShardedCost] = {}
        self._times: dict[ShardChoice, float] = {}
        self._peaks: dict[ShardChoice, int] = {}
        self._chains: dict[int, ModelPieces] = {0: self.pieces}

    @cached_property
    def recomputable(self) -> list[str]:
        """Blocks with something to gain by it, those that free most for their time first, earlier ones first."""
        units = set(self.names)
        blocks = [
            (-(block.saved_bytes / block.forward_s if block.forward_s else float("inf")), place, block.name)
            for place, block in enumerate(self.profile.blocks)
            if block.saved_bytes > 0 and not block.changes_input and block.name in units
        ]
        # Blocks that differ by noise alone count as alike.
        return [name for _, _, name in sorted((float(f"{gain:.2g}"), place, name) for gain, place, name in blocks)]

    def mesh(self, shard: int) -> Mesh:
        return Mesh(replicate=self.network.workers // shard, shard=shard)

    def sharding(self, choice: ShardChoice) -> Sharding:
        starts = (0, *choice.ends[:-1])
        return Sharding(
            mesh=self.mesh(choice.shard),
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            reduce_scatter_buffers=choice.buffers,
            separate_reduce_scatter=choice.separate,
            units=tuple(
                ShardUnit(
                    modules=tuple(self.names[first:last]), reshard=not choice.keeps(place), prefetch=choice.prefetch
                )
                for place, (first, last) in enumerate(zip(starts, choice.ends, strict=True))
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

    def plan(self, choice: ShardChoice, strategy: str = "sharded") -> Plan:
        return Plan(
            strategy=strategy,
            model=self.profile.model,
            workers=self.network.workers,
            sharding=self.sharding(choice),
            memory=self.memory(choice),
        )

    def cost(self, shard: int) -> ShardedCost:
        if shard not in self._costs:
            choice = ShardChoice(ends=(len(self.names),), shard=shard)
            self._costs[shard] = ShardedCost.of(self.profile, self.network, self.sharding(choice))
        return self._costs[shard]

    def pieces_with(self, choice: ShardChoice) -> ModelPieces:
        count = choice.recomputed
        if count not in self._chains:
            self._chains[count] = ModelPieces.of(self.profile, self.memory(choice))
        return self._chains[count]

    def seconds(self, choice: ShardChoice) -> float:
        """The step of one worker, by the engine."""
        if choice not in self._times:
            sharding = self.sharding(choice)
            chain = ShardedChain.of(self.pieces_with(choice), sharding)
            run = run_step(
                chain,
                sharding,
                self.cost(choice.shard),
                self.profile.update_s / choice.shard,
                micro_batches=self.micro_batches,
                slowdown=self.slowdown,
            )
            self._times[choice] = run.end_s
        return self._times[choice]

    def peak(self, choice: ShardChoice) -> int:
        """0 where the profile has no memory figures."""
        # What hides behind what does not change what is held.
        alike = replace(choice, separate=False)
        if alike not in self._peaks:
            held = sharded_memory(self.profile, self.plan(alike), micro_batches=self.micro_batches)
            self._peaks[alike] = held.peak_bytes if held is not None else 0
        return self._peaks[alike]

    def scored(self, choice: ShardChoice) -> Scored:
        return Scored(self.seconds(choice), self.peak(choice), choice)

    def atoms(self, choice: ShardChoice) -> Atoms:
        """For the programme, with padding and recomputation as in this choice."""
        place = {name: number for number, name in enumerate(self.names)}
        count, shard = len(self.names), choice.shard
        elements, forward, backward = np.zeros((3, count))
        gaps = np.zeros((2, count + 1))
        joined = np.zeros(count, dtype=bool)
        root = float(_padded(self.pieces.loose, shard))
        reached, apart, first_is_last = 0, True, None
        for piece in self.pieces_with(choice).pieces:
            if piece.elements and first_is_last is None:
                first_is_last = piece.name in place
            at = place.get(piece.name)
            if at is None:
                gaps[:, reached] += piece.forward_s, piece.backward_s
                root += _padded(piece.elements, shard)
                apart = apart or bool(piece.elements)
                continue
            elements[at], forward[at], backward[at] = _padded(piece.elements, shard), piece.forward_s, piece.backward_s
            joined[at] = not apart
            reached, apart = at + 1, False
        return Atoms(elements, forward, backward, gaps[0], gaps[1], joined, root, bool(first_is_last))


def _padded(elements: Sequence[int], shards: int) -> int:
    return sum(-(-count // shards) * shards for count in elements)


def _unit_names(pieces: ModelPieces, parameters: set[str]) -> tuple[list[str], list[str]]:
    """The atoms, and those that are units by default. A parameter of the model itself is in no module."""
    holding = [piece for piece in pieces.pieces if piece.elements]
    stock = repeated([piece.name for piece in holding])
    alike = set(stock)
    places = [place for place, piece in enumerate(holding) if piece.name in alike]
    if not places:
        return [piece.name for piece in holding if piece.name not in parameters], stock
    before = max((sum(piece.elements) for piece in holding[: places[0]]), default=0)
    behind = [piece for piece in holding[places[-1] + 1 :] if piece.name not in parameters]
    if any(sum(piece.elements) >= before for piece in behind):
        return [*stock, *(piece.name for piece in behind)], stock
    return stock, stock
