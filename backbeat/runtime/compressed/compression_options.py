"""Options of training with compressed buckets. The plan says which buckets are compressed, and to what density."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backbeat.errors import InputError

WARMUP_DENSITY = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """How training treats compressed buckets."""

    momentum_correction: bool = False
    """Each rank keeps the momentum of an attached SGD itself and selects from it; the optimizer then applies none."""
    factor_masking: bool = False
    """With momentum correction, an element that is sent loses its velocity, so that old momentum stops pushing. DGC
    does so at densities of 0.1 %; where an element is sent every few steps it takes away most of the momentum."""
    warmup_steps: int = 0
    """Steps over which the density falls from 25 % to the plan's."""

    def __post_init__(self) -> None:
        for name in ("momentum_correction", "factor_masking"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if not isinstance(self.warmup_steps, int) or isinstance(self.warmup_steps, bool):
            raise InputError(f"warmup_steps is {self.warmup_steps!r}: it must be a whole number")
        if self.warmup_steps < 0:
            raise InputError(f"warmup_steps is {self.warmup_steps}: it must be 0 or more")


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


def density_at(step: int, target: float, warmup_steps: int) -> float:
    """The density of a step, counted from 1. In warm-up each stage has a quarter of the density before it, as in DGC.

    >>> [density_at(step, 0.01, 6) for step in (1, 2, 3, 4, 5, 6, 7)]
    [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01]
    """
    if step > warmup_steps or target >= WARMUP_DENSITY:
        return target
    stages = max(1, math.ceil(math.log(WARMUP_DENSITY / target, 4) - 1e-9))
    stage = (step - 1) * stages // warmup_steps
    return float(max(target, WARMUP_DENSITY / 4**stage))
