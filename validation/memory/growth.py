"""How far the batch can grow within a memory budget, keeping everything and with a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.batches import at_batch
from backbeat.model.blocks import BlockRanges
from backbeat.model.resident import ResidentMemory
from backbeat.planners.max_batch import largest_batch, whole_steps, with_blocks
from backbeat.planners.memory_moves import uniform
from backbeat.planners.memory_plan import MemorySearch, reserve_for, too_small, usable
from backbeat.steps.memory_timeline import BlockChain
from backbeat.steps.predict import predict

_RETREAT = 0.95
_BETWEEN = (0.25, 0.5, 0.75)
"""Where between the largest batch kept whole and the largest of all further ones are planned."""


@dataclass(frozen=True)
class GrownBatch:
    """A batch size, the plan that fits it within the budget, and what that gives."""

    batch_size: int
    kept: bool
    """Everything fits as it is."""
    plan: Plan
    prediction: Prediction


def batches(profile: Profile, budget: int, workers: int | None = None) -> tuple[int, int]:
    """(largest batch with everything kept, 0 where none fits; largest with a memory plan)."""
    profile = with_blocks(profile)
    reserve = reserve_for(profile, None)
    search = MemorySearch(_chain(profile, workers))
    keep, least = uniform(search.chain)["keep"], search.smallest.ranges
    room = usable(budget, reserve)

    def largest(ranges: BlockRanges) -> int:
        # Sizes grow alike, so ranges that are best at one batch stay so.
        return largest_batch(profile, room, lambda there: _chain(there, workers).run(ranges).peak_bytes)

    whole = largest(keep)
    planned = max(largest(least), whole)
    if planned == 0:
        one = MemorySearch(_chain(at_batch(profile, 1), workers))
        raise InputError(f"not even a batch of one sample fits: {too_small(one, budget, reserve)}")
    return whole, planned


def growth(
    profile: Profile,
    network: Network,
    budget: int,
    schedule: Callable[[Profile], Plan],
) -> list[GrownBatch]:
    """The largest batches, the profile's own where it fits, and some between, each planned and predicted.

    Compressed buckets hold more than gradients do, so the largest batch kept whole may be found below the first guess.
    """
    profile = with_blocks(profile)
    whole, planned = batches(profile, budget, network.workers)
    sizes = {whole, planned, *(whole_steps(whole + share * (planned - whole)) for share in _BETWEEN)}
    if profile.batch_size <= planned:
        sizes.add(profile.batch_size)
    points = {}

    def add(size: int) -> GrownBatch:
        there, made = _planned(profile, size, schedule)
        kept = not (made.memory and made.memory.segments)
        points[there.batch_size] = GrownBatch(there.batch_size, kept, made, predict(there, network, made))
        return points[there.batch_size]

    for size in sorted(sizes - {0}):
        add(size)
    while whole > max((size for size, point in points.items() if point.kept), default=1):
        whole = add(_smaller(whole)).batch_size
    return [points[size] for size in sorted(points)]


def _planned(profile: Profile, size: int, schedule: Callable[[Profile], Plan]) -> tuple[Profile, Plan]:
    """The largest batch up to `size` that can be planned: residuals and scratch may take more than gradients do."""
    while True:
        there = at_batch(profile, size)
        try:
            return there, schedule(there)
        except InputError:
            if size == 1:
                raise
            size = _smaller(size)


def _chain(profile: Profile, workers: int | None) -> BlockChain:
    return BlockChain(profile, ResidentMemory.of(profile, workers=workers))


def _smaller(size: int) -> int:
    return max(whole_steps(size * _RETREAT), 1)
