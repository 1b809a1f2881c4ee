"""The memory of buckets: flat buffers of which each gradient is a slice. Sparse gradients travel without a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn import Parameter

from backbeat.comm.communicators import Communicator
from backbeat.errors import CommunicationError
from backbeat.runtime.reduce.partition import BucketSpec, Partition
from backbeat.runtime.reduce.step import Step, TakenGradients


class BucketMemory:
    """One bucket of a reducer: its members, how it takes their gradients, and where their mean will be."""

    compressed = False
    """Whether the bucket sends only part of its gradients (`CompressedBucket`)."""
    sparse = False
    """Whether its gradients are sparse tensors (`SparseBucket`)."""
    travels: torch.Tensor | None = None
    """What is summed, where the sum is then in its place: there is nothing to take in."""
    dtype: torch.dtype
    """Of what is added up."""
    payload: torch.Tensor
    """Where the mean will be, one after the other; empty where it has no memory of its own."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter]) -> None:
        self.spec = spec
        self.members = spec.members
        self.parameters = [parameters[index] for index in spec.members]
        self.device = self.parameters[0].device
        self.numel = sum(map(reals, self.parameters))
        self.reduce_dtype: torch.dtype | None = None
        """The dtype that travels, where it is a narrower one."""
        self.status_length = 0
        """Numbers of the status message that travel after the gradients."""
        self.views: list[torch.Tensor] = []
        """The members' gradients, where they have slices of a buffer before they travel."""

    @property
    def bytes(self) -> int:
        """What travels, without the status message."""
        raise NotImplementedError

    def take_all(self) -> bool:
        """Take the members' gradients away, where every member is expected to hold one; False, and nothing done, where
        not."""
        raise NotImplementedError

    def pack(self, step: Step) -> TakenGradients:
        """As `take_all`, in any step: finds which members this rank used, and keeps the others' gradients."""
        raise NotImplementedError

    def launch(self, communicator: Communicator, scale: float, status: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """Begin to sum what was taken, scaled, in the reduce dtype, with the status message at the end; returns the
        tensor that will hold the sum, and the work."""
        raise NotImplementedError

    def take_sum(self, message: torch.Tensor) -> torch.Tensor | None:
        """The sum is there: take it in; returns the status message, where it carries one."""
        return None

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        """Gradients that came after the bucket had left, scaled, and after them one number a member that has one."""
        raise NotImplementedError

    def add_late(self, message: torch.Tensor) -> list[float]:
        """Add the sum of what came late to what arrived; returns how many ranks sent each member."""
        raise NotImplementedError

    def hand_back(self, used: Sequence[bool] | None, unused_grads: Mapping[int, torch.Tensor]) -> None:
        """`.grad` of each member that some rank used becomes its mean; None: all were used. A member that no rank used
        gets back the gradient that it had, from `unused_grads`."""
        raise NotImplementedError


class BucketBuffer(BucketMemory):
    """One bucket's gradients, contiguous, with room for the status message after them where it is the last bucket.

    After a step `.grad` of each member is a view into the buffer. While the bucket is in flight, until backward ends,
    `.grad` is None: a gradient that autograd produces then is a tensor of its own, and cannot write into the buffer.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Parameter],
        *,
        reduce_dtype: torch.dtype | None = None,
        status_length: int = 0,
    ) -> None:
        super().__init__(spec, parameters)
        self.dtype = real = real_dtype(self.parameters[0])
        narrower = reduce_dtype is not None and reduce_dtype.itemsize < real.itemsize
        self.reduce_dtype = reduce_dtype if narrower else None
        self.status_length = status_length
        held = self.numel + (status_length if self.reduce_dtype is None else 0)
        self.flat = torch.zeros(held, dtype=real, device=self.device)
        self.travels = self.flat if self.reduce_dtype is None else None
        self.payload = self.flat[: self.numel]
        self.views = views_of(self.payload, self.parameters)
        self._pairs = list(zip(self.parameters, self.views, strict=True))
        self._slices = [view.detach() for view in self.views]
        self._addresses = addresses_of(self.views)
        self._tail_view = self.flat[self.numel :]
        self._scale = 1.0
        self._factor: torch.Tensor | float = 1.0

    @property
    def _in_place(self) -> bool:
        """No gradient was given other memory (`p.grad.data = …`, `model.to(…)`), which leaves its slice behind."""
        return addresses_of(self.views) == self._addresses

    def _restore_slices(self) -> None:
        """Slices that were given other memory are the buffer's again; a gradient keeps what it holds."""
        for (parameter, view), own, address in zip(self._pairs, self._slices, self._addresses, strict=True):
            if view.data_ptr() != address:
                if parameter.grad is view:
                    parameter.grad = view.detach()
                view.data = own

    def hand_back(self, used: Sequence[bool] | None, unused_grads: Mapping[int, torch.Tensor]) -> None:
        if used is None:
            for parameter, view in self._pairs:
                parameter.grad = view
            return
        for index, (parameter, view) in zip(self.members, self._pairs, strict=True):
            parameter.grad = view if used[index] else unused_grads.get(index)

    @property
    def bytes(self) -> int:
        return self.numel * (self.reduce_dtype or self.dtype).itemsize

    def take_all(self) -> bool:
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

    def pack(self, step: Step) -> TakenGradients:
        if not self._in_place:
            self._restore_slices()
        arrived = step.arrivals.arrived_since_reduce
        used: list[int] = []
        unused_grads: dict[int, torch.Tensor] = {}
        removed = False
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []
        for index, (parameter, view) in zip(self.members, self._pairs, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                empty.append(view)
                # A hook of the user's took it away after it had arrived.
                removed = removed or bool(arrived[index])
                continue
            if gradient is not view:
                targets.append(view)
                sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
            if arrived[index]:
                used.append(index)
            else:
                in_buffer = gradient.layout is torch.strided and gradient.data_ptr() == view.data_ptr()
                unused_grads[index] = gradient.clone() if in_buffer else gradient
        if targets:
            torch._foreach_copy_(targets, sources)
        if empty:
            torch._foreach_zero_(empty)
        if step.contributes_nothing:
            # Nobody must mistake the gradients that a broken backward lacks for zeros.
            self.payload.fill_(0.0 if step.absent else float("nan"))
            return TakenGradients()
        return TakenGradients(used, unused_grads, removed)

    def launch(self, communicator: Communicator, scale: float, status: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        if self.reduce_dtype is None:
            if scale != 1.0:
                self.payload.mul_(self._factor_of(scale))
            out = self.flat
        else:
            out = torch.empty(self.numel + self.status_length, dtype=self.reduce_dtype, device=self.device)
            torch.mul(self.payload, scale, out=out[: self.numel])
        if status is not None:
            (self._tail_view if out is self.flat else out[self.numel :]).copy_(status)
        return out, communicator.all_reduce(out)

    def _factor_of(self, scale: float) -> torch.Tensor | float:
        if scale != self._scale:
            self._scale = scale
            # Torch makes a tensor of a number at every call, which takes longer than a short product. Formats narrower
            # than fp32 would round it.
            kept = self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)
            self._factor = torch.tensor(scale, dtype=self.dtype, device="cpu") if kept else scale
        return self._factor

    def take_sum(self, message: torch.Tensor) -> torch.Tensor | None:
        if message is self.flat:
            return self._tail_view
        if message is not self.payload:
            self.payload.copy_(message[: self.numel])
        return message[self.numel : self.numel + self.status_length]

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        message = torch.zeros(self.numel + len(self.members), dtype=self.dtype, device=self.device)
        slots = views_of(message[: self.numel], self._slices)
        for position, (index, parameter) in enumerate(zip(self.members, self.parameters, strict=True)):
            if index in late and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                slots[position].copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
                message[self.numel + position] = 1
        message[: self.numel].mul_(scale)
        return message

    def add_late(self, message: torch.Tensor) -> list[float]:
        self.payload.add_(message[: self.numel])
        return list(message[self.numel :].float().tolist())


def addresses_of(views: Sequence[torch.Tensor]) -> list[int]:
    """Where their memory begins."""
    return list(map(torch.Tensor.data_ptr, views))


def reals(parameter: torch.Tensor) -> int:
    """Real numbers that a parameter's gradient is made of."""
    return parameter.numel() * (2 if parameter.dtype.is_complex else 1)


def real_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What those are."""
    return parameter.dtype.to_real() if parameter.dtype.is_complex else parameter.dtype


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


class SparseBucket(BucketMemory):
    """One parameter that has sparse gradients, as of `nn.Embedding(sparse=True)`: they travel alone, as they are. There
    is no buffer: their rows differ from step to step."""

    sparse = True

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter]) -> None:
        super().__init__(spec, parameters)
        self.dtype = real_dtype(self.parameters[0])
        self.payload = torch.empty(0, dtype=self.dtype, device=self.device)
        self._gradient: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Not known ahead of the step."""
        return 0

    def take_all(self) -> bool:
        return False

    def pack(self, step: Step) -> TakenGradients:
        parameter, index = self.parameters[0], self.members[0]
        gradient = parameter.grad
        parameter.grad = None
        self._gradient = None if step.contributes_nothing else gradient
        if self._gradient is None:
            return TakenGradients()
        used = step.arrivals.arrived_since_reduce[index]
        return TakenGradients(used=[index]) if used else TakenGradients(unused_grads={index: self._gradient})

    def launch(self, communicator: Communicator, scale: float, status: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        parameter, gradient, self._gradient = self.parameters[0], self._gradient, None
        if gradient is not None:
            message = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce() * scale
        else:
            indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
            rows = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            empty = torch.sparse_coo_tensor(
                indices, rows, parameter.shape, device=parameter.device, check_invariants=False
            )
            message = empty.coalesce()
        return message, communicator.all_reduce(message)

    def take_sum(self, message: torch.Tensor) -> torch.Tensor | None:
        self._sum = message
        return None

    def hand_back(self, used: Sequence[bool] | None, unused_grads: Mapping[int, torch.Tensor]) -> None:
        index = self.members[0]
        self.parameters[0].grad = self._sum if used is None or used[index] else unused_grads.get(index)
        self._sum = None

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        # The same on every rank, since all read that it came late.
        raise CommunicationError(
            "a sparse gradient came after it had been sent, and cannot be added to: use sparse=False, or "
            "use_reentrant=False where the embedding is checkpointed"
        )


class BucketSet:
    """Buckets in launch order over a list of parameters."""

    def __init__(self, partition: Partition, buckets: Sequence[BucketMemory], parameters: Sequence[Parameter]) -> None:
        self.partition = partition
        self.buckets = buckets
        self.bucket_of = [0] * len(parameters)
        """The bucket of each parameter."""
        for index, bucket in enumerate(buckets):
            for member in bucket.members:
                self.bucket_of[member] = index
        self.formats = [(p.dtype, p.shape, p.device) for p in parameters]
        """What each parameter was when its bucket was made."""
        self.plain = all(type(bucket) is BucketBuffer for bucket in buckets)
        """Every gradient has a slice of a buffer ahead of its sum."""
        self._pairs = (
            [pair for one in buckets for pair in zip(one.parameters, one.views, strict=True)] if self.plain else []
        )
        in_place = self.plain and all(bucket.reduce_dtype is None for bucket in buckets)
        last = {bucket.spec.communicator: index for index, bucket in enumerate(buckets)}
        self.ends = sorted(last.values()) if in_place else []
        """The last bucket of each communicator, where there is nothing to do for a bucket but to wait for its sum."""

    def place_gradients(self) -> None:
        """Of plain buckets: make every gradient its slice, though sums are still on their way."""
        for parameter, view in self._pairs:
            parameter.grad = view

    def expected_members(self, counts: Sequence[int]) -> list[int]:
        """How many members of each bucket are expected at all."""
        return [sum(1 for index in bucket.members if counts[index] > 0) for bucket in self.buckets]

    def move_into_buffer(self, index: int) -> None:
        """Move gradients of a bucket that are only accumulated into its buffer, so that they are not held twice."""
        bucket = self.buckets[index]
        if not bucket.views:
            return
        moved = [
            (parameter, view, gradient)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if (gradient := parameter.grad) is not None and gradient is not view and gradient.layout is torch.strided
        ]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([view for _, view, _ in moved], [gradient for _, _, gradient in moved])
            for parameter, view, _ in moved:
                parameter.grad = view

    def move_all_into_buffers(self) -> None:
        for index in range(len(self.buckets)):
            self.move_into_buffer(index)
