"""Gradients of one bucket may come from several CUDA streams; the stream that sends it waits for the others."""

from __future__ import annotations

import torch


class Streams:
    """CUDA streams on which a bucket's gradients were produced; the one that sends the bucket waits for the others."""

    __slots__ = ("_device", "_first", "_index", "_others")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.forget()

    def forget(self) -> None:
        """Another backward begins."""
        self._first: int | None = None
        self._others: dict[int, set[int]] = {}

    def note(self, index: int) -> None:
        """A gradient of this bucket was just produced on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream != self._first:
            if self._first is None:
                self._first = stream
            else:
                self._others.setdefault(index, set()).add(stream)

    def join(self, index: int) -> None:
        """The current stream waits for those that produced the bucket's gradients."""
        if not self._others and self._first in (None, torch._C._cuda_getCurrentRawStream(self._index)):
            # As mostly: one stream, and it is this one. Asking for it as an object takes longer than all else here.
            return
        here = torch.cuda.current_stream(self._device)
        for raw in {self._first, *self._others.get(index, ())}:
            if raw != here.cuda_stream:
                here.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
