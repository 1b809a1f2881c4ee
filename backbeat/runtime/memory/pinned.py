"""Host memory that copies to and from a device can use without waiting, kept for the next iteration."""

from __future__ import annotations

from typing import Any

import torch

# A buffer this many times larger than asked for is left for someone else.
_LOOSE = 2


class HostBuffer:
    """Bytes of the host, and the event after which they may be written again."""

    __slots__ = ("data", "free_after")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.free_after: Any = None


class HostPool:
    """Buffers that come back and go out again. Pinning is slow: it happens in the first iteration only."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[HostBuffer]] = {}
        self.total_bytes = 0
        """Of all buffers ever made: it stops growing when iterations repeat."""

    def take(self, size: int) -> HostBuffer:
        fitting = [have for have in self._free if size <= have <= _LOOSE * size]
        if fitting:
            best = min(fitting)
            buffers = self._free[best]
            buffer = buffers.pop()
            if not buffers:
                del self._free[best]
            return buffer
        self.total_bytes += size
        return HostBuffer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))

    def give(self, buffer: HostBuffer) -> None:
        self._free.setdefault(buffer.data.numel(), []).append(buffer)
