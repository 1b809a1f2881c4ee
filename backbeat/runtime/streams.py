"""Gradients of one group may come from several CUDA streams; the one that sends it waits for the others."""

from __future__ import annotations

import torch


class Streams:
    """Streams on which a group's gradients were produced, other than the one that sends it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._seen: dict[int, set[int]] = {}
        self._first: int | None = None

    def note(self, group: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._first is None:
            self._first = stream
        if stream != self._first or self._seen:
            self._seen.setdefault(group, {self._first}).add(stream)

    def join(self, group: int) -> None:
        if not self._seen and self._first in (None, torch._C._cuda_getCurrentRawStream(self._index)):
            # As mostly: one stream, and it is this one. Asking for it as an object takes longer than all else here.
            return
        here = torch.cuda.current_stream(self._device)
        streams = self._seen.get(group, set()) if self._first is None else {self._first, *self._seen.get(group, set())}
        for raw in streams:
            if raw != here.cuda_stream:
                here.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
