"""When buckets travel beside backward, and how far computation is meanwhile.

On one communicator every bucket starts when it is ready and the one before it is done: a recursion, as long as nothing
slows computation down. Otherwise backward and buckets are a graph (`bucket_graph`), which the engine runs. Buckets may
also form at run time, as Horovod's do: at each tick with the communicator free, whatever is ready travels together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost, MessageTimes
from backbeat.engine import SharedLink, run
from backbeat.model import DynamicFusion, Profile
from backbeat.steps.bucket_graph import BucketGraph, BucketStep, bucket_graph, link_of
from backbeat.steps.contention import UNDISTURBED, ComputeClock, contended
from backbeat.steps.schedule import Flow, Schedule

_NEVER = float("inf")


def one_by_one(ready: NDArray[np.float64], times: MessageTimes) -> Flow:
    """Messages that take these times, on one communicator: F_k = max(R_k, F_(k-1)) + T(M_k); where back-to-back times
    were measured, max(R_k + T, F_(k-1) + T_busy).

    Two buckets of 1 MB, ready at 0 and 1 ms, each taking 1 ms + 1 ns/byte: the second waits for the first.

    >>> from backbeat.cost import Curve, LinkCost
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> one_by_one(np.array([0.0, 1e-3]), cost.times(np.array([1e6, 1e6]))).finishes.tolist()
    [0.002, 0.004]
    """
    starts: list[float] = []
    finishes: list[float] = []
    free = -_NEVER
    for moment, alone, busy in zip(ready.tolist(), times.alone.tolist(), times.busy.tolist(), strict=True):
        starts.append(max(moment, free))
        free = max(moment + alone, free + busy)
        finishes.append(free)
    begun, ends = np.array(starts), np.array(finishes)
    # A head start on an idle link is no message sent before it was there.
    return Flow(begun, np.maximum(ends - times.transfer, begun), ends)


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


@dataclass(frozen=True, slots=True)
class FusedFlow(Flow):
    """Buckets as they come about at run time."""

    ends: list[int]
    """Where each ends in ready order: the index after its last gradient."""


def fuse(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, ready_s: NDArray[np.float64] | None = None
) -> FusedFlow:
    """The buckets that come about, and when they travel; `ready_s` where gradients are ready at other times.

    A bucket of several tensors is copied into the fusion buffer and out again; a tensor alone is sent from its place. A
    tensor larger than the buffer travels alone.
    """
    ready, sizes = (profile.ready if ready_s is None else ready_s).tolist(), profile.sizes.tolist()
    count = len(sizes)
    ends: list[int] = []
    times: list[tuple[float, float, float]] = []
    free, first = -_NEVER, 0
    while first < count:
        # A ready time that is a tick, but for rounding, is caught by that tick.
        tick = math.ceil(max(ready[first], free) / settings.cycle_s - 1e-9) * settings.cycle_s
        last, total = first + 1, sizes[first]
        while last < count and ready[last] <= tick and total + sizes[last] <= settings.buffer_bytes:
            total += sizes[last]
            last += 1
        copy = total / settings.copy_bytes_per_s if last - first > 1 else 0.0
        alone, busy, work = (float(part) for part in cost.times(total))
        reduced = max(tick + copy + alone, free + copy + busy)
        ends.append(last)
        times.append((tick, max(reduced - work, tick + copy), reduced + copy))
        free, first = reduced + copy, last
    starts, on_link, finishes = np.array(times).T
    return FusedFlow(starts, on_link, finishes, ends)


def fuse_beside(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, slowdown: float
) -> tuple[FusedFlow, ComputeClock]:
    """Buckets formed at run time, and the computation that takes `slowdown` times as long beside them."""
    return contended(lambda ready: fuse(profile, cost, settings, ready), profile.ready, slowdown)
