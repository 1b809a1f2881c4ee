"""One iteration's computation and communication, before buffers and stragglers: how long, why, and drawn in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backbeat.errors import InputError
from backbeat.model.prediction import Breakdown, Span
from backbeat.simulate.bound import communication_bound
from backbeat.simulate.compressed_cost import CompressedCost, exposed_parts, pieces_of, spans, travel
from backbeat.simulate.decoupled_step import decoupled_bound, link_s, period
from backbeat.simulate.dynamic import fuse
from backbeat.simulate.engine import simulate
from backbeat.simulate.recursion import one_communicator
from backbeat.simulate.schedule import Flow, Schedule

if TYPE_CHECKING:
    from backbeat.cost import LinkCost
    from backbeat.model import Network, Plan, Profile


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a plan makes of an iteration."""

    steady_s: float
    bound_s: float
    breakdown: Breakdown
    timeline: tuple[Span, ...]
    buckets: int
    largest_bytes: float


def alone(profile: Profile, plan: Plan, before: float) -> Iteration:
    """One worker: nothing travels."""
    plan.check(profile)
    backward = before + profile.forward_s
    update = backward + profile.backward_s
    end = update + profile.update_s
    spans = (
        Span("compute", "forward", 0.0, backward),
        Span("compute", "backward", backward, update),
        Span("compute", "update", update, end),
    )
    count = len(plan.buckets) if plan.sharding is None else len(plan.sharding.units)
    return Iteration(end, end, Breakdown(), spans, count, 0.0)


def within_iteration(profile: Profile, network: Network, plan: Plan, before: float) -> Iteration:
    """Communication ends before the update."""
    cost = network.cost
    names, schedule, flow = run(profile, plan, cost)
    end = max(profile.backward_s, flow.end_s)
    bound_end = max(profile.backward_s, communication_bound(profile, cost, plan.communicators))
    around = before + profile.forward_s + profile.update_s
    return Iteration(
        around + end,
        around + bound_end,
        _breakdown(profile, cost, schedule, flow, end, plan.communicators),
        _timeline(profile, schedule, flow, names, before + profile.forward_s, end),
        len(names),
        float(schedule.sizes.max()),
    )


def compressed_iteration(profile: Profile, network: Network, plan: Plan, before: float) -> Iteration:
    """Some buckets travel compressed: one communicator, and compression takes computation. Its bound is that nothing is
    exposed."""
    pieces, names = pieces_of(profile, plan)
    flow = travel(pieces, profile, network, CompressedCost.of(network))
    around = before + profile.forward_s + profile.update_s
    return Iteration(
        around + flow.end_s,
        around + flow.backward_s,
        exposed_parts(profile, flow),
        spans(profile, flow, pieces, [_label(bucket) for bucket in names], before + profile.forward_s),
        len(names),
        float(max((piece.bytes for piece in pieces if piece.compression is None), default=0)),
    )


def across_iterations(profile: Profile, network: Network, plan: Plan, before: float) -> Iteration:
    """Communication goes on behind the next forward: one steady period, drawn from the start of backward."""
    plan.check(profile)
    if missing := plan.missing(profile):
        raise InputError(
            f"the decoupled plan leaves out {missing[0]!r}: make it again with `backbeat plan -s decoupled`"
        )
    steady = period(profile, plan, network)
    compute = profile.forward_s + profile.backward_s + profile.update_s
    bandwidth = min(steady.stalled_s, max(link_s(profile, network) - compute, 0.0))
    spans = [
        Span("compute", "backward", 0.0, profile.backward_s),
        Span("compute", "forward and update", profile.backward_s, steady.forward_end_s),
    ]
    if before > 0:
        spans.append(
            Span("compute", "further micro-batches", steady.forward_end_s, steady.forward_end_s + before),
        )
    largest = 0
    for word, phase, times in (
        ("scatter", "reduce_scatter", steady.scatters),
        ("gather", "all_gather", steady.gathers),
    ):
        buckets = [bucket.gradients for bucket in plan.buckets if bucket.phase == phase]
        for names, (start, end) in zip(buckets, times, strict=True):
            size = sum(profile.gradients[profile.index[name]].bytes for name in names)
            spans.append(Span("communicator 0", f"{word} {_label(names)}", start, end, size))
            largest = max(largest, size)
    return Iteration(
        before + steady.forward_end_s,
        before + decoupled_bound(profile, network),
        Breakdown(bandwidth_s=bandwidth, waiting_s=steady.stalled_s - bandwidth),
        tuple(spans),
        len(plan.buckets),
        float(largest),
    )


def run(profile: Profile, plan: Plan, cost: LinkCost) -> tuple[list[tuple[str, ...]], Schedule, Flow]:
    """The plan's buckets by name, as arrays, and when they travel."""
    if plan.dynamic is not None:
        plan.check(profile)
        ends, schedule, flow = fuse(profile, cost, plan.dynamic)
        order = [gradient.name for gradient in profile.gradients]
        starts = [0, *ends[:-1]]
        return [tuple(order[first:last]) for first, last in zip(starts, ends, strict=True)], schedule, flow
    schedule, names = Schedule.of_plan(profile, plan)
    return names, schedule, communicate(schedule, cost, plan.communicators)


def communicate(schedule: Schedule, cost: LinkCost, communicators: int) -> Flow:
    """The recursion where one communicator is used, the event engine otherwise."""
    return one_communicator(schedule, cost) if communicators == 1 else simulate(schedule, cost)


def _breakdown(
    profile: Profile,
    cost: LinkCost,
    schedule: Schedule,
    flow: Flow,
    end: float,
    communicators: int,
) -> Breakdown:
    """Split what is exposed after backward; the definitions stand beside the fields of `Breakdown`."""
    tail = end - profile.backward_s
    if tail <= 0:
        return Breakdown()
    moving = _covered(flow.on_link, flow.finishes, profile.backward_s)
    holding = _covered(flow.starts, flow.finishes, profile.backward_s)
    link = float(cost.work(schedule.sizes).sum()) / cost.best_efficiency(communicators)
    too_much = max(link - (profile.backward_s - float(profile.ready[0])), 0.0)
    latency, bandwidth = max(holding - moving, 0.0), min(moving, too_much)
    return Breakdown(
        latency_s=latency,
        bandwidth_s=bandwidth,
        waiting_s=max(tail - latency - bandwidth, 0.0),
    )


def _covered(starts: np.ndarray, ends: np.ndarray, after: float) -> float:
    """Length of the union of these intervals, after a moment."""
    late = ends > after
    intervals = sorted(zip(np.maximum(starts[late], after).tolist(), ends[late].tolist(), strict=True))
    total, reached = 0.0, after
    for start, stop in intervals:
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def _timeline(
    profile: Profile,
    schedule: Schedule,
    flow: Flow,
    names: list[tuple[str, ...]],
    backward: float,
    end: float,
) -> tuple[Span, ...]:
    """The computation, and every bucket on its communicator; `backward` is when the overlapping backward starts."""
    spans = [
        Span("compute", "forward", 0.0, backward),
        Span("compute", "backward", backward, backward + profile.backward_s),
        Span("compute", "update", backward + end, backward + end + profile.update_s),
    ]
    rows = zip(
        schedule.communicators,
        names,
        (flow.starts + backward).tolist(),
        (flow.finishes + backward).tolist(),
        schedule.sizes.tolist(),
        strict=True,
    )
    spans.extend(
        Span(f"communicator {communicator}", _label(bucket), start, stop, int(size))
        for communicator, bucket, start, stop, size in rows
    )
    return tuple(spans)


def _label(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
