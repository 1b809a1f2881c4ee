"""Marks in time, and the seconds between them: the host's clock on a CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from backbeat.comm.machine import cuda
from backbeat.comm.spin import SpinRate, spin_rate

Mark = Any

_LONGEST_DELAY_S = 0.25
"""So that a mistaken rate costs a fraction of a second, never a hang."""


class Clock:
    """The host's, for a CPU: work is done when the call returns. Marks are in the order of the work between them."""

    asynchronous = False
    """Whether the device works behind the host's back, so that either may have to wait for the other."""

    def reserve(self, marks: int) -> None:
        """Get ready to hand out this many marks without creating anything on the way; earlier marks become void."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until everything marked has happened; only then can marks be compared."""

    def between(self, first: Mark, last: Mark) -> float:
        return float(last - first)

    def host_s(self) -> float:
        """The host's own time, whatever the device is doing."""
        return time.perf_counter()

    def delay(self, seconds: float) -> None:
        """Occupy the device for about so long without occupying the host, which gets ahead meanwhile."""


class EventClock(Clock):
    """CUDA events on whatever stream is current where the mark is made.

    Hooks run in autograd's own thread, which has made the stream of the gradient's kernels current. The device reaches
    an event recorded there when the gradient is complete, however far ahead the host is.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self._used = 0
        self._stream = torch.cuda.current_stream(device)
        self._stream_handle = self._stream.cuda_stream
        index = torch.cuda.current_device() if device.index is None else device.index
        self._current_handle = partial(torch._C._cuda_getCurrentRawStream, index)
        self._spin_rate: SpinRate | None = None

    def reserve(self, marks: int) -> None:
        self._used = 0
        while len(self._pool) < marks:
            event = cuda.Event(enable_timing=True)
            # The driver's event is made at the first record: paying for it here keeps it out of the measurement.
            event.record(self._stream)
            self._pool.append(event)
        self.synchronize()

    def mark(self) -> Mark:
        if self._used == len(self._pool):
            self._pool.append(cuda.Event(enable_timing=True))
        event = self._pool[self._used]
        self._used += 1
        # Looking the current stream up as an object costs more than recording; it is nearly always the same one.
        if self._current_handle() == self._stream_handle:
            event.record(self._stream)
        else:
            event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last)) * 1e-3

    def delay(self, seconds: float) -> None:
        if seconds > 0:
            self._spin_rate = self._spin_rate or spin_rate(idle=False)
            self._spin_rate.spin(min(seconds, _LONGEST_DELAY_S))


def clock_for(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else Clock()
