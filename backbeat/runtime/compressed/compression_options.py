"""What users may choose of how compressed buckets are trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backbeat.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """How training treats compressed buckets."""

    momentum_correction: bool = False
    """Each rank keeps the momentum of an attached SGD itself, weight decay in it, and selects from it; the optimizer
    then applies neither."""
    warmup_steps: int = 0
    """Steps over which the density falls from 25 % to the plan's."""

    def __post_init__(self) -> None:
        if not isinstance(self.momentum_correction, bool):
            raise InputError(f"momentum_correction is {self.momentum_correction!r}: it must be True or False")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise InputError(f"warmup_steps is {self.warmup_steps!r}: it must be a whole number, 0 or more")


def options_of(given: CompressionOptions | Mapping[str, Any] | None) -> CompressionOptions:
    """The options that a user gave, as an object, a mapping or not at all."""
    if given is None:
        return CompressionOptions()
    if isinstance(given, CompressionOptions):
        return given
    if not isinstance(given, Mapping):
        raise InputError(
            f"compression is {given!r}: it must be a dict or backbeat.runtime.compressed.CompressionOptions"
        )
    known = [field.name for field in fields(CompressionOptions)]
    for name in given:
        if name not in known:
            raise InputError(f"compression has {name!r}: it must be one of {', '.join(known)}")
    return CompressionOptions(**given)
