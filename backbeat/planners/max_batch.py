"""How far the batch can grow within device memory."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from backbeat.model import Profile
from backbeat.model.batches import at_batch, same_blocks

_STEP = 8
"""Larger batches are multiples of this, as devices like them."""
_MOST = 2**20
"""Times the profile's own batch: where memory hardly depends on the batch, the search ends here."""


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
    return max(whole_steps(low), profile.batch_size if profile.batch_size <= low else 0)


def with_blocks(profile: Profile) -> Profile:
    """The profile with those of its batch sizes of which memory is known: by the same blocks."""
    known = (row for row in profile.batches if row.memory and row.blocks and same_blocks(profile, row))
    return replace(profile, batches=tuple(known))


def largest_looked_at(profile: Profile) -> int:
    """The batch at which the search ends, whether or not a larger one would fit."""
    return whole_steps(_MOST * profile.batch_size)


def whole_steps(size: float) -> int:
    """A batch size rounded down, as devices like them."""
    return int(size) if size < 4 * _STEP else int(size) // _STEP * _STEP
