"""How far the batch can grow within a memory budget, keeping everything and with a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.batches import at_batch, same_blocks
from backbeat.model.blocks import BlockRanges
from backbeat.model.resident import ResidentMemory
from backbeat.planners.memory_moves import uniform
from backbeat.planners.memory_plan import MemorySearch, reserve_for, too_small, usable
from backbeat.steps.memory_timeline import Chain
from backbeat.steps.predict import predict

_STEP = 8
"""Larger batches are multiples of this, as devices like them."""
_MOST = 2**20
"""Times the profile's own batch: where memory hardly depends on the batch, the search ends here."""
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


def largest_batch(profile: Profile, room: int, peak: Callable[[Profile], int]) -> int:
    """The largest batch whose peak is within so many bytes; 0 where not even one sample is.

    >>> profile = Profile.load("resnet50-b64-bf16-h200")
    >>> largest_batch(profile, 10**9, lambda there: 10**7 * there.batch_size)
    96
    """

    def taken(size: int) -> int:
        return peak(at_batch(profile, size))

    low, high = 1, largest_looked_at(profile)
    least, most = taken(low), taken(high)
    if least > room:
        return 0
    if most <= room:
        return high
    while high - low > 1:
        # A peak is all but straight, so a line between the two leads near to where it passes the limit.
        middle = low + (room - least) * (high - low) // (most - least)
        middle = min(max(middle, low + 1), high - 1)
        found = taken(middle)
        if found <= room:
            low, least = middle, found
        else:
            high, most = middle, found
    # The profile's own is one that somebody runs.
    return max(_round(low), profile.batch_size if profile.batch_size <= low else 0)


def with_blocks(profile: Profile) -> Profile:
    """The profile with those of its batch sizes of which memory is known: by the same blocks."""
    known = (row for row in profile.batches if row.memory and row.blocks and same_blocks(profile, row))
    return replace(profile, batches=tuple(known))


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


def largest_looked_at(profile: Profile) -> int:
    """The batch at which the search ends, whether or not a larger one would fit."""
    return _round(_MOST * profile.batch_size)


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
    sizes = {whole, planned, *(_round(whole + share * (planned - whole)) for share in _BETWEEN)}
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


def _chain(profile: Profile, workers: int | None) -> Chain:
    return Chain(profile, ResidentMemory.of(profile, workers=workers))


def _smaller(size: int) -> int:
    return max(_round(size * _RETREAT), 1)


def _round(size: float) -> int:
    return int(size) if size < 4 * _STEP else int(size) // _STEP * _STEP
