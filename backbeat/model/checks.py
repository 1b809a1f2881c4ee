"""Rules that the types alone cannot say. Each raises an `InputError` with the place, the value and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from backbeat.errors import InputError


def not_negative(place: str, value: float | None, *, advice: str = "measure it again") -> None:
    """The value is finite and zero or more (or absent)."""
    if value is None:
        return
    if not math.isfinite(value):
        raise InputError(f"{place} is {value}: it must be a finite number; {advice}")
    if value < 0:
        raise InputError(f"{place} is {value}: it must not be negative; {advice}")


def at_least(place: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{place} is {value}: it must be {least} or more")


def unique(place: str, names: Iterable[str], *, advice: str) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(f"{place}[{index}] repeats {name!r}, already at {place}[{seen[name]}]: {advice}")
        seen[name] = index
