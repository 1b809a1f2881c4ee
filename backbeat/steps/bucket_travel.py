"""When buckets travel beside backward, and how far computation is meanwhile.

On one communicator every bucket starts when it is ready and the one before it is done: a recursion, as long as nothing
slows computation down. Otherwise backward and buckets are a graph (`bucket_graph`), which the engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backbeat.cost import LinkCost, MessageTimes
from backbeat.engine import SharedLink, run
from backbeat.steps.bucket_graph import BucketGraph, BucketStep, bucket_graph, link_of
from backbeat.steps.schedule import UNDISTURBED, ComputeClock, Flow, Schedule, one_by_one


class BucketTravel:
    """Buckets beside a backward, to be sent on one network or on several.

    Two buckets of 1 MB ready together on two communicators, each 1 ms of latency and 1 ms of link: the latencies
    overlap, the transfers share the link, and both end after 1 + 2 ms.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = BucketTravel(Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1]), 0.0)
    >>> two.at(LinkCost(Curve.affine(1e-3, 1e-9)))[0].finishes.round(6).tolist()
    [0.003, 0.003]
    """

    def __init__(self, schedule: Schedule, backward_s: float, compress_s: Sequence[float] | None = None) -> None:
        self.schedule, self.backward_s, self.compress_s = schedule, backward_s, compress_s
        self.several = len({*schedule.communicators}) > 1
        self.made: BucketGraph | None = None
        self.computed_s = backward_s
        """Backward and compression."""
        self.ready = schedule.ready
        """Compression included: a bucket is compressed once it is ready, which puts off all gradients after it."""
        if compress_s is not None:
            ready, spent = schedule.ready.tolist(), 0.0
            for index in sorted(range(len(ready)), key=ready.__getitem__):
                spent += compress_s[index]
                ready[index] += spent
            self.ready, self.computed_s = np.array(ready), backward_s + spent

    def at(self, cost: LinkCost, slowdown: float = 1.0) -> tuple[Flow, ComputeClock]:
        """Dense messages at this cost; computation takes `slowdown` times as long beside them."""
        return self.on(cost.times(self.schedule.sizes), link_of(cost) if self.several else None, slowdown)

    def on(
        self, times: MessageTimes, link: SharedLink | None = None, slowdown: float = 1.0
    ) -> tuple[Flow, ComputeClock]:
        """Messages that take these times."""
        if not self.several and slowdown == 1:
            return one_by_one(self.ready, times), UNDISTURBED
        link, slowdowns = link or SharedLink(), {"network": slowdown}
        if self.made is None:
            step = BucketStep(
                schedule=self.schedule, times=times, link=link, slowdowns=slowdowns, compress_s=self.compress_s,
                forward_s=0.0, backward_s=self.backward_s, update_s=0.0,
            )  # fmt: skip
            self.made = bucket_graph(step)
            graph = self.made.graph
        else:
            graph = self.made.on(times, link, slowdowns)
        moments = run(graph)
        return self.made.flow(moments), UNDISTURBED if slowdown == 1 else self.made.clock(moments)
