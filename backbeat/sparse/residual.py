"""One flat buffer a group that is accumulator and residual, with a velocity beside it for momentum correction."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dtype_for(dtype: torch.dtype) -> torch.dtype:
    """16-bit gradients are accumulated in fp32: small ones would be lost beside what has gathered."""
    return torch.float32 if dtype.itemsize < 4 else dtype


class Residual:
    """What a rank has not sent yet. Never anybody's `.grad`; unscaled; always finite."""

    def __init__(self, values: torch.Tensor, velocity: torch.Tensor | None = None, *, masked: bool = False) -> None:
        self.values = values
        self.velocity = velocity
        self.masked = masked
        """The velocity of a place that is sent starts anew (factor masking)."""

    def take(self, index: torch.Tensor, sent: torch.Tensor) -> None:
        """Subtract what is sent; what rounding kept back stays. Repeated places must be sent with zero."""
        self.values.index_add_(0, index, sent.to(self.values.dtype).neg())
        if self.velocity is not None and self.masked:
            held = self.velocity[index]
            self.velocity.index_add_(0, index, torch.where(sent != 0, held, 0).neg())

    def put(self, index: torch.Tensor, sent: torch.Tensor) -> None:
        """Add something back."""
        self.values.index_add_(0, index, sent.to(self.values.dtype))


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


def accumulate(targets: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add gradients to their places, leaving out what is not finite; returns, on the device, which gradients had such.

    On the host a gradient that is not finite is left out whole; on a device, which must not wait to be asked, its
    elements that are not finite are.
    """
    faulty = torch.stack(list(torch._foreach_norm(list(gradients), float("inf")))).isfinite().logical_not_()
    if faulty.device.type == "cpu":
        if bool(faulty.any()):
            kept = [place for place, bad in enumerate(faulty.tolist()) if not bad]
            targets, gradients = [targets[place] for place in kept], [gradients[place] for place in kept]
        if targets:
            torch._foreach_add_(list(targets), _alike(targets, gradients))
        return faulty
    clean = [gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for gradient in gradients]
    torch._foreach_add_(list(targets), _alike(targets, clean))
    return faulty


def _alike(targets: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [g if g.dtype == t.dtype else g.to(t.dtype) for t, g in zip(targets, gradients, strict=True)]
