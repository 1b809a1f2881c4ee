"""Marks in time, and the seconds between them: the host's clock on a CPU, events in the stream on a GPU. And a GPU kept
busy for a given time: a kernel that spins on one multiprocessor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

cuda: Any = torch.cuda  # untyped in parts
Mark = Any

_LONGEST_DELAY_S = 0.25
"""So that a mistaken rate costs a fraction of a second, never a hang."""
_CLOCK_UP_S = 0.7
"""What an idle GPU takes to raise its clock."""
_POLL_S = 100e-6


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


@dataclass(frozen=True, slots=True)
class SpinRate:
    """Cycles a second, and the seconds that one kernel of a chain costs beside its cycles."""

    hertz: float
    overhead_s: float

    def spin(self, seconds: float) -> float:
        """Queue a kernel that takes about this long in the current stream; returns what it takes."""
        cycles = max(1, int((seconds - self.overhead_s) * self.hertz))
        cuda._sleep(cycles)
        return self.overhead_s + cycles / self.hertz


def spin_rate(*, idle: bool = True) -> SpinRate:
    """Measured on the current device. `idle`: it may have to raise its clock first; in training it has."""
    begun = time.perf_counter()
    while idle and time.perf_counter() - begun < _CLOCK_UP_S:
        _chain(10, 1_000_000)
    long_s = median(_chain(10, 2_000_000) for _ in range(5))
    short_s = median(_chain(50, 20_000) for _ in range(5))
    # Two chains, two unknowns: seconds per kernel = overhead + cycles / rate.
    hertz = (2_000_000 - 20_000) / max(long_s - short_s, 1e-6)
    # Whatever else ran meanwhile: a GPU's clock is between these.
    hertz = min(max(hertz, 1e8), 4e9)
    return SpinRate(hertz, max(short_s - 20_000 / hertz, 0.0))


def _chain(kernels: int, cycles: int) -> float:
    """Seconds per kernel in a chain of them, with an event after each as a collective records one."""
    start, end, between = (cuda.Event(enable_timing=True) for _ in range(3))
    cuda._sleep(1_000_000)
    start.record()
    for _ in range(kernels):
        cuda._sleep(cycles)
        between.record()
    end.record()
    until(end, 120.0)
    return float(start.elapsed_time(end)) * 1e-3 / kernels


def until(event: Any, limit_s: float) -> None:
    """Wait with an end: a collective whose peer is gone never finishes by itself."""
    limit = time.perf_counter() + limit_s
    while not event.query():
        if time.perf_counter() > limit:
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        time.sleep(_POLL_S)
