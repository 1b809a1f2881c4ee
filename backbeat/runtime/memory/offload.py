"""Saved tensors that wait in host memory between forward and backward.

Note on streams. A copy to the host runs on its own stream, after an event of the compute stream. The tensor stays
referenced until the compute stream has been told to wait for the copy, at the beginning of a later block. From then on
the allocator may reuse its memory, because whatever the compute stream does next comes after the copy. So memory is
free in stream order, allocator statistics are true, and the host never waits.

A copy back is allocated on the compute stream when backward comes near. A second side stream fills it, after an event
of the compute stream, which waits for it at first use. A host buffer keeps the event of the copy that read it last; the
next copy into it waits for that event.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from backbeat.errors import InputError
from backbeat.measure.model.chain import version_of
from backbeat.measure.model.memory_by_kind import storage_key, storage_size
from backbeat.steps.memory_timeline import AHEAD

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device: moving one costs more than it frees."""
_MOST_SLACK = 2
"""A free buffer more than this many times larger than asked for is not taken."""


@dataclass(slots=True, eq=False)
class PinnedBuffer:
    """Bytes of the host, and the event after which they may be written again."""

    data: torch.Tensor
    free_after: Any = None


class PinnedPool:
    """Host buffers that are used again and again. Pinning is slow: it happens in the first iterations only."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[PinnedBuffer]] = {}
        self.total_bytes = 0
        """Of all buffers ever made: it stops growing when iterations repeat."""

    def take(self, size: int) -> PinnedBuffer:
        fitting = [have for have in self._free if size <= have <= _MOST_SLACK * size]
        if fitting:
            best = min(fitting)
            buffer = self._free[best].pop()
            if not self._free[best]:
                del self._free[best]
            return buffer
        self.total_bytes += size
        return PinnedBuffer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))

    def put_back(self, buffer: PinnedBuffer) -> None:
        self._free.setdefault(buffer.data.numel(), []).append(buffer)


class HostCopies:
    """Copies between one device and the host. On a CPU the same calls copy at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[Any, Any] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pool = PinnedPool(pinned=device.type == "cuda")

    def to_host(self, source: torch.Tensor) -> tuple[PinnedBuffer, Any]:
        """Start a copy to the host; returns its buffer, and the event that tells when it is done."""
        buffer = self.pool.take(source.numel())
        target = buffer.data[: source.numel()]
        if self._streams is None:
            target.copy_(source)
            return buffer, None
        stream = self._streams[0]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if buffer.free_after is not None:
            stream.wait_event(buffer.free_after)
            buffer.free_after = None
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return buffer, stream.record_event()

    def to_device(self, buffer: PinnedBuffer, size: int, sent: Any) -> tuple[torch.Tensor, Any]:
        """Start a copy to new memory of the compute stream; `sent` is the event of the copy that filled the buffer."""
        target = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._streams is None:
            target.copy_(buffer.data[:size])
            return target, None
        stream = self._streams[1]
        # The compute stream may not have finished with what this memory held before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        stream.wait_event(sent)
        with torch.cuda.stream(stream):
            target.copy_(buffer.data[:size], non_blocking=True)
            event = stream.record_event()
        buffer.free_after = event
        return target, event

    def wait(self, event: Any) -> None:
        """The compute stream waits for the event; the host does not."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


class OffloadedStorage:
    """One storage, on the device, on the host, or between the two. Its host buffer is free again when it dies."""

    def __init__(self, copies: HostCopies, tensor: torch.Tensor, block: str) -> None:
        self._copies = copies
        self._block = block
        self._source: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._changed = False
        self._stays = False
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole = flat.set_(storage, 0, (storage.nbytes(),), (1,))
        self._size = whole.numel()
        self._buffer, self._sent = copies.to_host(whole)
        self._target: torch.Tensor | None = None
        self._arrived: Any = None

    def __del__(self) -> None:
        # Not set where starting the copy failed.
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        # Fetched and never used: the copy may still be writing while the compute stream gets the memory back.
        self._copies.wait(getattr(self, "_arrived", None))
        self._copies.pool.put_back(buffer)

    @property
    def changed(self) -> bool:
        """The tensor was written into after the copy started, so the copy may hold either state."""
        if self._source is not None and version_of(self._source) != self._version:
            self._changed = True
        return self._changed

    def counts_writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether writing into this tensor of the storage would count as a change. Parts that `unsafe_chunk` made, as
        in torch's own GRU and LSTM, each count for themselves: this one may have left before that one was written."""
        if self._source is None:
            return False
        before = self._source._version
        with _unsafe_preserve_version_counter(tensor):
            increment_version(tensor)
            return bool(self._source._version != before)

    def keep_on_device(self) -> None:
        """Someone else keeps this storage on the device: releasing it would free nothing."""
        self._stays = self._source is not None

    def release(self) -> None:
        """Free the device's memory, after the copy to the host."""
        if self._source is not None and not self._stays:
            self._copies.wait(self._sent)
            self._changed = self.changed
            self._source = None

    def prefetch(self) -> None:
        """Start the copy back to the device."""
        if self._source is None and self._target is None:
            self._target, self._arrived = self._copies.to_device(self._buffer, self._size, self._sent)

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, for the compute stream."""
        if self.changed:
            raise InputError(
                f"a tensor of block {self._block!r} was changed in place after it was saved for backward: "
                "do not write into it, or keep the block instead of offloading"
            )
        if self._source is not None:
            return self._source.untyped_storage()
        self.prefetch()
        assert self._target is not None
        self._copies.wait(self._arrived)
        self._arrived = None
        return self._target.untyped_storage()


class OffloadedTensor:
    """A saved tensor whose storage is offloaded."""

    __slots__ = ("_conjugate", "_dtype", "_negative", "_offset", "_shape", "_storage", "_stride")

    def __init__(self, storage: OffloadedStorage, tensor: torch.Tensor) -> None:
        self._storage = storage
        self._dtype = tensor.dtype
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        # Torch conjugates and negates by a flag on the tensor, not in memory.
        self._conjugate, self._negative = tensor.is_conj(), tensor.is_neg()

    @property
    def changed(self) -> bool:
        return self._storage.changed

    def tensor(self) -> torch.Tensor:
        storage = self._storage.storage()
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        found = empty.set_(storage, self._offset, self._shape, self._stride)
        if self._conjugate:
            found = found.conj()
        return torch._neg_view(found) if self._negative else found


class KeptTensor:
    """A saved tensor that stays on the device. Saved-tensor hooks must check for changes themselves."""

    __slots__ = ("__weakref__", "_block", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, block: str) -> None:
        # Detached: a node that held its own output would keep itself alive for ever.
        self._tensor = tensor.detach()
        self._version = version_of(tensor)
        self._block = block

    @property
    def changed(self) -> bool:
        return version_of(self._tensor) != self._version

    def tensor(self) -> torch.Tensor:
        if self.changed:
            raise InputError(
                f"a tensor that block {self._block!r} saved for backward was changed in place since: "
                "step the optimizer after backward, and do not write into activations"
            )
        return self._tensor


class OffloadSchedule:
    """When tensors leave the device and come back, by the order in which one model's blocks run."""

    def __init__(self, lag: int = AHEAD, ahead: int = AHEAD) -> None:
        """lag: a copy to the host is waited for so many blocks after the one that began it.
        ahead: a copy back begins so many segments, or kept blocks, before the tensor is used."""
        self._lag, self._ahead = lag, ahead
        self._blocks = 0
        self._ranges = 0
        self._leaving: deque[tuple[int, int, OffloadedStorage]] = deque()
        """Storages that are being copied to the host, each with the block that offloads it and its key."""
        self._leaving_by_key: dict[int, OffloadedStorage] = {}
        """Exactly those in `_leaving`: a storage's address identifies it only while it lives."""
        self._of_range: dict[int, list[weakref.ref[OffloadedStorage]]] = {}
        self._kept: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By storage: who keeps it on the device, and its version then."""
        self._copies: dict[torch.device, HostCopies] = {}

    def __reduce__(self) -> Any:
        # Streams and buffers belong to this process and this model; a copy makes its own.
        return OffloadSchedule, (self._lag, self._ahead)

    @property
    def host_bytes(self) -> int:
        """Host memory allocated so far."""
        return sum(copies.pool.total_bytes for copies in self._copies.values())

    def begin_block(self) -> None:
        self._blocks += 1
        self._release(self._blocks - self._lag)

    def begin_range(self) -> int:
        """Forward begins a segment or a kept block; returns its number."""
        self._ranges += 1
        # Ranges whose storages have all died need no entry; looking at the oldest keeps the table short.
        while self._of_range:
            oldest = next(iter(self._of_range))
            if any(reference() is not None for reference in self._of_range[oldest]):
                break
            del self._of_range[oldest]
        return self._ranges

    def keep(self, tensor: torch.Tensor, owner: Any) -> None:
        """The owner keeps this storage on the device as long as it lives: offloading it would free nothing."""
        if not movable(tensor):
            return
        key = storage_key(tensor)
        leaving = self._leaving_storage(key)
        if leaving is not None:
            leaving.keep_on_device()

        def forget(reference: weakref.ref[Any]) -> None:
            entry = self._kept.get(key)
            if entry is not None and entry[0] is reference:
                del self._kept[key]

        self._kept[key] = weakref.ref(owner, forget), version_of(tensor)

    def offload(self, tensor: torch.Tensor, range_number: int, block: str) -> OffloadedTensor | KeptTensor:
        """Start to move a tensor's storage to the host, once however many views of it are saved.

        It stays where a kept block before has saved it too, or a kept block right after will.
        """
        key = storage_key(tensor)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is not None and kept[1] == version_of(tensor):
            return KeptTensor(tensor, block)
        storage = self._leaving_storage(key)
        if storage is None or not storage.counts_writes_to(tensor):
            copies = self._copies.get(tensor.device)
            if copies is None:
                copies = self._copies[tensor.device] = HostCopies(tensor.device)
            storage = OffloadedStorage(copies, tensor, block)
            self._leaving_by_key[key] = storage
            self._leaving.append((self._blocks, key, storage))
            self._of_range.setdefault(range_number, []).append(weakref.ref(storage))
        return OffloadedTensor(storage, tensor)

    def hook_outputs(self, outputs: list[torch.Tensor], range_number: int) -> None:
        """Call `reached` when backward has the gradient of the range's output."""
        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _gradient: self.reached(range_number))
                return

    def reached(self, range_number: int) -> None:
        """Backward is at this range: release what forward has offloaded, and prefetch what comes next."""
        self.release_all()
        for near in range(range_number, range_number - self._ahead - 1, -1):
            for reference in self._of_range.pop(near, ()):
                storage = reference()
                if storage is not None:
                    storage.prefetch()

    def release_all(self) -> None:
        """Free the device's memory of everything that is on its way to the host."""
        self._release(self._blocks)

    def _release(self, until: int) -> None:
        while self._leaving and self._leaving[0][0] <= until:
            _, key, storage = self._leaving.popleft()
            if self._leaving_by_key.get(key) is storage:
                del self._leaving_by_key[key]
            storage.release()

    def _leaving_storage(self, key: int) -> OffloadedStorage | None:
        """The storage that is on its way to the host, unless it was written into since."""
        storage = self._leaving_by_key.get(key)
        return None if storage is None or storage.changed else storage


def movable(tensor: torch.Tensor) -> bool:
    """Large enough to be worth moving, and made of plain memory."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_inference():
        return False
    return storage_size(tensor) >= SMALLEST_BYTES
