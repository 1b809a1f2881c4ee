"""One step with buckets: stock DDP's, planned ones, as a framework sends them, compressed, or formed at run time.

`BucketWay` is a plan on one network or on several. What it takes there is a `BucketRun`: times, and what they are made
of for those who ask (`explained`). On one communicator, with nothing that slows computation down and nothing gathered,
its graph is a recursion of one line, and is run as that.

A *framework* gathers parameters that the last update sharded: all of them before forward or, as Megatron does, the
first bucket before forward and each next one while forward works on the bucket before. A *compressed* bucket is
compressed on the compute stream once its last gradient is ready: it leaves later by that much, and so does every
gradient after it. `Profile.compression_s_per_byte` and `compression_s_per_bucket` cover selecting and putting together;
all of it is counted before the bucket leaves. Compressed plans are simulated on one communicator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost, MessageTimes
from backbeat.cost.bound import communication_bound
from backbeat.cost.message import message_bytes
from backbeat.engine import Graph, GraphTimes, SharedLink, run
from backbeat.engine.explain import idle_by_cause, slower_beside
from backbeat.engine.graph import name
from backbeat.model import Compression, Framework, Network, Plan, Profile
from backbeat.model.cluster import Cluster
from backbeat.model.plan import Bucket
from backbeat.model.prediction import Breakdown, Span
from backbeat.model.profile import DTYPE_BYTES
from backbeat.model.slowdown import least_s
from backbeat.steps.bucket_graph import BucketStep, BucketSteps, BucketTravel, bucket_graph
from backbeat.steps.fusion import fuse
from backbeat.steps.host import COMPUTE, HostIssue, Period, period_of
from backbeat.steps.schedule import (
    CompressedCost,
    Flow,
    Schedule,
    capped,
    compress_s,
    running_sums,
)
from backbeat.units import first_to_last


class Explained(NamedTuple):
    """What a step's time is made of, without the host and the slowest worker."""

    bound_s: float
    """No other plan is faster."""
    breakdown: Breakdown
    timeline: tuple[Span, ...]
    number: int
    """Of buckets, or units."""
    largest_bytes: float
    """Of one message."""


class BucketWay:
    """A plan's buckets in a step of so many micro-batches."""

    def __init__(
        self, profile: Profile, plan: Plan, micro_batches: int = 1, reduction: Framework | None = None
    ) -> None:
        self.profile, self.plan, self.reduction, self.micro_batches = profile, plan, reduction, micro_batches
        self.overlap = "last" if reduction is None else reduction.overlapped
        self.rounds = micro_batches if self.overlap == "every" else 1
        """Backward passes that end as the last does; the others only compute."""
        self.before_s = (micro_batches - self.rounds) * (profile.forward_s + profile.backward_s)
        compressed = plan.compressed
        self.dynamic = None if compressed else plan.dynamic
        self.compress_s: list[float] | None = None
        if self.dynamic is not None:
            plan.check(profile)
            return
        schedule, self.buckets = Schedule.of_plan(profile, plan)
        self.compressions = [bucket.compression if compressed else None for bucket in self.buckets]
        if compressed:
            schedule = replace(schedule, communicators=[0] * len(self.buckets))
            self.compress_s = compress_s(profile, schedule.sizes, self.compressions)
        elif self.overlap == "none":
            schedule = replace(schedule, ready=np.full_like(schedule.ready, profile.backward_s))
        self.schedule = schedule
        self.travel = BucketTravel(schedule, profile.backward_s, self.compress_s)

    def on(self, network: Network, slowdown: float = 1.0, buffers_s: float = 0.0) -> BucketRun:
        """On this network, with computation that takes so many times as long beside messages, after a broadcast of
        buffers."""
        if self.dynamic is not None:
            formed = fuse(self.profile, network.cost, self.dynamic, slowdown)
            names = [gradient.name for gradient in self.profile.gradients]
            buckets = [Bucket(gradients=tuple(names[a:b]), communicator=0) for a, b in pairwise([0, *formed.ends])]
            schedule, flow, end_s = Schedule.of_ends(self.profile, formed.ends), formed.flow, formed.backward_end_s
        else:
            link = SharedLink.of(self.cost(network)) if self.travel.several else None
            hidden = 1.0 if self.overlap == "none" else slowdown
            buckets, schedule = self.buckets, self.schedule
            flow, end_s = self.travel.on(self.times(network), link, hidden)
        first = self._first_forward(network, slowdown, buffers_s)
        return BucketRun(self, network, slowdown, buffers_s, buckets, schedule, flow, end_s, first)

    def _first_forward(self, network: Network, slowdown: float, buffers_s: float) -> FirstForward:
        """It waits for parameters, where a framework gathers them."""
        if self.reduction is None or not self.reduction.zero:
            return FirstForward(buffers_s + self.profile.forward_s)
        step = self.step(network, slowdown, buffers_s)
        steps = BucketSteps(step)
        end, gathers = steps.first_forward()
        graph, times = steps.graph, run(steps.graph)
        sizes = [size for _, _, size in gather_parts(self.profile, network, self.reduction)]
        spans = tuple(
            Span("communicator 0", name(graph, op), times.starts[op], times.ends[op], int(size))
            for op, size in zip(gathers, sizes, strict=True)
        )
        slower_s = slower_beside(graph, times, *COMPUTE)
        return FirstForward(
            times.ends[end],
            # Forward enters a bucket once it is there.
            spans[0 if step.gathers_ahead else -1].end_s,
            spans,
            times.ends[end] - buffers_s - self.profile.forward_s - slower_s,
            slower_s,
        )

    def step(
        self, network: Network, slowdown: float, buffers_s: float = 0.0, host: HostIssue | None = None
    ) -> BucketStep:
        """What its graph is made of."""
        profile, reduction = self.profile, self.reduction
        return BucketStep(
            schedule=self.schedule,
            times=self.times(network),
            link=SharedLink.of(self.cost(network)) if self.travel.several else None,
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            update_s=self.update_s(network),
            slowdowns={"network": slowdown},
            compress_s=self.compress_s,
            micro_batches=self.micro_batches,
            overlap=self.overlap,
            before_s=buffers_s,
            gathers=[(seconds, forward_s) for seconds, forward_s, _ in gather_parts(profile, network, reduction)],
            gathers_ahead=reduction is not None and reduction.hides_gathers,
            host=host,
        )

    def repeated(self, network: Network, slowdown: float, buffers_s: float, host: HostIssue) -> Period:
        """Steps that follow each other as this host issues them."""
        steps = BucketSteps(self.step(network, slowdown, buffers_s, host))
        return period_of(steps.graph, lambda: steps.add().update)

    def cost(self, network: Network) -> LinkCost:
        if self.reduction is not None and self.reduction.collective == "reduce_scatter":
            return LinkCost(Cluster.of(network).curve("reduce_scatter"))
        return network.cost

    def times(self, network: Network) -> MessageTimes:
        if self.compress_s is not None:
            return CompressedCost(network, self.profile).times(self.schedule.sizes, self.compressions)
        return self.cost(network).times(self.schedule.sizes)

    def update_s(self, network: Network) -> float:
        return (self.reduction or _PLAIN).updated_s(self.profile.update_s, network.workers)


