"""One communicator: every bucket starts when it is ready and the one before it is done."""

from __future__ import annotations

import numpy as np

from backbeat.cost import LinkCost
from backbeat.simulate.schedule import Flow, Schedule


def one_communicator(schedule: Schedule, cost: LinkCost) -> Flow:
    """F_k = max(R_k, F_(k-1)) + T(M_k); where back-to-back times were measured, max(R_k + T, F_(k-1) + T_busy).

    Two buckets of 1 MB, ready at 0 and 1 ms, each taking 1 ms + 1 ns/byte: the second waits for the first.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = Schedule(np.array([0.0, 1e-3]), np.array([1e6, 1e6]), [0, 0])
    >>> one_communicator(two, LinkCost(Curve.affine(1e-3, 1e-9), None, {})).finishes.tolist()
    [0.002, 0.004]
    """
    alone = cost.time(schedule.sizes).tolist()
    busy = alone if cost.busy is None else cost.busy_time(schedule.sizes).tolist()
    starts: list[float] = []
    finishes: list[float] = []
    free = float("-inf")
    for ready, isolated, following in zip(schedule.ready.tolist(), alone, busy, strict=True):
        starts.append(max(ready, free))
        free = max(ready + isolated, free + following)
        finishes.append(free)
    ends = np.array(finishes)
    begun = np.array(starts)
    # A head start on an idle link is no message sent before it was there.
    return Flow(begun, np.maximum(ends - cost.work(schedule.sizes), begun), ends)
