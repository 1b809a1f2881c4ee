"""When the device has done what the host asked of it, from the launches and kernels of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backbeat.importers.trace_facts import Facts, Mark
from backbeat.simulate.schedule import busy_periods


class DeviceClock:
    """From a moment on the host to the moment the device has finished all that was launched until then."""

    def __init__(self, facts: Facts) -> None:
        start, end, stream = arrays(facts.kernels.start, facts.kernels.end, facts.kernels.tag)
        self.on_device = start.size > 0
        if not self.on_device:
            return
        # Copies and side work run elsewhere; the stream that is busy longest is the one backward runs on.
        busy = {one: float((end - start)[stream == one].sum()) for one in np.unique(stream)}
        mine = stream == max(busy, key=lambda one: busy[one])
        self.start, self.end = start[mine], end[mine]
        self.launched = self._launched(facts, np.asarray(facts.kernel_ids, dtype=np.int64)[mine])
        order = np.argsort(self.launched, kind="stable")
        self._launches = self.launched[order]
        self._finished = np.maximum.accumulate(self.end[order])
        self.busy = union(np.stack([self.start, self.end], axis=1))

    def _launched(self, facts: Facts, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """When each kernel was launched; its own start where the launch is not in the trace."""
        called = np.asarray(facts.launches.tag, dtype=np.int64)
        start: NDArray[np.float64] = self.start
        if called.size == 0:
            return start
        order = np.argsort(called, kind="stable")
        index = np.minimum(np.searchsorted(called[order], ids), called.size - 1)
        found = called[order][index] == ids
        launched: NDArray[np.float64] = np.where(found, np.asarray(facts.launches.start)[order][index], start)
        return launched

    def done(self, moment: float) -> float:
        if not self.on_device:
            return moment
        before = int(np.searchsorted(self._launches, moment, side="right"))
        return max(moment, float(self._finished[before - 1])) if before else moment

    def idle(self, start: float, end: float) -> float:
        if not self.on_device or end <= start:
            return 0.0
        return 1 - common(np.array([[start, end]]), self.busy) / (end - start)

    def busy_s(self, mark: Mark) -> float:
        """How long the device took for what was launched meanwhile."""
        if not self.on_device:
            return mark.end - mark.start
        inside = (self.launched >= mark.start) & (self.launched <= mark.end)
        if not inside.any():
            return mark.end - mark.start
        return float(self.end[inside].max() - self.start[inside].min())


def union(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """The intervals, merged where they touch, in order."""
    return np.array(busy_periods(*spans.reshape(-1, 2).T.tolist())).reshape(-1, 2)


def common(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Length of the intersection of two unions."""
    if not other.size:
        return 0.0
    before = np.concatenate([[0.0], np.cumsum(other[:, 1] - other[:, 0])])

    def covered(moment: NDArray[np.float64]) -> NDArray[np.float64]:
        index = np.searchsorted(other[:, 0], moment, side="right")
        last = np.maximum(index - 1, 0)
        beyond = np.where(index > 0, np.maximum(other[last, 1] - moment, 0.0), 0.0)
        covered_s: NDArray[np.float64] = before[index] - beyond
        return covered_s

    return float((covered(one[:, 1]) - covered(one[:, 0])).sum())


def arrays(*columns: Any) -> list[NDArray[np.float64]]:
    return [np.asarray(column, dtype=np.float64) for column in columns]
