"""Tensors that wait on the host between forward and backward.

Note on streams. A copy to the host runs on a stream of its own, behind an event of the compute stream. The tensor stays
referenced until the compute stream has been told to wait for the copy, at the beginning of a later block: from then on
the allocator may give its memory to whatever the compute stream does next, because that comes after the copy. So memory
is free in stream order, allocator statistics are true, and the host waits for nothing. A copy back is allocated
on the compute stream when backward comes near, filled on the second side stream behind an event of the compute stream,
and waited for at first use. A host buffer remembers the copy that read it last, and the next writer waits for that.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from backbeat.errors import InputError
from backbeat.measure.model.chain import version_of
from backbeat.runtime.memory.pinned import HostBuffer, HostPool

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device: moving one costs more than it frees."""
LAG = 2
"""Blocks from the one that sends a tensor to the one that begins by waiting for the copy."""
AHEAD = 2
"""Units (segments, or kept blocks) before its use at which a tensor starts to come back."""


class Line:
    """Copies between one device and the host; on a CPU, plain copies by the same calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[Any, Any] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pool = HostPool(pinned=device.type == "cuda")

    @property
    def host_bytes(self) -> int:
        return self._pool.total_bytes

    def send(self, source: torch.Tensor) -> tuple[HostBuffer, Any]:
        """Start a copy to the host; the event says when it is done."""
        buffer = self._pool.take(source.numel())
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

    def fetch(self, buffer: HostBuffer, size: int, sent: Any) -> tuple[torch.Tensor, Any]:
        """Start a copy to new memory of the device, which belongs to the compute stream."""
        target = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._streams is None:
            target.copy_(buffer.data[:size])
            return target, None
        stream = self._streams[1]
        # What this memory held before may still be in use by work the compute stream has not done yet.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        stream.wait_event(sent)
        with torch.cuda.stream(stream):
            target.copy_(buffer.data[:size], non_blocking=True)
            event = stream.record_event()
        buffer.free_after = event
        return target, event

    def wait(self, event: Any) -> None:
        """Work issued to the compute stream from now on comes after the event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def release(self, buffer: HostBuffer) -> None:
        self._pool.give(buffer)


class Parcel:
    """One storage: on the device, on its way to the host, there, or back. Its host buffer is returned when it dies."""

    __slots__ = (
        "__weakref__", "_arrived", "_buffer", "_by", "_changed", "_line", "_sent", "_size", "_source", "_stays",
        "_target", "_version",
    )  # fmt: skip

    def __init__(self, line: Line, tensor: torch.Tensor, by: str) -> None:
        self._line = line
        self._by = by
        self._source: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._changed = False
        self._stays = False
        whole = _bytes_of(tensor.untyped_storage(), tensor.device)
        self._size = whole.numel()
        self._buffer, self._sent = line.send(whole)
        self._target: torch.Tensor | None = None
        self._arrived: Any = None

    def __del__(self) -> None:
        # Not set where making the copy failed.
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        # Fetched and never used: its memory goes back to the compute stream while the copy may still be writing.
        self._line.wait(getattr(self, "_arrived", None))
        self._line.release(buffer)

    @property
    def changed(self) -> bool:
        """The tensor was written into after it was sent: the copy may hold either state."""
        if self._source is not None and version_of(self._source) != self._version:
            self._changed = True
        return self._changed

    def stay(self) -> None:
        """Somebody keeps this storage on the device: giving it up would free nothing, and bring a second one back."""
        self._stays = self._source is not None

    def leave(self) -> None:
        """Give the device's memory up; the compute stream waits for the copy before anything uses it again."""
        if self._source is not None and not self._stays:
            self._line.wait(self._sent)
            self._changed = self.changed
            self._source = None

    def prefetch(self) -> None:
        if self._source is None and self._target is None:
            self._target, self._arrived = self._line.fetch(self._buffer, self._size, self._sent)

    def storage(self) -> torch.UntypedStorage:
        """On the device, for the compute stream."""
        if self.changed:
            raise InputError(_changed_in_place(self._by))
        if self._source is not None:
            return self._source.untyped_storage()
        self.prefetch()
        assert self._target is not None
        self._line.wait(self._arrived)
        self._arrived = None
        return self._target.untyped_storage()


class Unsent:
    """Stands for a parcel where somebody keeps the storage on the device anyway."""

    __slots__ = ("_by", "_source", "_version")

    def __init__(self, tensor: torch.Tensor, by: str) -> None:
        self._by = by
        self._source = tensor.detach()
        self._version = version_of(tensor)

    @property
    def changed(self) -> bool:
        return version_of(self._source) != self._version

    def storage(self) -> torch.UntypedStorage:
        if self.changed:
            raise InputError(_changed_in_place(self._by))
        return self._source.untyped_storage()


