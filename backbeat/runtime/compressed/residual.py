"""Residuals: what a rank has accumulated for a bucket and not sent yet.

The residual is accumulator and residual in one. What a gradient brings is added to it, and the gradient's own memory is
free again; what the compressor sends is subtracted. It is never anybody's `.grad`. Momentum correction adds a velocity
of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from backbeat.errors import InputError
from backbeat.runtime.compressed import topk
from backbeat.runtime.compressed.stores import Residual, Scratch, Store, drop_infinite
from backbeat.runtime.reduce.bucket import BucketMemory, views_of
from backbeat.runtime.reduce.partition import BucketSpec

Owed = tuple[torch.Tensor, torch.Tensor | None]
"""The residual and velocity of one parameter, shaped like it."""


class ResidualMemory(BucketMemory):
    """A bucket whose gradients are added to a residual."""

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Parameter],
        *,
        store: Store,
        momentum_of: Callable[[Any], tuple[float, float]] | None,
        gathering: Scratch,
    ) -> None:
        """store: keeps the residual. momentum_of: where it keeps a velocity, a parameter's momentum and weight
        decay."""
        super().__init__(spec, parameters)
        # Members keep these slices of every buffer, whatever memory format they are given later.
        self._slices = [
            torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            for parameter in self.parameters
        ]
        self.dtype = store.dtype
        self.store = store
        self.momentum_of = momentum_of
        self._views: tuple[Residual, list[torch.Tensor], list[torch.Tensor]] | None = None
        """The residual while it is open, and the members' slices of it and of the velocity."""
        self._positions = {index: position for position, index in enumerate(self.members)}
        self._has_empty_members = any(not parameter.numel() for parameter in self.parameters)
        self._refused: list[int] = []
        """Indices of parameters whose gradients were not finite, and so were not added."""
        self._gathered = gathering
        gathering.reserve(self.numel, self.dtype)
        self._known_views: dict[int, list[torch.Tensor]] = {}
        self.touched = bytearray(len(self.members))
        """Members that any rank has ever used, or whose residual has got anything."""
        self.frozen: dict[int, Owed] = {}
        """Residual and velocity of members that were frozen since."""

    def _add(self, positions: Sequence[int], gradients: list[torch.Tensor], moving: Sequence[int] = ()) -> None:
        """Add these members' gradients to the residual, and take them away.

        Where there is a velocity, `moving` members take a step of theirs: momentum, weight decay and the gradient, and
        then the residual gets the velocity. Once a step: what comes late is added to both as it is.
        """
        for position, gradient in zip(positions, gradients, strict=True):
            if gradient.layout is not torch.strided:
                raise InputError(
                    f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}, and its bucket is compressed: "
                    "make it dense (sparse=False), or leave the compression out of its bucket"
                )
            self.parameters[position].grad = None
            self.touched[position] = 1
        if self._has_empty_members:
            # Torch finds no largest among no elements.
            positions, moving = (
                [position for position in chosen if self.parameters[position].numel()] for chosen in (positions, moving)
            )
            gradients = [gradient for gradient in gradients if gradient.numel()]
        momentum_of, moving = self.momentum_of, moving if self.momentum_of is not None else ()
        if not gradients and not moving:
            return
        residual, values, velocities = self._views or self._open_residual()
        if momentum_of is not None and moving:
            momenta = [momentum_of(self.parameters[position]) for position in moving]
            decays = any(decay for _, decay in momenta) and self.parameters[0].dtype != self.dtype
            room = _at(self._views_on(self._room()), moving) if decays else None
            begin_step(_at(velocities, moving), [self.parameters[at].detach() for at in moving], momenta, room)
        if residual.velocity is not None:
            self._add_to(residual.velocity, velocities, positions, gradients)
        if moving:
            torch._foreach_add_(_at(values, moving), _at(velocities, moving))
        else:
            self._add_to(residual.values, values, positions, gradients)

    def _add_to(
        self, flat: torch.Tensor, views: list[torch.Tensor], positions: Sequence[int], gradients: list[torch.Tensor]
    ) -> None:
        """Add gradients of these members to their views of the residual or the velocity."""
        if not gradients:
            return
        targets = _at(views, positions)
        if self.device.type in topk.HOSTS:
            faulty = accumulate(targets, gradients)
            self._refused += [self.members[index] for index, bad in zip(positions, faulty, strict=True) if bad]
            return
        widened = None
        if any(gradient.dtype != self.dtype for gradient in gradients):
            room = self._room()
            if len(gradients) < len(self.members):
                room.zero_()
            widened = (room, _at(self._views_on(room), positions))
        add_all(flat, targets, gradients, widened)

    def _freeze(self, position: int) -> None:
        """A weight that must not move: what it is owed waits outside the bucket."""
        _, values, velocities = self._open_residual()
        velocity = velocities[position].clone() if velocities else None
        self.frozen[position] = added((values[position].clone(), velocity), self.frozen.get(position))
        values[position].zero_()
        if velocities:
            velocities[position].zero_()
        self.touched[position] = 0

    def keep_late(self, index: int) -> None:
        """Add a gradient that comes after the bucket has left: it goes with the next step."""
        position = self._positions[index]
        gradient = self.parameters[position].grad
        if gradient is not None:
            self._add([position], [gradient])
            self._close_residual()

    def owed(self) -> dict[int, Owed]:
        """What each member is owed, by its index."""
        opened = self._views is not None
        _, values, velocities = self._open_residual()
        found = {self.members[position]: owed for position, owed in self.frozen.items()}
        for position, index in enumerate(self.members):
            if self.touched[position]:
                copies = [one[position].clone() for one in (values, velocities) if one]
                for copy in copies:
                    drop_infinite(copy)
                # Frozen, it may have got a late gradient since.
                found[index] = added((copies[0], copies[1] if velocities else None), found.get(index))
        if not opened:
            self._close_residual()
        return found

    def add_owed(self, index: int, values: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Add to a member's residual and velocity."""
        position = self._positions[index]
        _, residuals, velocities = self._open_residual()
        residuals[position].add_(values.to(residuals[position]))
        if velocity is not None and velocities:
            velocities[position].add_(velocity.to(velocities[position]))
        self.touched[position] = 1
        self._close_residual()

    def clear(self) -> None:
        """Nothing is owed any more."""
        residual = self._open_residual()[0]
        residual.values.zero_()
        if residual.velocity is not None:
            residual.velocity.zero_()
        self._close_residual()
        self.touched = bytearray(len(self.members))
        self.frozen = {}

    def clean(self) -> None:
        """Drop what is not finite."""
        self._open_residual()[0].clean()
        self._close_residual()

    def _open_residual(self) -> tuple[Residual, list[torch.Tensor], list[torch.Tensor]]:
        if self._views is None:
            residual = self.store.open()
            values = views_of(residual.values, self._slices)
            velocities = [] if residual.velocity is None else views_of(residual.velocity, self._slices)
            self._views = (residual, values, velocities)
        return self._views

    def _close_residual(self) -> None:
        if self._views is not None and not self.store.stays:
            self.store.close()
            self._views = None

    def _room(self) -> torch.Tensor:
        """For all members in the residual's format, shared by buckets that take turns."""
        return self._gathered.buffer(self.dtype, self.device)[: self.numel]

    def _views_on(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members' slices of the memory that buckets share, which is mostly the same from step to step."""
        found = self._known_views.get(flat.data_ptr())
        if found is None:
            if len(self._known_views) > 1:
                self._known_views.clear()
            found = self._known_views[flat.data_ptr()] = views_of(flat, self._slices)
        return found


def accumulate(targets: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[bool]:
    """On a host: add each gradient to its target unless it has NaN or infinity; returns which had."""
    # One fast pass over each gradient; NaN comes through as both minimum and maximum.
    ends = [torch.stack(torch.aminmax(one)) if one.numel() else torch.zeros(2, device="cpu") for one in gradients]
    faulty = [not math.isfinite(low) or not math.isfinite(high) for low, high in (end.tolist() for end in ends)]
    finite = [position for position, bad in enumerate(faulty) if not bad]
    if finite:
        alike = [gradients[position].to(targets[position].dtype) for position in finite]
        torch._foreach_add_([targets[position] for position in finite], alike)
    return faulty


def add_all(
    flat: torch.Tensor,
    targets: list[torch.Tensor],
    gradients: list[torch.Tensor],
    widened: tuple[torch.Tensor, list[torch.Tensor]] | None = None,
) -> None:
    """On a device: add gradients, finite or not, to their targets, which are views of `flat`.

    The number of launches does not depend on the number of gradients. Torch adds lists of mixed dtypes one by one, so
    gradients of another dtype are first copied to `widened`: a buffer like `flat`, and its views.
    """
    if widened is None:
        torch._foreach_add_(targets, gradients)
    else:
        buffer, views = widened
        torch._foreach_copy_(views, gradients)
        flat.add_(buffer)


def begin_step(
    velocities: list[torch.Tensor],
    weights: list[torch.Tensor],
    momenta: Sequence[tuple[float, float]],
    room: list[torch.Tensor] | None,
) -> None:
    """What comes before a step's gradients: momentum, and the weight decay that enters it. `room` is for the weights
    where their format is not the velocities'."""
    torch._foreach_mul_(velocities, [momentum for momentum, _ in momenta])
    for decay in {decay for _, decay in momenta} - {0.0}:
        chosen = [index for index, (_, own) in enumerate(momenta) if own == decay]
        added = [weights[index] for index in chosen]
        if room is not None:
            widened = [room[index] for index in chosen]
            torch._foreach_copy_(widened, added)
            added = widened
        torch._foreach_add_([velocities[index] for index in chosen], added, alpha=decay)


def added(owed: Owed, more: Owed | None) -> Owed:
    """Both together."""
    if more is None:
        return owed
    velocity = None if owed[1] is None or more[1] is None else owed[1] + more[1]
    return owed[0] + more[0], velocity


def _at(tensors: list[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
    return tensors if len(positions) == len(tensors) else [tensors[position] for position in positions]
