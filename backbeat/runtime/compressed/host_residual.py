"""Residuals in pinned memory of the host, brought to the device around their own group.

Groups leave in one order, so the next ones are known: while a group is compressed, the one after it streams in on a
stream of its own, and the one before it streams out. The device holds two groups' worth, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from backbeat.runtime.compressed.residual import Residual, Store

_cuda: Any = torch.cuda


class Mirror:
    """Flat buffers that are opened and closed in turn, 0, 1, …, 0, 1, …; skipping or repeating one costs a wait."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._sizes = list(sizes)
        self._cuda = device.type == "cuda"
        self._device = device
        self._host = [torch.zeros(size, dtype=dtype, pin_memory=self._cuda) for size in sizes]
        count = min(2, len(sizes))
        self._staging = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in range(count)]
        self._loaded: list[int | None] = [None] * count
        self._ready: list[Any] = [_cuda.Event() if self._cuda else None for _ in range(count)]
        self._stream: Any = _cuda.Stream(device) if self._cuda else None
        self._turn = 0
        self._slot: dict[int, int] = {}

    @property
    def device_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._staging)

    def open(self, group: int) -> torch.Tensor:
        """The group's buffer on the device, in the order of the current stream."""
        slot = self._turn % len(self._staging)
        if group in self._loaded:
            slot = self._loaded.index(group)
        elif slot in self._slot.values():
            # Another group, open at this time, is being worked on there.
            slot = (slot + 1) % len(self._staging)
        self._turn = slot + 1
        self._slot[group] = slot
        if self._loaded[slot] != group:
            self._after_current()
            self._bring(slot, group)
        if self._cuda:
            _cuda.current_stream(self._device).wait_event(self._ready[slot])
        return self._staging[slot][: self._sizes[group]]

    def close(self, group: int) -> None:
        """Write the buffer back, and fetch the one that will be wanted in its place."""
        slot = self._slot.pop(group)
        self._after_current()
        with self._copying():
            self._host[group].copy_(self._staging[slot][: self._sizes[group]], non_blocking=True)
        self._bring(slot, (group + len(self._staging)) % len(self._sizes))

    @contextmanager
    def edited(self, group: int) -> Iterator[torch.Tensor]:
        """The group's buffer on the host, outside its turn; waits for what is under way."""
        if self._stream is not None:
            self._stream.synchronize()
        yield self._host[group]
        for slot, loaded in enumerate(self._loaded):
            if loaded == group:
                self._loaded[slot] = None

    def _after_current(self) -> None:
        if self._cuda:
            self._stream.wait_stream(_cuda.current_stream(self._device))

    def _bring(self, slot: int, group: int) -> None:
        with self._copying():
            self._staging[slot][: self._sizes[group]].copy_(self._host[group], non_blocking=True)
            if self._cuda:
                self._ready[slot].record()
        self._loaded[slot] = group

    def _copying(self) -> Any:
        return _cuda.stream(self._stream) if self._cuda else nullcontext()


class HostStore(Store):
    """A group's residual, and velocity, in mirrors that all groups share."""

    stays = False

    def __init__(self, group: int, values: Mirror, velocity: Mirror | None, *, masked: bool = False) -> None:
        self._group = group
        self._masked = masked
        self._values = values
        self._velocity = velocity

    def open(self) -> Residual:
        velocity = None if self._velocity is None else self._velocity.open(self._group)
        return Residual(self._values.open(self._group), velocity, masked=self._masked)

    def close(self) -> None:
        self._values.close(self._group)
        if self._velocity is not None:
            self._velocity.close(self._group)
