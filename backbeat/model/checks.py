"""What the types of fields say, checked in Python as in files; and rules that types alone cannot say.

Each raises an `InputError` with the field, the value and what to do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import cache
from numbers import Integral
from typing import Annotated, Any, NoReturn, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta
from msgspec.structs import fields, force_setattr

from backbeat.errors import InputError

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]

_MOST = 1e18
"""Seconds or bytes beyond this are a slip, and their sums and products could overflow."""


class Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a file. Made in Python it obeys the types of its fields as it does when read: numbers lie in the range
    of their `Meta`, sequences are tuples and as long as theirs says. As there, defaults are not checked."""

    def __post_init__(self) -> None:
        numbers, sequences = _rules(type(self))
        for name, default, least, most, meta in numbers:
            value = getattr(self, name)
            if value is not None and not least <= value <= most and value != default:
                _refuse(name, value, meta)
        for name, default, shortest, items in sequences:
            values = getattr(self, name)
            if values is None:
                continue
            if type(values) is not tuple:
                values = tuple(values)
                force_setattr(self, name, values)
            if len(values) < shortest and values != default:
                count = f"has {len(values)}" if values else "is empty"
                raise InputError(f"{name} {count}: it holds {shortest} or more; add to it, or leave out what it is in")
            if items is not None:
                least, most = _bounds(items)
                for index, value in enumerate(values):
                    if not least <= value <= most:
                        _refuse(f"{name}[{index}]", value, items)


@cache
def _rules(
    kind: type[Checked],
) -> tuple[list[tuple[str, Any, float, float, Meta]], list[tuple[str, Any, int, Meta | None]]]:
    """Numbers: (field, default, least, most, meta). Sequences: (field, default, shortest, the range of its items where
    they are numbers)."""
    numbers, sequences = [], []
    for field in fields(kind):
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        bare, meta = _without_meta(field.type)
        if get_origin(bare) is tuple:
            shortest = meta.min_length or 0 if meta is not None else 0
            sequences.append((field.name, default, shortest, _without_meta(get_args(bare)[0])[1]))
        elif meta is not None:
            numbers.append((field.name, default, *_bounds(meta), meta))
    return numbers, sequences


def _without_meta(annotation: Any) -> tuple[Any, Meta | None]:
    """`Annotated[type, meta]`, or that or None, as the type and the meta."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation):
        return _without_meta(parts[0])
    return (parts[0], parts[1]) if get_origin(annotation) is Annotated else (annotation, None)


def _bounds(meta: Meta) -> tuple[float, float]:
    """The least and the most that a number may be."""
    least = meta.ge if meta.gt is None else math.nextafter(meta.gt, math.inf)
    most = meta.le if meta.le is not None else _MOST if meta.ge == 0 else sys.float_info.max
    assert least is not None, meta
    return least, most


def _refuse(where: str, value: float, meta: Meta) -> NoReturn:
    if value != value or abs(value) == math.inf:
        rule = "be a finite number; measure it again"
    elif value > _MOST and meta.ge == 0:
        rule = f"be {_MOST:.0e} or less; check its unit"
    elif value < 0 == meta.ge:
        rule = "not be negative; measure it again"
    else:
        least = f"be above {meta.gt}" if meta.gt is not None else f"be {meta.ge} or more"
        rule = least if meta.le is None else f"{least} and at most {meta.le}"
    raise InputError(f"{where} is {value}: it must {rule}")


def not_negative(where: str, value: float) -> None:
    """The value is finite, zero or more, and small enough to calculate with."""
    if not 0 <= value <= _MOST:
        _refuse(where, value, Meta(ge=0))


def whole(where: str, value: Any) -> int:
    """A whole number, numpy's too."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{where} is {value!r}: it must be a whole number")
    return int(value)


def at_least(where: str, value: int, least: int) -> None:
    if whole(where, value) < least:
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
