"""A GPU kept busy for a given time, by a kernel that spins on one multiprocessor, and waited for with a limit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from backbeat.comm.machine import cuda

_CLOCK_UP_S = 0.7
"""What an idle GPU takes to raise its clock."""
_POLL_S = 100e-6


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
