"""What a user may choose about compressed groups beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backbeat.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """How compressed groups are trained with; the plan says which groups are compressed and how."""

    momentum_correction: bool = False
    """Keep the momentum of an attached SGD per rank, before the selection, in place of the optimizer's own."""
    factor_masking: bool = False
    """With momentum correction, a place that is sent loses its velocity, as DGC does at densities of 0.1 %, so that old
    momentum does not go on pushing. Where a place is sent every few steps it takes most of the momentum away."""
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
    """The options, from a mapping too; a name that is none of them is refused."""
    if given is None:
        return CompressionOptions()
    if isinstance(given, CompressionOptions):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"sparse is {given!r}: it must be a dict or backbeat.runtime.compressed.Options")
    known = [field.name for field in fields(CompressionOptions)]
    for name in given:
        if name not in known:
            raise InputError(f"sparse has {name!r}: it must be one of {', '.join(known)}")
    return CompressionOptions(**given)
