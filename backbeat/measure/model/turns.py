"""Measurements that are compared with each other: taken in turns, and again where they contradict each other.

What disturbs a machine for a while is then not taken for what a larger batch or a layer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from backbeat.errors import MeasurementError
from backbeat.measure.model.noise import MEASURED_TURNS, from_to
from backbeat.model import Profile
from backbeat.model.batches import measured

_AS_QUICK = 1.05
"""A larger batch may come out this much quicker than a smaller one: where the host sets the pace, both take as long."""


def in_turns(sides: Mapping[str, Callable[[], Profile]], whole: Callable[[Sequence[Profile]], Profile]) -> Profile:
    """What the quickest measurement of each side makes together; all are measured again where these contradict each
    other, which ends in an error, or in a note where it is a larger batch that was quicker."""
    taken: dict[str, list[Profile]] = {side: [] for side in sides}
    for _ in range(MEASURED_TURNS):
        for side, take in sides.items():
            taken[side].append(take())
        made = against = None
        try:
            made = whole([min(found, key=lambda one: one.single_s) for found in taken.values()])
            against = _quicker_with_more(made)
        except MeasurementError as error:
            against = str(error)
        if against is None:
            break
    turns = max(map(len, taken.values()))
    spread = "; ".join(f"{side} {from_to([one.single_s for one in found])}" for side, found in taken.items())
    repeated = f"the quickest of {turns} measurements of each: {spread}"
    if made is None:
        raise MeasurementError(f"{against} ({repeated})")
    if turns == 1:
        return made
    return replace(made, notes=(*made.notes, repeated if against is None else f"{against}; {repeated}"))


def _quicker_with_more(profile: Profile) -> str | None:
    """A batch that takes less than a smaller one."""
    for one, two in pairwise(measured(profile)):
        if two.single_s < one.single_s / _AS_QUICK:
            return f"batch {two.batch_size} takes less than batch {one.batch_size}"
    return None
