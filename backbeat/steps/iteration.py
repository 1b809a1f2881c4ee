"""One iteration of a plan's buckets, or of one worker alone, without buffers and stragglers: how long, and why.

`framework_step` has what training frameworks make of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from backbeat.cost import LinkCost
from backbeat.cost.bound import communication_bound
from backbeat.model import DynamicFusion, Network, Plan, Profile
from backbeat.model.plan import Bucket
from backbeat.model.prediction import Breakdown, Span
from backbeat.model.profile import ELEMENT_BYTES
from backbeat.model.slowdown import least_s
from backbeat.steps.bucket_travel import BucketTravel
from backbeat.steps.compressed_cost import CompressedCost, compress_s, sent_bytes
from backbeat.steps.fusion import fuse_beside
from backbeat.steps.schedule import ComputeClock, Flow, Schedule, covered_s
from backbeat.units import first_to_last


class StepTimes(NamedTuple):
    """What a step comes to on one network."""

    steady_s: float
    """Without buffers, stragglers and the host."""
    tail_s: float
    """Of it, communication after backward."""
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What a plan makes of an iteration."""

    steady_s: float
    """Without buffers, stragglers and the host."""
    bound_s: float
    """No other plan is faster."""
    breakdown: Breakdown
    timeline: tuple[Span, ...]
    buckets: int
    """Buckets, or units."""
    largest_bytes: float
    """Of one message."""
    elsewhere: Callable[[Network, float], StepTimes] = field(compare=False)
    """The same step where links take other times, as on a quiet cluster, and slow computation down by that factor."""

    @property
    def times(self) -> StepTimes:
        parts = self.breakdown
        sent = sum(span.lane.startswith("communicator") for span in self.timeline)
        return StepTimes(self.steady_s, parts.latency_s + parts.bandwidth_s + parts.waiting_s, sent)


def alone(profile: Profile, plan: Plan, before: float) -> Iteration:
    """One worker: nothing travels."""
    plan.check(profile)
    backward = before + profile.forward_s
    update = backward + profile.backward_s
    end = update + profile.update_s
    count = len(plan.buckets) if plan.sharding is None else len(plan.sharding.units)
    drawn = compute_spans(backward, update, update, end)
    return Iteration(
        steady_s=end, bound_s=end, breakdown=Breakdown(), timeline=drawn, buckets=count, largest_bytes=0.0,
        elsewhere=lambda network, slowdown: StepTimes(end, 0.0, 0),
    )  # fmt: skip


def compute_spans(
    backward: float, backward_end: float, update: float, end: float, *, forward: float = 0.0, word: str = "backward"
) -> tuple[Span, ...]:
    """The computation, by when each part begins; other micro-batches count as forward."""
    return (
        Span("compute", "forward", forward, backward),
        Span("compute", word, backward, backward_end),
        Span("compute", "update", update, end),
    )


@dataclass(frozen=True)
class BucketRun:
    """A plan's buckets beside backward. Times count from the start of backward."""

    buckets: Sequence[Bucket]
    schedule: Schedule
    flow: Flow
    clock: ComputeClock
    """How far computation is meanwhile."""
    computed_s: float
    """Backward without communication beside it; compression too, where some buckets are compressed."""
    compressed: bool = False
    """Buckets travel as they are compressed; otherwise all of them dense, whatever they say."""
    element_bytes: int = ELEMENT_BYTES
    """Of a gradient; it says how many elements a compressed bucket has."""

    @cached_property
    def backward_end_s(self) -> float:
        return float(self.clock.when(self.computed_s))

    @cached_property
    def end_s(self) -> float:
        return max(self.backward_end_s, self.flow.end_s)

    @property
    def contention_s(self) -> float:
        """By how much communication puts off the end of backward."""
        return self.backward_end_s - self.computed_s

    def iteration(
        self,
        *,
        steady_s: float,
        bound_s: float,
        breakdown: Breakdown,
        elsewhere: Callable[[Network, float], StepTimes],
        backward: float,
        update_s: float,
        forward: float = 0.0,
        gathers: Iterable[Span] = (),
    ) -> Iteration:
        """The iteration in which `forward` and `backward` begin at these times. `gathers` are drawn, too."""
        schedule, end = self.schedule, backward + self.end_s
        sizes = schedule.sizes.tolist()
        compressions = [bucket.compression if self.compressed else None for bucket in self.buckets]
        dense = [size for size, compression in zip(sizes, compressions, strict=True) if compression is None]
        word = "backward and compression" if self.compressed else "backward"
        spans = compute_spans(backward, backward + self.backward_end_s, end, end + update_s, forward=forward, word=word)
        moments = zip(self.flow.starts.tolist(), self.flow.finishes.tolist(), strict=True)
        rows = zip(self.buckets, compressions, sizes, schedule.communicators, moments, strict=True)
        travels = (
            Span(
                f"communicator {communicator}",
                first_to_last(bucket.gradients) + ("" if compression is None else " (topk)"),
                backward + start,
                backward + finish,
                sent_bytes(size, compression, self.element_bytes),
            )
            for bucket, compression, size, communicator, (start, finish) in rows
        )
        return Iteration(
            steady_s=steady_s,
            bound_s=bound_s,
            breakdown=breakdown,
            timeline=(*spans, *gathers, *travels),
            buckets=len(self.buckets),
            largest_bytes=max(dense, default=0.0),
            elsewhere=elsewhere,
        )


