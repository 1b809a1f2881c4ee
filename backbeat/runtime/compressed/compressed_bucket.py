"""The memory of a compressed bucket: a residual that gradients are added to, and no gradient buffer.

The residual is accumulator and residual in one. What a gradient brings is added to it, and the gradient's own memory is
free again; what the compressor sends is subtracted. It is never anybody's `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from backbeat.errors import InputError
from backbeat.runtime.compressed import topk
from backbeat.runtime.compressed.message_format import format_of
from backbeat.runtime.compressed.residual import (
    Owed,
    Residual,
    Scratch,
    Store,
    accumulate,
    add_all,
    added,
    begin_step,
    drop_infinite,
)
from backbeat.runtime.compressed.topk import TopK
from backbeat.runtime.reduce.bucket import BucketMemory, addresses_of, views_of
from backbeat.runtime.reduce.partition import BucketSpec
from backbeat.runtime.reduce.step import Step, TakenGradients


class CompressedBucket(BucketMemory):
    """One bucket. Its message goes this way in each step:

    idle ──begin──► in flight (`work`, `result`) ──collective_done──► `gathered` ──decode or expose──► idle

    `give_back` breaks it off: the residual gets its elements back, and what the collective still brings is not used.
    """

    compressed = True

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Parameter],
        *,
        compressor: TopK,
        store: Store,
        dense: bool,
        momentum_of: Callable[[Any], tuple[float, float]] | None,
        gathering: Scratch,
    ) -> None:
        """store: keeps the residual. dense: the decoded mean gets a buffer of its own, to be `.grad`.
        momentum_of: where the store keeps a velocity, a parameter's momentum and weight decay."""
        super().__init__(spec, parameters)
        # Members keep these slices of every buffer, whatever memory format they are given later.
        self._slices = [
            torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            for parameter in self.parameters
        ]
        self.dtype = store.dtype
        held = self.numel if dense else 0
        self.payload = torch.zeros(held, dtype=self.parameters[0].dtype, device=self.device)
        self._dense = dense
        self._make_gradient_views()
        self.compressor = compressor
        self.store = store
        self.momentum_of = momentum_of
        self._views: tuple[Residual, list[torch.Tensor], list[torch.Tensor]] | None = None
        self._positions = {index: position for position, index in enumerate(self.members)}
        self._everyone = range(len(self.members))
        self._has_empty_members = any(not parameter.numel() for parameter in self.parameters)
        self._refused: list[int] = []
        """Indices of parameters whose gradients were not finite, and so were not added."""
        self._starts: tuple[torch.Tensor, torch.Tensor] | None = None
        """Where members begin in the residual, and the numbers that stand for them."""
        self._gathered = gathering
        gathering.reserve(self.numel, self.dtype)
        self._known_views: dict[int, list[torch.Tensor]] = {}
        self._sends_zeros = False
        self.touched = bytearray(len(self.members))
        """Members that any rank has ever used, or whose residual has got anything."""
        self.frozen: dict[int, Owed] = {}
        """Residual and velocity of members that were frozen since."""
        self.complete = False
        """In this step, every member arrived before the bucket left."""
        self.work: Any = None
        """The collective under way."""
        self.result: torch.Tensor | None = None
        """Where it writes everybody's message."""
        self._will_be_used = False
        """These will be used."""
        self.gathered: torch.Tensor | None = None
        """These once all are there, until the mean is written."""
        self._scale = 1.0

    def _make_gradient_views(self) -> None:
        """Where the decoded mean of each member is looked at as `.grad`."""
        self._slots = views_of(self.payload, self._slices) if self._dense else []
        self._addresses = addresses_of(self._slots)

    @property
    def bytes(self) -> int:
        return format_of(self.numel, self.compressor.density).bytes

    def take_all(self) -> bool:
        if self.frozen:
            return False
        gradients: list[torch.Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is None:
                return False
            gradients.append(parameter.grad)
        self._add(self._everyone, gradients, moving=self._everyone)
        self.complete = True
        return True

    def pack(self, step: Step) -> TakenGradients:
        self.complete = False
        self._sends_zeros = step.contributes_nothing
        if self._sends_zeros:
            for parameter in self.parameters:
                parameter.grad = None
            return TakenGradients()
        arrived = step.arrivals.arrived_since_reduce
        unused_grads: dict[int, torch.Tensor] = {}
        removed = False
        positions, gradients, moving = [], [], []
        for position, (index, parameter) in enumerate(zip(self.members, self.parameters, strict=True)):
            if parameter.requires_grad and position in self.frozen:
                self.add_owed(index, *self.frozen.pop(position))
            gradient = parameter.grad
            # Touched, it gets a gradient in any case: what it holds of the step before must be in it.
            gets = self.touched[position] and parameter.requires_grad
            if gets or (gradient is not None and arrived[index]):
                moving.append(position)
            if gradient is None:
                # A hook of the user's took it away after it had arrived.
                removed = removed or bool(arrived[index])
            elif arrived[index] or gets:
                positions.append(position)
                gradients.append(gradient)
            else:
                ours = bool(self._slots) and gradient is self._slots[position]
                unused_grads[index] = gradient.clone() if ours else gradient
                parameter.grad = None
        self._add(positions, gradients, moving=moving)
        for position, parameter in enumerate(self.parameters):
            if not parameter.requires_grad and self.touched[position]:
                self._freeze(position)
        used = [index for position, index in enumerate(self.members) if self.touched[position]]
        return TakenGradients(used, unused_grads, removed)

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
        residual, values, velocities = self._open_residual()
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

    def begin(self, *, scale: float, density: float) -> torch.Tensor:
        """Encode; returns the message, which all ranks gather."""
        if self._sends_zeros:
            values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        else:
            values = self._open_residual()[0].values
        self._sends_zeros = False
        self._scale = scale
        message = self.compressor.encode(values, density)
        self._will_be_used = True
        self._close_residual()
        return message

    def collective_done(self) -> None:
        """The collective under way is done."""
        if self._will_be_used:
            self.gathered = self.result
        self._will_be_used = False
        self.result = self.work = None

    def take_refused(self) -> list[int]:
        """Indices of parameters with gradients that were not finite since the last time."""
        found, self._refused = self._refused, []
        return found

    def fault(self) -> torch.Tensor | None:
        """One more than the index of a parameter whose residual was not finite when it was selected from, or 0; on the
        device. None before the first message."""
        position = self.compressor.fault
        if position is None:
            return None
        if self._starts is None:
            begins = torch.tensor([0, *(one.numel() for one in self.parameters[:-1])], device=self.device).cumsum(0)
            numbers = torch.tensor([0.0, *(index + 1.0 for index in self.members)], device=self.device)
            self._starts = (begins.to(position.dtype), numbers)
        starts, numbers = self._starts
        # The last start that is not beyond it: of members without elements, the one after them.
        return numbers.index_select(0, torch.searchsorted(starts, position, right=True))

    def clean(self) -> None:
        """Drop what is not finite."""
        self._open_residual()[0].clean()
        self._close_residual()

    def decode(self) -> None:
        """Write the mean where `.grad` will look at it."""
        if self.gathered is None:
            return
        if self.payload.dtype == self.dtype:
            self.compressor.decode(self.gathered, self.payload, self._scale)
        else:
            wide = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.compressor.decode(self.gathered, wide, self._scale)
            self.payload.copy_(wide)
        self.gathered = None

    def expose(self, scratch: torch.Tensor, used: Sequence[bool] | None) -> list[Parameter]:
        """Write the mean into shared memory, as `.grad` of the members used; returns these."""
        if self.gathered is None:
            return []
        flat = scratch[: self.numel]
        self.compressor.decode(self.gathered, flat, self._scale)
        self.gathered = None
        alike = self.parameters[0].dtype == self.dtype
        views = self._views_on(flat) if alike else views_of(flat.to(self.parameters[0].dtype), self._slices)
        found = []
        for index, parameter, view in zip(self.members, self.parameters, views, strict=True):
            if used is None or used[index]:
                parameter.grad = view
                found.append(parameter)
        if used is not None and self.momentum_of is not None:
            self._follow(used)
        return found

    def _follow(self, used: Sequence[bool]) -> None:
        """Velocities add up to momentum over ranks: what any rank uses moves on all, here from this step on."""
        joining = [
            position
            for position, (index, parameter) in enumerate(zip(self.members, self.parameters, strict=True))
            if used[index] and parameter.requires_grad and not self.touched[position]
        ]
        for position in joining:
            self.touched[position] = 1
        self._add((), [], moving=joining)
        self._close_residual()

    def give_back(self) -> None:
        """Put back what this step took."""
        if self._views is None or self.store.stays:
            self.compressor.give_back(self._open_residual()[0].values)
            self._close_residual()
        self._will_be_used = False
        self.gathered = None

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

    def hand_back(self, used: Sequence[bool] | None, unused_grads: Mapping[int, torch.Tensor]) -> None:
        if addresses_of(self._slots) != self._addresses:
            # Somebody gave a gradient other memory (`p.grad.data = …`).
            self._make_gradient_views()
        for position, (index, parameter) in enumerate(zip(self.members, self.parameters, strict=True)):
            if used is None or used[index]:
                parameter.grad = self._slots[position]
                self.touched[position] = parameter.requires_grad
            else:
                parameter.grad = unused_grads.get(index)


def _at(tensors: list[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
    return tensors if len(positions) == len(tensors) else [tensors[position] for position in positions]