_PLAIN = Framework(name="plain")


class FirstForward(NamedTuple):
    """Before anything else."""

    end_s: float
    start_s: float = 0.0
    gathers: tuple[Span, ...] = ()
    stalled_s: float = 0.0
    """Waiting for parameters."""
    slower_s: float = 0.0
    """Computation beside gathers."""


@dataclass(frozen=True)
class BucketRun:
    """A way on one network. `flow` and `backward_end_s` count from the start of the last backward."""

    way: BucketWay
    network: Network
    slowdown: float
    buffers_s: float
    buckets: Sequence[Bucket]
    schedule: Schedule
    flow: Flow
    backward_end_s: float
    first: FirstForward

    @property
    def computed_s(self) -> float:
        """Backward without communication beside it; compression too, where some buckets are compressed."""
        return self.way.profile.backward_s + sum(self.way.compress_s or ())

    @cached_property
    def round_s(self) -> float:
        """Of a backward and its messages."""
        return max(self.backward_end_s, self.flow.end_s)

    @property
    def begin_s(self) -> float:
        """When the last backward begins."""
        way = self.way
        return self.first.end_s + way.before_s + (way.rounds - 1) * (way.profile.forward_s + self.round_s)

    @property
    def contention_s(self) -> float:
        """By how much communication puts off the end of backward."""
        return self.backward_end_s - self.computed_s

    @cached_property
    def end_s(self) -> float:
        return self.begin_s + self.round_s + self.way.update_s(self.network)

    @property
    def tail_s(self) -> float:
        """Communication after backward; compression counts with it."""
        return self.round_s - self.contention_s - self.way.profile.backward_s

    @property
    def messages(self) -> int:
        return len(self.buckets) + len(self.first.gathers)

    @property
    def graph(self) -> Graph | None:
        """None where buckets form at run time."""
        way = self.way
        if way.dynamic is not None:
            return None
        return bucket_graph(way.step(self.network, self.slowdown, self.buffers_s)).graph

    def explained(self) -> Explained:
        way, profile, rounds = self.way, self.way.profile, self.way.rounds
        update_s = way.update_s(self.network)
        computed_s = way.micro_batches * (profile.forward_s + profile.backward_s) + update_s
        if way.compress_s is not None:
            # Its bound is that nothing is exposed.
            bound_s = computed_s - profile.backward_s + self.computed_s
        else:
            last_s = least_end_s(profile, way.cost(self.network), way.plan.communicators, self.slowdown)
            bound_s = computed_s - profile.backward_s + last_s
        latency_s, bandwidth_s, waiting_s = self._exposed()
        breakdown = Breakdown(
            latency_s=rounds * latency_s,
            bandwidth_s=rounds * bandwidth_s,
            waiting_s=rounds * waiting_s,
            contention_s=rounds * self.contention_s + self.first.slower_s,
            gather_s=self.first.stalled_s,
            buffers_s=self.buffers_s,
            sharding_s=update_s - profile.update_s,
        )
        dense = [size for size, one in zip(self.schedule.sizes.tolist(), self.compressions, strict=True) if one is None]
        return Explained(
            bound_s + self.buffers_s, breakdown, self._timeline(), len(self.buckets), max(dense, default=0.0)
        )

    @property
    def compressions(self) -> Sequence[Compression | None]:
        return [None] * len(self.buckets) if self.way.dynamic is not None else self.way.compressions

    def _exposed(self) -> tuple[float, float, float]:
        """Latency, bandwidth and waiting after backward; the definitions stand beside the fields of `Breakdown`."""
        flow, after = self.flow, self.backward_end_s
        messages = GraphTimes(*[column.tolist() for column in flow])
        gaps = [(after, flow.end_s)] if flow.end_s > after else []
        if self.way.compress_s is not None:
            # All counts as waiting, compression included, but for the link being busy afterwards.
            _, busy, waiting = idle_by_cause(gaps, messages._replace(on_link=messages.starts), math.inf)
            return 0.0, busy, waiting + sum(self.way.compress_s)
        cost = self.way.cost(self.network)
        link = float(cost.times(self.schedule.sizes).transfer.sum()) / cost.best_efficiency(self.way.plan.communicators)
        hidden = after - float(self.way.profile.ready[0])
        return idle_by_cause(gaps, messages, max(link - hidden, 0.0))

    def _timeline(self) -> tuple[Span, ...]:
        """Other micro-batches count as forward."""
        begin, end = self.begin_s, self.begin_s + self.round_s
        width = self.way.profile.element_bytes
        word = "backward and compression" if self.way.compress_s is not None else "backward"
        buffers = (Span("communicator 0", "buffers", 0.0, self.buffers_s, self.way.profile.buffer_bytes),)
        moments = zip(self.flow.starts.tolist(), self.flow.finishes.tolist(), strict=True)
        sizes = self.schedule.sizes.tolist()
        rows = zip(self.buckets, self.compressions, sizes, self.schedule.communicators, moments, strict=True)
        return (
            *(buffers if self.buffers_s else ()),
            Span("compute", "forward", self.first.start_s, begin),
            Span("compute", word, begin, begin + self.backward_end_s),
            Span("compute", "update", end, end + self.way.update_s(self.network)),
            *self.first.gathers,
            *(
                Span(
                    f"communicator {communicator}",
                    first_to_last(bucket.gradients) + ("" if one is None else " (topk)"),
                    begin + start,
                    begin + finish,
                    int(size) if one is None else round(float(message_bytes(size / width, one.density))),
                )
                for bucket, one, size, communicator, (start, finish) in rows
            ),
        )


