"""Measurements that are compared with each other: taken in turns, and again where they contradict each other.

What disturbs a machine for a while is then not taken for what a larger batch or a layer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from backbeat.errors import MeasurementError
from backbeat.measure.model.noise import MEASURED_TURNS, WHAT_TO_DO, agree, from_to
from backbeat.model import Profile
from backbeat.model.batches import measured

_AS_QUICK = 1.05
"""A larger batch may come out this much quicker than a smaller one: where the host sets the pace, both take as long."""


def in_turns(
    sides: Mapping[str, Callable[[], Profile]],
    whole: Callable[[Sequence[Profile]], Profile],
    *,
    accept: bool = False,
) -> Profile:
    """What the quickest measurement of each side makes together.

    All are measured again where these contradict each other, and until each has come out alike twice. What does not is
    refused, unless one accepts that; a larger batch that is quicker, each time, gets a note.
    """
    taken: dict[str, list[Profile]] = {side: [] for side in sides}
    alike = accept
    for _ in range(MEASURED_TURNS):
        for side, take in sides.items():
            taken[side].append(take())
        seconds = {side: sorted(one.single_s for one in found) for side, found in taken.items()}
        alike = accept or all(map(agree, seconds.values()))
        made = against = None
        try:
            made = whole([min(found, key=lambda one: one.single_s) for found in taken.values()])
            against = _quicker_with_more(made)
        except MeasurementError as error:
            against = str(error)
        if against is None and alike:
            break
    turns = max(map(len, taken.values()))
    spread = "; ".join(f"{side} {from_to(found)}" for side, found in seconds.items())
    repeated = f"the quickest of {turns} measurements of each: {spread}"
    if made is None:
        raise MeasurementError(f"{against} ({repeated})")
    if not alike:
        raise MeasurementError(f"the machine was busy: of {turns} measurements no two agree: {spread}; {WHAT_TO_DO}")
    if turns == 1:
        return made
    return replace(made, notes=(*made.notes, repeated if against is None else f"{against}; {repeated}"))


def _quicker_with_more(profile: Profile) -> str | None:
    """A batch that takes less than a smaller one."""
    for one, two in pairwise(measured(profile)):
        if two.single_s < one.single_s / _AS_QUICK:
            return f"batch {two.batch_size} takes less than batch {one.batch_size}"
    return None
