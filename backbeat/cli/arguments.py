"""What verbs were given, read: numbers, sizes, lists and networks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from backbeat.errors import InputError, MissingPartError

_FEWEST_BYTES = 2**16
"""Sizes below this are believed only with a unit."""


def communicator_counts(text: str, most: int) -> list[int]:
    """
    >>> communicator_counts("4,1, 2", most=8)
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise InputError(f"--communicators is {text!r}: write numbers from 1 to {most}, like 1,2")
    return sorted({int(part) for part in parts})


def split(values: list[str] | None) -> list[str]:
    """`--way a,b --way c` as one list."""
    found = [part.strip() for value in values or () for part in value.split(",") if part.strip()]
    if values and not found:
        raise InputError(f"the list {','.join(values)!r} names nothing: give names like a,b or leave the option out")
    return found


def refuse(options: Mapping[str, bool], why: str) -> None:
    """Raise for the first of these options that was given."""
    for option, given in options.items():
        if given:
            raise InputError(f"{option} {why}")


def need_torch(verb: str) -> None:
    if find_spec("torch") is None:
        raise MissingPartError(f"`backbeat {verb}` needs PyTorch: pip install -e '.[torch]' in the checkout")
