"""Where residuals are kept, on the device or in host memory.

Residuals in host memory come to the device around their own bucket. Buckets leave in a fixed order: while one is
compressed, the next is copied in and the last is copied out, on a stream of their own. The device holds two buckets'
worth, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from backbeat.comm.machine import cuda
from backbeat.errors import InputError
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.partition import BucketSpec, Partition


@dataclass(slots=True, eq=False)
class Residual:
    """The residual of one bucket. It is unscaled and never a `.grad`, and finite unless the step is failing."""

    values: torch.Tensor
    velocity: torch.Tensor | None = None

    def clean(self) -> None:
        """Set what is not finite to zero."""
        for one in (self.values, self.velocity):
            if one is not None:
                drop_infinite(one)


class Store:
    """Keeps a bucket's residual on the device."""

    stays = True
    """`close` does nothing: the residual is there at any time."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, velocity: bool) -> None:
        self.dtype = dtype
        self._residual = Residual(
            torch.zeros(numel, dtype=dtype, device=device),
            torch.zeros(numel, dtype=dtype, device=device) if velocity else None,
        )

    def open(self) -> Residual:
        """The residual, to read and write until `close`."""
        return self._residual

    def close(self) -> None: ...


class HostStore(Store):
    """Keeps a bucket's residual, and the velocity after it, in host buffers that all buckets share."""

    stays = False

    def __init__(self, index: int, buffers: HostBuffers, *, parts: int) -> None:
        self.dtype = buffers.dtype
        self._index, self._buffers, self._parts = index, buffers, parts

    def open(self) -> Residual:
        values, *velocity = self._buffers.open(self._index).chunk(self._parts)
        return Residual(values, velocity[0] if velocity else None)

    def close(self) -> None:
        self._buffers.close(self._index)


class HostBuffers:
    """Flat buffers in pinned memory, of which the device holds two at a time.

    They are fastest opened and closed in order, 0, 1, …, 0, 1, …; any other order is right too, and waits for copies.
    Each has its place on the host for good; `memory.offload` has a pool, for tensors that come and go.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._sizes = list(sizes)
        self.dtype = dtype
        self._cuda = device.type == "cuda"
        self._device = device
        self._host = [torch.zeros(size, dtype=dtype, device="cpu", pin_memory=self._cuda) for size in sizes]
        count = min(2, len(sizes))
        self._staging = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in range(count)]
        self._loaded: list[int | None] = [None] * count
        """Which buffer each staging buffer holds."""
        self._ready: list[Any] = [cuda.Event() if self._cuda else None for _ in range(count)]
        self._stream: Any = cuda.Stream(device) if self._cuda else None
        self._next_slot = 0
        self._open: dict[int, int] = {}
        """Of the buffers that are open: which staging buffer each is in."""

    def open(self, index: int) -> torch.Tensor:
        """The buffer on the device, for the current stream."""
        slot = self._next_slot % len(self._staging)
        if index in self._loaded:
            slot = self._loaded.index(index)
        elif slot in self._open.values():
            slot = (slot + 1) % len(self._staging)
        self._next_slot = slot + 1
        self._open[index] = slot
        if self._loaded[slot] != index:
            self._wait_for_current_stream()
            self._load(slot, index)
        if self._cuda:
            cuda.current_stream(self._device).wait_event(self._ready[slot])
        return self._staging[slot][: self._sizes[index]]

    def close(self, index: int) -> None:
        """Copy the buffer back, and load the one whose turn is after the next."""
        slot = self._open.pop(index)
        self._wait_for_current_stream()
        with self._copying(slot):
            self._host[index].copy_(self._staging[slot][: self._sizes[index]], non_blocking=True)
        following = (index + len(self._staging)) % len(self._sizes)
        # Never in two places: a second copy would be out of date once the first is written into.
        if following not in self._loaded:
            self._load(slot, following)

    def _wait_for_current_stream(self) -> None:
        if self._cuda:
            self._stream.wait_stream(cuda.current_stream(self._device))

    def _load(self, slot: int, index: int) -> None:
        with self._copying(slot):
            self._staging[slot][: self._sizes[index]].copy_(self._host[index], non_blocking=True)
        self._loaded[slot] = index

    @contextmanager
    def _copying(self, slot: int) -> Iterator[None]:
        """Copies in here run on the copy stream; `_ready` tells when they are done."""
        if not self._cuda:
            yield
            return
        with cuda.stream(self._stream):
            yield
            self._ready[slot].record()


class Scratch:
    """One temporary buffer per dtype, as large as the largest bucket; buckets use it in turn."""

    def __init__(self) -> None:
        self._sizes: dict[torch.dtype, int] = {}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """Make the buffer at least this large."""
        self._sizes[dtype] = max(numel, self._sizes.get(dtype, 0))

    def buffer(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = self._buffers.get(dtype)
        if found is None or found.numel() < self._sizes[dtype]:
            found = self._buffers[dtype] = torch.empty(self._sizes[dtype], dtype=dtype, device=device)
        return found


def drop_infinite(values: torch.Tensor) -> None:
    """Set what is not finite to zero."""
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def make_stores(
    partition: Partition, context: ReducerContext, *, host: bool, velocity: bool
) -> dict[BucketSpec, Store]:
    """Where the residual of each compressed bucket that has elements lives; on the host, buckets of a dtype share their
    room on the device. Raises where a bucket cannot be compressed."""
    kinds: dict[torch.dtype, dict[BucketSpec, int]] = {}
    for spec in partition.buckets:
        if spec.compression is None:
            continue
        for member in spec.members:
            dtype = context.managed.parameters[member].dtype
            if not dtype.is_floating_point:
                raise InputError(
                    f"parameter {context.managed.names[member]!r} is {dtype}, and its bucket is compressed: only "
                    "real floating-point gradients can be; leave the compression out of its bucket"
                )
        numel = sum(context.managed.parameters[member].numel() for member in spec.members)
        if numel:
            # 16-bit gradients are kept in fp32, since small ones would vanish in a 16-bit sum.
            kinds.setdefault(torch.float32 if dtype.itemsize < 4 else dtype, {})[spec] = numel
    found: dict[BucketSpec, Store] = {}
    for dtype, numels in kinds.items():
        if host:
            parts = 2 if velocity else 1
            sizes = [parts * numel for numel in numels.values()]
            buffers = HostBuffers(sizes, dtype, context.communicators.device)
            for index, spec in enumerate(numels):
                found[spec] = HostStore(index, buffers, parts=parts)
            continue
        for spec, numel in numels.items():
            device = context.managed.parameters[spec.members[0]].device
            found[spec] = Store(numel, dtype, device, velocity=velocity)
    return found
