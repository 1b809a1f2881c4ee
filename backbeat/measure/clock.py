"""Marks in time, and the seconds between them: the host's clock on a CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any


class Clock(Protocol):
    def reserve(self, marks: int) -> None:
        """Get ready to hand out this many marks without creating anything on the way; earlier marks become void."""

    def mark(self) -> Mark: ...

    def synchronize(self) -> None:
        """Wait until everything marked has happened; only then can marks be compared."""

    def between(self, first: Mark, last: Mark) -> float: ...


class HostClock:
    """On a CPU work is done when the call returns."""

    def reserve(self, marks: int) -> None:
        pass

    def mark(self) -> Mark:
        return time.perf_counter()

    def synchronize(self) -> None:
        pass

    def between(self, first: Mark, last: Mark) -> float:
        return float(last - first)


class EventClock:
    """CUDA events on whatever stream is current where the mark is made.

    Hooks run in autograd's own thread, which has made the stream of the gradient's kernels current: an event recorded
    there is reached when the gradient is complete on the device, however far ahead the host is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self._used = 0

    def reserve(self, marks: int) -> None:
        self._used = 0
        stream = torch.cuda.current_stream(self._device)
        while len(self._pool) < marks:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The driver's event is made at the first record: paying for it here keeps it out of the measurement.
            event.record(stream)
            self._pool.append(event)
        self.synchronize()

    def mark(self) -> Mark:
        if self._used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._pool[self._used]
        self._used += 1
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last)) * 1e-3


def clock_for(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else HostClock()