class Away:
    """A tensor whose storage is a parcel."""

    __slots__ = ("_conjugate", "_dtype", "_negative", "_offset", "_shape", "_stride", "parcel")

    def __init__(self, parcel: Parcel | Unsent, tensor: torch.Tensor) -> None:
        self.parcel = parcel
        self._dtype = tensor.dtype
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        # Torch conjugates and negates by a mark on the tensor: its memory is as it was.
        self._conjugate, self._negative = tensor.is_conj(), tensor.is_neg()

    def tensor(self) -> torch.Tensor:
        storage = self.parcel.storage()
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        found = empty.set_(storage, self._offset, self._shape, self._stride)
        if self._conjugate:
            found = found.conj()
        return torch._neg_view(found) if self._negative else found


class Tape:
    """The order of one model's blocks and units, by which tensors leave the device and come back."""

    def __init__(self, lag: int = LAG, ahead: int = AHEAD) -> None:
        self._settings = lag, ahead
        self._blocks = 0
        self._units = 0
        self._leaving: deque[tuple[int, int, Parcel]] = deque()
        self._on_the_way: dict[int, weakref.ref[Parcel]] = {}
        """By storage, exactly those that `_leaving` holds: a storage's address is its identity only while it lives."""
        self._of_unit: dict[int, list[weakref.ref[Parcel]]] = {}
        self._kept: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By storage: who keeps it on the device, and which state of it."""
        self._lines: dict[torch.device, Line] = {}

    def __reduce__(self) -> Any:
        # Streams and buffers belong to this process and this model; a copy makes its own.
        return Tape, self._settings

    @property
    def host_bytes(self) -> int:
        """Host memory made so far."""
        return sum(line.host_bytes for line in self._lines.values())

    @property
    def waiting(self) -> int:
        """Parcels that are still referenced by somebody."""
        return sum(reference() is not None for parcels in self._of_unit.values() for reference in parcels)

    def begin_block(self) -> None:
        self._blocks += 1
        self._settle(self._blocks - self._settings[0])

    def begin_unit(self) -> int:
        self._units += 1
        # Units whose parcels have all gone need no entry; looking at the oldest is enough to keep the table short.
        while self._of_unit:
            oldest = next(iter(self._of_unit))
            if any(reference() is not None for reference in self._of_unit[oldest]):
                break
            del self._of_unit[oldest]
        return self._units

    def keeps(self, tensor: torch.Tensor, owner: Any) -> None:
        """The owner keeps this storage on the device as long as it lives: sending it would free nothing."""
        if not movable(tensor):
            return
        key = int(tensor.untyped_storage()._cdata)
        known = self._on_the_way.get(key)
        parcel = known() if known is not None else None
        if parcel is not None and not parcel.changed:
            parcel.stay()

        def forget(reference: weakref.ref[Any]) -> None:
            entry = self._kept.get(key)
            if entry is not None and entry[0] is reference:
                del self._kept[key]

        self._kept[key] = weakref.ref(owner, forget), version_of(tensor)

    def send(self, tensor: torch.Tensor, unit: int, by: str) -> Away:
        """Start to move a tensor's storage to the host, once however many views of it are sent.

        It stays where a kept block before has saved it too, or a kept block right behind will.
        """
        key = int(tensor.untyped_storage()._cdata)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is not None and kept[1] == version_of(tensor):
            return Away(Unsent(tensor, by), tensor)
        known = self._on_the_way.get(key)
        parcel = known() if known is not None else None
        if parcel is None or parcel.changed:
            line = self._lines.get(tensor.device)
            if line is None:
                line = self._lines[tensor.device] = Line(tensor.device)
            parcel = Parcel(line, tensor, by)
            self._on_the_way[key] = weakref.ref(parcel)
            self._leaving.append((self._blocks, key, parcel))
            self._of_unit.setdefault(unit, []).append(weakref.ref(parcel))
        return Away(parcel, tensor)

    def call_when_reached(self, outputs: list[torch.Tensor], unit: int) -> None:
        """Have the unit announced when backward has the gradient of its output."""
        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _gradient: self.reached(unit))
                return

    def reached(self, unit: int) -> None:
        """Backward is at this unit: let go what forward has sent, and fetch what comes next."""
        self.settle()
        for near in range(unit, unit - self._settings[1] - 1, -1):
            for reference in self._of_unit.pop(near, ()):
                parcel = reference()
                if parcel is not None:
                    parcel.prefetch()

    def settle(self) -> None:
        """Let go of everything that has been sent."""
        self._settle(self._blocks)

    def _settle(self, until: int) -> None:
        while self._leaving and self._leaving[0][0] <= until:
            _, key, parcel = self._leaving.popleft()
            known = self._on_the_way.get(key)
            if known is not None and known() is parcel:
                del self._on_the_way[key]
            parcel.leave()


def movable(tensor: torch.Tensor) -> bool:
    """Worth moving, and made of plain memory."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_inference():
        return False
    try:
        return tensor.untyped_storage().nbytes() >= SMALLEST_BYTES
    except (NotImplementedError, RuntimeError):
        return False


def _changed_in_place(by: str) -> str:
    return (
        f"a tensor of block {by!r} was changed in place after it was saved for backward: "
        "do not write into it, or keep the block instead of offloading"
    )


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