def bucket_iteration(profile: Profile, network: Network, plan: Plan, before: float, slowdown: float = 1.0) -> Iteration:
    """Communication ends before the update; backward takes `slowdown` times as long beside it."""
    runs = bucket_runs(profile, plan)
    run = runs(network, slowdown)
    backward, around = before + profile.forward_s, before + profile.forward_s + profile.update_s
    if run.compressed:
        # Its bound is that nothing is exposed.
        bound = around + run.backward_end_s - run.contention_s
        # All of what is exposed counts as waiting, compression included, but for the link being busy afterwards.
        busy = covered_s(run.flow.starts.tolist(), run.flow.finishes.tolist(), run.backward_end_s)
        waiting = max(run.end_s - profile.backward_s - busy - run.contention_s, 0.0)
        breakdown = Breakdown(bandwidth_s=busy, waiting_s=waiting, contention_s=run.contention_s)
    else:
        bound = around + least_end_s(profile, network.cost, plan.communicators, slowdown)
        breakdown = exposed_breakdown(profile, network.cost, run, plan.communicators)

    def elsewhere(other: Network, factor: float) -> StepTimes:
        again = runs(other, factor)
        tail_s = again.end_s - again.contention_s - profile.backward_s
        return StepTimes(around + again.end_s, tail_s, len(again.buckets))

    return run.iteration(
        steady_s=around + run.end_s,
        bound_s=bound,
        breakdown=breakdown,
        elsewhere=elsewhere,
        backward=backward,
        update_s=profile.update_s,
    )


def bucket_runs(profile: Profile, plan: Plan) -> Callable[[Network, float], BucketRun]:
    """The plan's buckets on a network, with computation that takes so many times as long beside them. Those of a
    compressed plan travel on one communicator."""
    if plan.dynamic is not None and not plan.compressed:
        plan.check(profile)
        return partial(_fused, profile, plan.dynamic)
    schedule, buckets = Schedule.of_plan(profile, plan)
    if not plan.compressed:
        travel = BucketTravel(schedule, profile.backward_s)
        return lambda network, slowdown: BucketRun(
            buckets, schedule, *travel.at(network.cost, slowdown), profile.backward_s
        )
    compressions = [bucket.compression for bucket in buckets]
    one = replace(schedule, communicators=[0] * len(buckets))
    packed = BucketTravel(one, profile.backward_s, compress_s(profile, schedule.sizes, compressions))

    def on(network: Network, slowdown: float) -> BucketRun:
        times = CompressedCost(network, profile).times(schedule.sizes, compressions)
        flow, clock = packed.on(times, None, slowdown)
        width = profile.element_bytes
        return BucketRun(buckets, one, flow, clock, packed.computed_s, compressed=True, element_bytes=width)

    return on


def _fused(profile: Profile, settings: DynamicFusion, network: Network, slowdown: float) -> BucketRun:
    fused, clock = fuse_beside(profile, network.cost, settings, slowdown)
    order = [gradient.name for gradient in profile.gradients]
    formed = [Bucket(gradients=tuple(order[first:last]), communicator=0) for first, last in pairwise([0, *fused.ends])]
    return BucketRun(formed, Schedule.of_ends(profile, fused.ends), fused, clock, profile.backward_s)


def exposed_breakdown(profile: Profile, cost: LinkCost, run: BucketRun, communicators: int) -> Breakdown:
    """Split what is exposed beside and after backward; the definitions stand beside the fields of `Breakdown`."""
    flow, backward_end, contention = run.flow, run.backward_end_s, run.contention_s
    first = float(run.clock.when(profile.ready[0]))
    tail = flow.end_s - backward_end
    if tail <= 0:
        return Breakdown(contention_s=contention)
    moving = covered_s(flow.on_link.tolist(), flow.finishes.tolist(), backward_end)
    holding = covered_s(flow.starts.tolist(), flow.finishes.tolist(), backward_end)
    link = float(cost.times(run.schedule.sizes).transfer.sum()) / cost.best_efficiency(communicators)
    too_much = max(link - (backward_end - first), 0.0)
    latency, bandwidth = max(holding - moving, 0.0), min(moving, too_much)
    return Breakdown(
        latency_s=latency,
        bandwidth_s=bandwidth,
        waiting_s=max(tail - latency - bandwidth, 0.0),
        contention_s=contention,
    )


def least_end_s(profile: Profile, cost: LinkCost, communicators: int, slowdown: float) -> float:
    """The earliest end of backward and communication, whatever the bucketing. Computation is slowed down for as long as
    the link needs at least."""
    _, per_byte = cost.cheapest(float(profile.sizes.min()), float(profile.sizes.sum()))
    on_link = per_byte * float(profile.sizes.sum()) / cost.best_efficiency(communicators)
    return max(
        least_s(profile.backward_s, on_link, slowdown),
        communication_bound(profile.ready, profile.sizes, cost, communicators),
    )
