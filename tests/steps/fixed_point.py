"""Contention as a fixed point: messages run again and again, each time with the ready times that the last run gave. The
engine finds the same in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.engine.explain import busy_periods
from backbeat.steps.schedule import Flow

_SAME = 1e-12
"""Ready times this close to those of the run before, relative to the last, are the same."""


@dataclass(frozen=True)
class ComputeClock:
    """How far computation is at any time: a line through corners, of full speed after the last."""

    done: NDArray[np.float64]
    """Seconds of undisturbed computation at each corner."""
    at: NDArray[np.float64]
    """When that is reached."""

    def when(self, done_s: ArrayLike) -> NDArray[np.float64]:
        """When this much computation is done, if none of it waits."""
        return _along(np.asarray(done_s, dtype=np.float64), self.done, self.at)

    def done_by(self, at_s: ArrayLike) -> NDArray[np.float64]:
        """How much computation can be done by then."""
        return _along(np.asarray(at_s, dtype=np.float64), self.at, self.done)


def _along(values: NDArray[np.float64], known: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    beyond = other[-1] + (values - known[-1])
    return np.where(values >= known[-1], beyond, np.interp(values, known, other))


def contended(
    travel: Callable[[NDArray[np.float64]], Flow], ready: NDArray[np.float64], slowdown: float
) -> tuple[Flow, ComputeClock]:
    """Messages that leave when `travel` sends them, given when each is ready, and the computation they slow down.
    `ready` is when messages would be ready without communication."""
    clock = ComputeClock(np.zeros(1), np.zeros(1))
    flow = travel(ready)
    if slowdown == 1 or not len(ready):
        return flow, clock
    moments = ready
    for _ in range(4 * len(ready) + 4):
        clock = _clock(flow, clock, slowdown)
        later = clock.when(ready)
        same = float(np.abs(later - moments).max()) <= _SAME * float(later.max())
        moments = later
        flow = travel(moments)
        if same:
            break
    return flow, clock


def _clock(flow: Flow, before: ComputeClock, slowdown: float) -> ComputeClock:
    """Computation beside these messages. A busy period begins after as much computation as it did before: what made
    its first message ready."""
    periods = busy_periods(flow.starts, flow.finishes)
    done, at = [0.0], [0.0]
    for (begin, end), anchor in zip(periods, before.done_by([begin for begin, _ in periods]).tolist(), strict=True):
        length = end - begin
        start = max(anchor, done[-1])
        arrives = at[-1] + (start - done[-1])
        done += [start, start + length / slowdown]
        at += [arrives, arrives + length]
    return ComputeClock(np.array(done), np.array(at))
