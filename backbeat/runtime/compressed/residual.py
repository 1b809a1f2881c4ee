"""One flat buffer a group that is accumulator and residual, with a velocity beside it for momentum correction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def dtype_for(dtype: torch.dtype) -> torch.dtype:
    """16-bit gradients are accumulated in fp32: small ones would be lost beside what has gathered."""
    return torch.float32 if dtype.itemsize < 4 else dtype


class Residual:
    """What a rank has not sent yet. Never anybody's `.grad`; unscaled; finite, but for a step that is found to fail."""

    def __init__(self, values: torch.Tensor, velocity: torch.Tensor | None = None, *, masked: bool = False) -> None:
        self.values = values
        self.velocity = velocity
        self.masked = masked
        """The velocity of a place that is sent starts anew (factor masking)."""

    def replace(self, index: torch.Tensor, values: torch.Tensor, spent: torch.Tensor) -> None:
        """Leave these values at places that do not repeat; the velocity of those `spent` starts anew, if it is to."""
        self.values.index_copy_(0, index, values)
        if self.velocity is not None and self.masked:
            self.velocity.index_copy_(0, index, self.velocity[index].masked_fill_(spent, 0))

    def clean(self) -> None:
        """Drop what is not finite."""
        for one in (self.values, self.velocity):
            if one is not None:
                drop_infinite(one)

    def put(self, index: torch.Tensor, sent: torch.Tensor) -> None:
        """Add something back."""
        self.values.index_add_(0, index, sent.to(self.values.dtype))


class Scratch:
    """Memory for the largest of several groups, which they use in turn."""

    def __init__(self) -> None:
        self._sizes: dict[torch.dtype, int] = {}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def want(self, numel: int, dtype: torch.dtype) -> None:
        """A group of this size will ask."""
        self._sizes[dtype] = max(numel, self._sizes.get(dtype, 0))

    def lend(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = self._buffers.get(dtype)
        if found is None or found.numel() < self._sizes[dtype]:
            found = self._buffers[dtype] = torch.empty(self._sizes[dtype], dtype=dtype, device=device)
        return found


class Store:
    """Where a group's residual is between its turns: here, on the device."""

    stays = True
    """It is there at any time."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, velocity: bool, masked: bool = False
    ) -> None:
        self._residual = Residual(
            torch.zeros(numel, dtype=dtype, device=device),
            torch.zeros(numel, dtype=dtype, device=device) if velocity else None,
            masked=masked,
        )

    def open(self) -> Residual:
        """The residual, to read and write until it is closed."""
        return self._residual

    def close(self) -> None:
        """Its turn is over."""


def accumulate(targets: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[bool]:
    """On the host: add gradients to their places, but none that is not finite; returns which were not."""
    # One fast pass each; NaN comes through as both ends.
    ends = [torch.stack(torch.aminmax(gradient)) if gradient.numel() else torch.zeros(2) for gradient in gradients]
    faulty = [not math.isfinite(low) or not math.isfinite(high) for low, high in (end.tolist() for end in ends)]
    kept = [place for place, bad in enumerate(faulty) if not bad]
    if kept:
        alike = [gradients[place].to(targets[place].dtype) for place in kept]
        torch._foreach_add_([targets[place] for place in kept], alike)
    return faulty


def drop_infinite(values: torch.Tensor) -> None:
    """Make zero what is not finite."""
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def add_all(
    flat: torch.Tensor,
    targets: list[torch.Tensor],
    gradients: list[torch.Tensor],
    room: tuple[torch.Tensor, list[torch.Tensor]] | None = None,
) -> None:
    """Add gradients to their places in a flat tensor, finite or not. Few launches, however many gradients there are.
    `room`, flat and cut into places, for gradients of another format: they are widened there, since torch adds lists of
    unlike formats one by one."""
    if room is None:
        torch._foreach_add_(targets, gradients)
    else:
        whole, places = room
        torch._foreach_copy_(places, gradients)
        flat.add_(whole)
