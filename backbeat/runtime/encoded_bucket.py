"""The memory of an encoded group: a residual that gradients are added to, and no gradient buffer.

The residual is accumulator and residual in one. What a gradient brings is added to it, and the gradient's own memory is
free again; what the compressor sends is subtracted. It is never anybody's `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError
from backbeat.runtime.buckets import Bucket, views_of
from backbeat.sparse.residual import Residual, Scratch, Store, accumulate, gather_finite

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.runtime.partition import GroupSpec
    from backbeat.runtime.rounds import Round
    from backbeat.sparse.exchange import Collective, Compressor, Exchange, Write


HOSTS = {"cpu"}
"""Kinds of device that may be asked at any time whether a gradient is finite."""


class EncodedBucket(Bucket):
    """One group. `store` keeps its residual; `dense`: the decoded mean gets a buffer of its own, to be `.grad`."""

    encoded = True

    def __init__(
        self,
        spec: GroupSpec,
        parameters: Sequence[Parameter],
        *,
        compressor: Compressor,
        store: Store,
        dtype: torch.dtype,
        sent_bytes: int,
        dense: bool,
        momentum_of: Callable[[Any], float] | None,
        gathering: Scratch,
    ) -> None:
        self.spec = spec
        self.members = spec.members
        self.parameters = [parameters[place] for place in spec.members]
        self.device = self.parameters[0].device
        self.sparse = False
        self.wire = None
        self.tail = 0
        self.views = []
        self.dtype = dtype
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        held = self.numel if dense else 0
        self.flat = self.payload = torch.zeros(held, dtype=self.parameters[0].dtype, device=self.device)
        self._slots = views_of(self.payload, self.parameters) if dense else []
        self.compressor = compressor
        self.store = store
        self._sent_bytes = sent_bytes
        self._momentum_of = momentum_of
        self._numbers = torch.tensor([place + 1 for place in self.members], dtype=torch.float32).to(self.device)
        self._number = self._numbers.split(1)
        self._views: tuple[Residual, list[torch.Tensor], list[torch.Tensor]] | None = None
        self._positions = {place: position for position, place in enumerate(self.members)}
        self._folded: set[int] = set()
        """Positions whose gradient was added as it came."""
        self._faults: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Largest magnitudes of gradients, not finite where these are not, and the numbers of their parameters."""
        self._gathered = gathering
        gathering.want(self.numel, dtype)
        self._slots_lent: tuple[int, list[torch.Tensor]] | None = None
        self._slots_shown: tuple[int, list[torch.Tensor]] | None = None
        self._muted = False
        self._exchange: Exchange | None = None
        self.touched = bytearray(len(self.members))
        """Members whose residual has ever got anything."""
        self.frozen: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Residual and velocity of members that were frozen since."""
        self.whole = False
        """In this round, every member arrived before the group left."""
        self.result: torch.Tensor | None = None
        """What the collective under way brings."""
        self.work: Any = None
        self.write: Write | None = None
        """Writes the mean, once everything has arrived; None when that is done or not yet possible."""
        self.sent_at = -1

    @property
    def bytes(self) -> int:
        return self._sent_bytes

    def take_all(self) -> bool:
        if self.frozen:
            return False
        gradients = [parameter.grad for parameter in self.parameters]
        for position, gradient in enumerate(gradients):
            if gradient is None and position not in self._folded:
                return False
        self._add(list(range(len(gradients))), gradients)
        self.whole = True
        return True

    def pack(self, round_: Round) -> None:
        self.whole = False
        self._muted = round_.absent or round_.broken
        if self._muted:
            for parameter in self.parameters:
                parameter.grad = None
            return
        arrived = []
        gradients = [parameter.grad for parameter in self.parameters]
        for position, (place, gradient) in enumerate(zip(self.members, gradients, strict=True)):
            if gradient is not None and round_.dirty[place]:
                arrived.append(position)
            elif gradient is not None:
                ours = bool(self._slots) and gradient is self._slots[position]
                round_.backups[place] = gradient.clone() if ours else gradient
                self.parameters[position].grad = None
        self._add(arrived, gradients)
        for position, (place, parameter) in enumerate(zip(self.members, self.parameters, strict=True)):
            if parameter.requires_grad and position in self.frozen:
                self.put(place, *self.frozen.pop(position))
            elif not parameter.requires_grad and self.touched[position]:
                self._freeze(position)
            if self.touched[position]:
                round_.used[place] = 1

    def _freeze(self, position: int) -> None:
        """A weight that must not move: what it is owed waits outside the group."""
        _, values, velocities = self._opened()
        velocity = velocities[position].clone() if velocities else None
        self.frozen[position] = (values[position].clone(), velocity)
        values[position].zero_()
        if velocities:
            velocities[position].zero_()
        self.touched[position] = 0

    def fold(self, place: int) -> None:
        """Add a gradient as it arrives, so that its memory is free at once."""
        position = self._positions[place]
        gradient = self.parameters[position].grad
        if gradient is not None:
            self._add([position], [self.parameters[p].grad for p in range(len(self.parameters))])
            self._folded.add(position)

    def _add(self, positions: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to the residual, through the velocity where there is one, and take them away."""
        places, sources = [], []
        for position in positions:
            gradient = gradients[position]
            self.touched[position] = 1
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise InputError(
                        f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}, and its group is encoded: "
                        "make it dense (sparse=False), or leave the encoding out of its group"
                    )
                places.append(position)
                sources.append(gradient)
                self.parameters[position].grad = None
        if not places:
            return
        residual, values, velocities = self._opened()
        if self._momentum_of is not None:
            momenta = [self._momentum_of(self.parameters[position]) for position in places]
            torch._foreach_mul_([velocities[position] for position in places], momenta)
        if self.device.type in HOSTS:
            targets = [(velocities or values)[position] for position in places]
            faulty = accumulate(targets, sources)
            number = max((self.members[p] + 1 for p, bad in zip(places, faulty, strict=True) if bad), default=0)
            if number:
                self._faults.append((torch.tensor([float("nan")]), torch.tensor([float(number)])))
        else:
            whole = len(places) == len(self.members)
            single = self._alone(places[0]) if len(places) == 1 else None
            flat, slots = single or self._gathering()
            chosen = slots if single is not None else [slots[position] for position in places]
            sizes = gather_finite(flat, chosen, sources, whole=whole or single is not None)
            # Cut and joined rather than indexed by a list, which the host would have to send.
            numbers = self._numbers if whole else torch.cat([self._number[position] for position in places])
            self._faults.append((sizes, numbers))
            target = residual.values if residual.velocity is None else residual.velocity
            (target if single is None else (velocities or values)[places[0]]).add_(flat)
        if velocities:
            torch._foreach_add_([values[p] for p in places], [velocities[p] for p in places])

    def _numbers_at(self, positions: Sequence[int]) -> torch.Tensor:
        """By slices: a list of places would be copied to the device, and the host would wait for it."""
        return torch.cat([self._numbers[position : position + 1] for position in positions])

    def _alone(self, position: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Room for one gradient."""
        slot = torch.empty_like(self._opened()[1][position])
        return slot, [slot]

    def _gathering(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Room for all gradients, lent by whoever has groups that take turns."""
        flat = self._gathered.lend(self.dtype, self.device)[: self.numel]
        if self._slots_lent is None or self._slots_lent[0] != flat.data_ptr():
            self._slots_lent = (flat.data_ptr(), views_of(flat, self.parameters))
        return flat, self._slots_lent[1]

    def _opened(self) -> tuple[Residual, list[torch.Tensor], list[torch.Tensor]]:
        if self._views is None:
            residual = self.store.open()
            values = views_of(residual.values, self.parameters)
            velocities = [] if residual.velocity is None else views_of(residual.velocity, self.parameters)
            self._views = (residual, values, velocities)
        return self._views

    def _closed(self) -> None:
        if self._views is not None and not self.store.stays:
            self.store.close()
            self._views = None

    def begin(self, *, step: int, scale: float, density: float | None) -> Collective:
        """Encode; returns the first collective."""
        if self._muted:
            residual = Residual(torch.zeros(self.numel, dtype=self.dtype, device=self.device))
        else:
            residual = self._opened()[0]
        self._folded.clear()
        self._muted = False
        self._exchange = self.compressor.exchange(residual, step=step, scale=scale, density=density)
        wanted = next(self._exchange)
        self._closed()
        return wanted

    def proceed(self) -> Collective | None:
        """Go on with what has arrived; returns the next collective, or None when `write` is there."""
        exchange, result = self._exchange, self.result
        self.result = self.work = None
        if exchange is None or result is None:
            return None
        try:
            return exchange.send(result)
        except StopIteration as done:
            self.write = done.value
            self._exchange = None
            return None

    def take_faults(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of gradients added since the last time: magnitudes, and the numbers, place + 1, of their parameters."""
        found, self._faults = self._faults, []
        return found

    def decode(self) -> None:
        """Write the mean where `.grad` will look at it."""
        if self.write is not None:
            if self.payload.dtype == self.dtype:
                self.write(self.payload)
            else:
                wide = torch.empty(self.numel, dtype=self.dtype, device=self.device)
                self.write(wide)
                self.payload.copy_(wide)
            self.write = None

    def expose(self, scratch: torch.Tensor, used: Sequence[bool] | None) -> list[Parameter]:
        """Write the mean into memory that is lent, as `.grad` of the members used; returns these."""
        if self.write is None:
            return []
        flat = scratch[: self.numel]
        self.write(flat)
        self.write = None
        if self.parameters[0].dtype != self.dtype:
            views = views_of(flat.to(self.parameters[0].dtype), self.parameters)
        else:
            if self._slots_shown is None or self._slots_shown[0] != flat.data_ptr():
                self._slots_shown = (flat.data_ptr(), views_of(flat, self.parameters))
            views = self._slots_shown[1]
        found = []
        for place, parameter, view in zip(self.members, self.parameters, views, strict=True):
            if used is None or used[place]:
                parameter.grad = view
                found.append(parameter)
        return found

    def give_back(self) -> None:
        """Put back what this round took."""
        if self._views is None or self.store.stays:
            self.compressor.give_back(self._opened()[0])
            self._closed()
        self._exchange = None
        self.write = None

    def held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies of every member's residual and velocity, shaped like it."""
        opened = self._views is not None
        _, values, velocities = self._opened()
        copies = [value.clone() for value in values], [value.clone() for value in velocities]
        for position, (value, velocity) in self.frozen.items():
            copies[0][position].copy_(value)
            if velocity is not None:
                copies[1][position].copy_(velocity)
        if not opened:
            self._closed()
        return copies

    def put(self, place: int, values: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Add to a member's residual and velocity."""
        position = self._positions[place]
        _, residuals, velocities = self._opened()
        residuals[position].add_(values.to(residuals[position]))
        if velocity is not None and velocities:
            velocities[position].add_(velocity.to(velocities[position]))
        self.touched[position] = 1
        self._closed()

    def hand_back(self, used: Sequence[bool] | None, backups: Mapping[int, torch.Tensor]) -> None:
        for place, parameter, view in zip(self.members, self.parameters, self._slots, strict=True):
            parameter.grad = view if used is None or used[place] else backups.get(place)

    def arrived(self, message: torch.Tensor) -> torch.Tensor | None:
        return None

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        # Not reached while `EncodedDelivery` keeps late gradients to itself; an empty message keeps ranks in order.
        return torch.zeros(len(self.members), device=self.device)

    def add_late(self, message: torch.Tensor) -> list[float]:
        return [0.0] * len(self.members)
