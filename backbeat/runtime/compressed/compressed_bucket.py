"""A compressed bucket: takes gradients into its residual, sends the largest elements, decodes what everybody sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from backbeat.runtime.compressed.residual import ResidualMemory
from backbeat.runtime.compressed.stores import Scratch, Store
from backbeat.runtime.compressed.topk import TopK, format_of
from backbeat.runtime.reduce.bucket import addresses_of, views_of
from backbeat.runtime.reduce.partition import BucketSpec
from backbeat.runtime.reduce.step import Step, TakenGradients


class CompressedBucket(ResidualMemory):
    """One bucket. Its message goes this way in each step:

    home ──begin, sent──► away ──decode, expose, give_back or drop──► home

    While it is `away`, the collective may be under way: all but `begin` and `sent` come after it is over.
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
        """dense: the decoded mean gets a buffer of its own, to be `.grad`."""
        super().__init__(spec, parameters, store=store, momentum_of=momentum_of, gathering=gathering)
        held = self.numel if dense else 0
        self.payload = torch.zeros(held, dtype=self.parameters[0].dtype, device=self.device)
        # As `Exchange` has it: what is in flight holds a bucket's payload, where the mean is decoded to.
        self.travels = self.payload
        self._dense = dense
        self._make_gradient_views()
        self.compressor = compressor
        self._everyone = range(len(self.members))
        self._starts: tuple[torch.Tensor, torch.Tensor] | None = None
        """Where members begin in the residual, and the numbers that stand for them."""
        self._sends_zeros = False
        self.complete = False
        """In this step, every member arrived before the bucket left."""
        self.away = False
        self.work: Any = None
        """The collective of a message that is away."""
        self._result: torch.Tensor | None = None
        """Where it writes everybody's message."""
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

    def begin(self, *, scale: float, density: float) -> torch.Tensor:
        """Encode; returns the message, which all ranks gather."""
        if self._sends_zeros:
            values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        else:
            values = (self._views or self._open_residual())[0].values
        self._sends_zeros = False
        self._scale = scale
        message = self.compressor.encode(values, density)
        if not self.store.stays:
            self._close_residual()
        return message

    def sent(self, work: Any, result: torch.Tensor) -> None:
        """The message has left; the collective writes everybody's into `result`."""
        self.away, self.work, self._result = True, work, result

    def drop(self) -> None:
        """What came is not used."""
        self._take_result()

    def _take_result(self) -> torch.Tensor | None:
        """Everybody's messages, which are used now; None where the message is home."""
        result = self._result
        self.away, self.work, self._result = False, None, None
        return result

    def faults(self) -> list[torch.Tensor]:
        """Of parameters that have a gradient, or had a residual when it was selected from, that is not finite: one more
        than an index, or 0; on the device. Nothing before the first message."""
        refused, self._refused = self._refused, []
        found = [torch.tensor([max(refused) + 1.0], device=self.device)] if refused else []
        selected = self._fault_selected()
        return found if selected is None else [*found, selected]

    def _fault_selected(self) -> torch.Tensor | None:
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

    def decode(self) -> None:
        """Write the mean where `.grad` will look at it."""
        result = self._take_result()
        if result is None:
            return
        if self.payload.dtype == self.dtype:
            self.compressor.decode(result, self.payload, self._scale)
        else:
            wide = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.compressor.decode(result, wide, self._scale)
            self.payload.copy_(wide)

    def expose(self, scratch: torch.Tensor, used: Sequence[bool] | None) -> list[Parameter]:
        """Write the mean into shared memory, as `.grad` of the members used; returns these. It cannot be given back."""
        result = self._take_result()
        if result is None:
            return []
        flat = scratch[: self.numel]
        self.compressor.decode(result, flat, self._scale, settled=True)
        if self.parameters[0].dtype == self.dtype:
            views = self._known_views.get(flat.data_ptr()) or self._views_on(flat)
        else:
            views = views_of(flat.to(self.parameters[0].dtype), self._slices)
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
        self.drop()

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
