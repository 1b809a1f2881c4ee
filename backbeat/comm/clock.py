"""Marks in time, and the seconds between them: the host's clock on a CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

Mark = Any

_SPIN_PROBES = 3
_SPIN_CYCLES = 2_000_000
# A spin is bounded so that a mistaken probe costs a fraction of a second, never a hang.
_LONGEST_DELAY_S = 0.25


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
        self._current_handle = _stream_lookup(torch.cuda.current_device() if device.index is None else device.index)
        self._cycles_per_s: float | None = None

    def reserve(self, marks: int) -> None:
        self._used = 0
        while len(self._pool) < marks:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The driver's event is made at the first record: paying for it here keeps it out of the measurement.
            event.record(self._stream)
            self._pool.append(event)
        self.synchronize()

    def mark(self) -> Mark:
        if self._used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
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
        if self._cycles_per_s is None:
            self._cycles_per_s = self._calibrated()
        cycles = int(min(seconds, _LONGEST_DELAY_S) * self._cycles_per_s)
        if cycles > 0:
            _spin(cycles)

    def _calibrated(self) -> float:
        """How many of its cycles the device spins through in a second, at the clock rate it runs at now."""
        seconds = []
        for _ in range(_SPIN_PROBES + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record(self._stream)
            _spin(_SPIN_CYCLES)
            last.record(self._stream)
            self.synchronize()
            seconds.append(self.between(first, last))
        # The first spin also loads the kernel. No GPU is slower than a tenth of a gigahertz.
        return _SPIN_CYCLES / min(max(median(seconds[1:]), 1e-6), _SPIN_CYCLES / 1e8)


def clock_for(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else Clock()


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def _stream_lookup(device_index: int) -> Callable[[], int]:
    """The handle of the calling thread's current stream, as cheaply as this PyTorch gives it."""
    raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return lambda: int(raw(device_index))
    return lambda: int(torch.cuda.current_stream(device_index).cuda_stream)
