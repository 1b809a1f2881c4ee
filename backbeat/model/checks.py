"""Rules that the types alone cannot say. Each raises an `InputError` with the field, the value and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from backbeat.errors import InputError

_MOST = 1e18
"""Seconds or bytes beyond this are a slip, and their sums and products could overflow."""


def not_negative(where: str, value: float | None) -> None:
    """The value is finite, zero or more, and small enough to calculate with (or absent)."""
    if value is None:
        return
    if not math.isfinite(value):
        raise InputError(f"{where} is {value}: it must be a finite number; measure it again")
    if value < 0:
        raise InputError(f"{where} is {value}: it must not be negative; measure it again")
    if value > _MOST:
        raise InputError(f"{where} is {value}: it must be {_MOST:.0e} or less; check its unit")


def at_least(where: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{where} is {value}: it must be {least} or more")


def unique(where: str, names: Iterable[str], *, advice: str) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(f"{where}[{index}] repeats {name!r}, already at {where}[{seen[name]}]: {advice}")
        seen[name] = index


def named_once(where: str, lists: Iterable[Iterable[str]], rule: str) -> dict[str, int]:
    """No name is in these lists twice; for each, the index of its list."""
    seen: dict[str, int] = {}
    for index, names in enumerate(lists):
        for name in names:
            if name in seen:
                raise InputError(
                    f"{where}[{index}] names {name!r}, already in {where.rpartition('.')[2]}[{seen[name]}]: {rule}; "
                    "remove one of the two"
                )
            seen[name] = index
    return seen