def least_end_s(profile: Profile, cost: LinkCost, communicators: int, slowdown: float) -> float:
    """The earliest end of backward and communication, whatever the bucketing. Computation is slowed down for as long as
    the link needs at least."""
    _, per_byte = cost.cheapest(float(profile.sizes.min()), float(profile.sizes.sum()))
    on_link = per_byte * float(profile.sizes.sum()) / cost.best_efficiency(communicators)
    last = communication_bound(profile.ready, profile.sizes, cost, communicators)
    return max(least_s(profile.backward_s, on_link, slowdown), last)


def gather_parts(profile: Profile, network: Network, reduction: Framework | None) -> list[tuple[float, float, float]]:
    """Of each message of a framework that gathers parameters: what it takes, the forward that needs it, its bytes."""
    if reduction is None or not reduction.zero:
        return []
    width = DTYPE_BYTES[reduction.gather_dtype or profile.gradient_dtype]
    sizes = profile.sizes[::-1] * (width / DTYPE_BYTES[profile.gradient_dtype])
    ends = [len(sizes)]
    if reduction.gather_elements is not None:
        cap = width * reduction.cap(reduction.gather_elements, network.workers)
        ends = capped(sizes.tolist(), [float(cap)])
    sums, computed = running_sums(sizes).tolist(), running_sums(_forward_s(profile)).tolist()
    curve = Cluster.of(network).curve("all_gather")
    parts = [(sums[last] - sums[first], computed[last] - computed[first]) for first, last in pairwise([0, *ends])]
    return [(float(curve.time(size)), forward_s, size) for size, forward_s in parts]


def _forward_s(profile: Profile) -> NDArray[np.float64]:
    """Forward time of each gradient's module, in the order forward runs: the reverse of ready order. Where the profile
    lacks some, all are taken from the shape of backward."""
    known = [gradient.forward_s for gradient in profile.gradients]
    spans = np.diff(profile.ready, prepend=0.0) if None in known else np.array(known, dtype=np.float64)
    total = float(spans.sum())
    shares = spans / total if total > 0 else np.full(len(spans), 1 / len(spans))
    return np.asarray(shares * profile.forward_s)[::-1]
