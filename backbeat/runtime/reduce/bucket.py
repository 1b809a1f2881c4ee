"""The memory of one group: a flat buffer whose slices are the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.comm.communicators import Communicator
    from backbeat.runtime.reduce.partition import BucketSpec
    from backbeat.runtime.reduce.step import Round


class BucketBuffer:
    """One group's gradients, contiguous, with room for the control numbers behind them where it is the last group.

    After a step `.grad` of each member is a view into the buffer. While the group travels `.grad` is None: a gradient
    that autograd produces then is a tensor of its own and cannot write into a buffer on the wire.
    """

    compressed = False
    """Travels as something else than its gradients."""

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Parameter],
        *,
        wire: torch.dtype | None = None,
        tail: int = 0,
    ) -> None:
        self.spec = spec
        self.members = spec.members
        self.parameters = [parameters[place] for place in spec.members]
        self.sparse = spec.sparse
        first = self.parameters[0]
        self.device = first.device
        real = first.dtype.to_real() if first.dtype.is_complex else first.dtype
        self.dtype = real
        self.wire = wire if wire is not None and wire != real and _narrower(wire, real) else None
        self.tail = tail
        self.numel = 0 if self.sparse else sum(reals(parameter) for parameter in self.parameters)
        held = self.numel + (tail if self.wire is None else 0)
        self.flat = torch.zeros(held, dtype=real, device=self.device)
        self.payload = self.flat[: self.numel]
        self.views = [] if self.sparse else views_of(self.payload, self.parameters)
        """The members' gradients."""
        self._pairs = list(zip(self.parameters, self.views, strict=not self.sparse))
        self._slices = [view.detach() for view in self.views]
        self._addresses = addresses_of(self.views)
        self._tail_view = self.flat[self.numel :]
        self._scale = 1.0
        self._factor: torch.Tensor | float = 1.0

    @property
    def _in_place(self) -> bool:
        """No gradient was given other memory (`p.grad.data = …`, `model.to(…)`), which leaves its slice behind."""
        return addresses_of(self.views) == self._addresses

    def _mend(self) -> None:
        """Slices that were given other memory are the buffer's again; a gradient keeps what it holds."""
        for (parameter, view), own, address in zip(self._pairs, self._slices, self._addresses, strict=True):
            if view.data_ptr() != address:
                if parameter.grad is view:
                    parameter.grad = view.detach()
                view.data = own

    def hand_back(self, used: Sequence[bool] | None, backups: Mapping[int, torch.Tensor]) -> None:
        """The gradient of each member that some rank used (None: all) is its slice of the buffer, the others' is what
        it was."""
        if used is None:
            for parameter, view in self._pairs:
                parameter.grad = view
            return
        for place, (parameter, view) in zip(self.members, self._pairs, strict=True):
            parameter.grad = view if used[place] else backups.get(place)

    @property
    def bytes(self) -> int:
        """What travels, without the control numbers."""
        return self.numel * (self.wire or self.dtype).itemsize

    def take_all(self) -> bool:
        """As `take`, where every member is expected to hold a dense gradient; False, and nothing done, where not."""
        if not self._in_place:
            return False
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        dense = torch.strided
        for parameter, view in self._pairs:
            gradient = parameter.grad
            if gradient is not view:
                if gradient is None or gradient.layout is not dense:
                    return False
                targets.append(view)
                sources.append(gradient)
        for parameter in self.parameters:
            parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
        return True

    def take(self) -> list[torch.Tensor | None]:
        """Copy the members' gradients into the buffer and take them away; returns what each held."""
        if not self._in_place:
            self._mend()
        held: list[torch.Tensor | None] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            held.append(gradient)
            if gradient is None:
                empty.append(view)
                continue
            if gradient is not view:
                targets.append(view)
                sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
            parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
        if empty:
            torch._foreach_zero_(empty)
        return held

    def pack(self, round_: Round) -> None:
        """As `take`, in any round: notes which members this rank used, and keeps the others' gradients."""
        held = self.take()
        if round_.absent:
            self.payload.zero_()
            return
        if round_.broken:
            self.poison()
            return
        for place, gradient, view in zip(self.members, held, self.views, strict=True):
            if gradient is None:
                # A hook of the user's took it away after it had arrived.
                round_.ordinary = round_.ordinary and not round_.dirty[place]
                continue
            if round_.dirty[place]:
                round_.used[place] = 1
            else:
                round_.backups[place] = gradient.clone() if gradient is view else gradient

    def launch(
        self, communicator: Communicator, scale: float, control: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """Begin to sum what was taken; returns the tensor that will hold the sum, and the work."""
        message = self.message(scale, control)
        return message, communicator.all_reduce(message)

    def message(self, scale: float, control: torch.Tensor | None) -> torch.Tensor:
        """What goes on the wire: the scaled gradients, in the wire's format, with the control numbers behind."""
        if self.wire is None:
            if scale != 1.0:
                self.payload.mul_(self._factor_of(scale))
            out = self.flat
        else:
            out = torch.empty(self.numel + self.tail, dtype=self.wire, device=self.device)
            torch.mul(self.payload, scale, out=out[: self.numel])
        if control is not None:
            (self._tail_view if out is self.flat else out[self.numel :]).copy_(control)
        return out

    def _factor_of(self, scale: float) -> torch.Tensor | float:
        if scale != self._scale:
            self._scale = scale
            # Torch makes a tensor of a number at every call, which takes longer than a short product. Formats narrower
            # than fp32 would round it.
            kept = self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)
            self._factor = torch.tensor(scale, dtype=self.dtype) if kept else scale
        return self._factor

    def arrived(self, message: torch.Tensor) -> torch.Tensor | None:
        """Bring the sum back into the buffer; returns the control numbers, where it carries them."""
        if message is self.flat:
            return self._tail_view
        if message is not self.payload:
            self.payload.copy_(message[: self.numel])
        return message[self.numel : self.numel + self.tail]

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        """Gradients that came after the group had left, scaled, and behind them one number a member that has one."""
        message = torch.zeros(self.numel + len(self.members), dtype=self.dtype, device=self.device)
        slots = views_of(message[: self.numel], self._slices)
        for position, (place, parameter) in enumerate(zip(self.members, self.parameters, strict=True)):
            if place in late and parameter.grad is not None:
                slots[position].copy_(parameter.grad)
                parameter.grad = None
                message[self.numel + position] = 1
        message[: self.numel].mul_(scale)
        return message

    def add_late(self, message: torch.Tensor) -> list[float]:
        """Add the sum of what came late to what arrived; returns how many ranks sent each member."""
        self.payload.add_(message[: self.numel])
        found: list[float] = message[self.numel :].float().tolist()
        return found

    def poison(self) -> None:
        """Make sure that nobody mistakes this rank's missing gradients for zeros."""
        self.payload.fill_(float("nan"))


def addresses_of(views: Sequence[torch.Tensor]) -> list[int]:
    """Where their memory begins."""
    return list(map(torch.Tensor.data_ptr, views))


def _narrower(wire: torch.dtype, dtype: torch.dtype) -> bool:
    return wire.itemsize < dtype.itemsize


def reals(parameter: torch.Tensor) -> int:
    """Real numbers that a parameter's gradient is made of."""
    return parameter.numel() * (2 if parameter.dtype.is_complex else 1)


def views_of(payload: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Slices shaped like the parameters, with their strides where these are dense (channels-last stays so)."""
    views: list[torch.Tensor] = []
    start = 0
    for parameter in parameters:
        size = reals(parameter)
        piece = payload[start : start + size]
        if parameter.dtype.is_complex:
            piece = torch.view_as_complex(piece.view(-1, 2))
        if torch.ops.aten.is_non_overlapping_and_dense(parameter):
            piece = piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
        else:
            piece = piece.view(parameter.shape)
        views.append(piece)
        start += size
    return views
