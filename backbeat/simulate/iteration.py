"""One iteration's computation and communication, before buffers and stragglers: how long, why, and drawn in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from backbeat.cost import LinkCost
from backbeat.model import DynamicFusion, Network, Plan, Profile
from backbeat.model.prediction import Breakdown, Span
from backbeat.simulate.bound import communication_bound
from backbeat.simulate.compressed_cost import CompressedCost, compressed_flow, exposed_parts, pieces_of
from backbeat.simulate.contention import ComputeClock, Messages, contended, least_s
from backbeat.simulate.engine import FusedFlow, communicate, fuse
from backbeat.simulate.schedule import Flow, Schedule, covered_s
from backbeat.units import first_to_last


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


def alone(profile: Profile, plan: Plan, before: float) -> Iteration:
    """One worker: nothing travels."""
    plan.check(profile)
    backward = before + profile.forward_s
    update = backward + profile.backward_s
    end = update + profile.update_s
    count = len(plan.buckets) if plan.sharding is None else len(plan.sharding.units)
    return Iteration(
        steady_s=end,
        bound_s=end,
        breakdown=Breakdown(),
        timeline=compute_spans(backward, update, update, end),
        buckets=count,
        largest_bytes=0.0,
    )


def compute_spans(
    backward: float, backward_end: float, update: float, end: float, *, forward: float = 0.0, word: str = "backward"
) -> tuple[Span, ...]:
    """The computation, by when each part begins; other micro-batches count as forward."""
    return (
        Span("compute", "forward", forward, backward),
        Span("compute", word, backward, backward_end),
        Span("compute", "update", update, end),
    )


def within_iteration(profile: Profile, network: Network, plan: Plan, before: float, slowdown: float = 1.0) -> Iteration:
    """Communication ends before the update; backward takes `slowdown` times as long beside it."""
    cost = network.cost
    names, schedule, flow, clock = run(profile, plan, cost, slowdown)
    backward_end = float(clock.when(profile.backward_s))
    end = max(backward_end, flow.end_s)
    backward, around = before + profile.forward_s, before + profile.forward_s + profile.update_s
    return Iteration(
        steady_s=around + end,
        bound_s=around + least_end_s(profile, cost, plan.communicators, slowdown),
        breakdown=exposed_breakdown(profile, cost, schedule, flow, clock, plan.communicators),
        timeline=(
            *compute_spans(backward, backward + backward_end, backward + end, backward + end + profile.update_s),
            *travel_spans(schedule.communicators, map(first_to_last, names), flow, schedule.sizes, backward),
        ),
        buckets=len(names),
        largest_bytes=float(schedule.sizes.max()),
    )


def compressed_iteration(
    profile: Profile, network: Network, plan: Plan, before: float, slowdown: float = 1.0
) -> Iteration:
    """Some buckets travel compressed: one communicator, and compression takes computation. Its bound is that nothing is
    exposed."""
    pieces, names = pieces_of(profile, plan)
    flow = compressed_flow(pieces, profile, CompressedCost.of(network), slowdown)
    backward, around = before + profile.forward_s, before + profile.forward_s + profile.update_s
    end, computed = backward + flow.end_s, backward + flow.backward_s
    labels = [
        first_to_last(bucket) + (" (topk)" if piece.compression else "")
        for bucket, piece in zip(names, pieces, strict=True)
    ]
    return Iteration(
        steady_s=around + flow.end_s,
        bound_s=around + flow.backward_s - flow.contention_s,
        breakdown=exposed_parts(profile, flow),
        timeline=(
            *compute_spans(backward, computed, end, end + profile.update_s, word="backward and compression"),
            *travel_spans([0] * len(pieces), labels, flow, [piece.sent_bytes for piece in pieces], backward),
        ),
        buckets=len(names),
        largest_bytes=float(max((piece.bytes for piece in pieces if piece.compression is None), default=0)),
    )


def run(
    profile: Profile, plan: Plan, cost: LinkCost, slowdown: float = 1.0
) -> tuple[list[tuple[str, ...]], Schedule, Flow, ComputeClock]:
    """The plan's buckets by name, as arrays, when they travel, and how far computation is meanwhile."""
    if plan.dynamic is not None:
        plan.check(profile)
        fused, clock = fuse_beside(profile, cost, plan.dynamic, slowdown)
        order = [gradient.name for gradient in profile.gradients]
        names = [tuple(order[first:last]) for first, last in pairwise([0, *fused.ends])]
        return names, Schedule.of_ends(profile, fused.ends), fused, clock
    schedule, names = Schedule.of_plan(profile, plan)
    return names, schedule, *communicate_beside(schedule, cost, plan.communicators, slowdown)


def fuse_beside(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, slowdown: float
) -> tuple[FusedFlow, ComputeClock]:
    """Buckets formed at run time, and the computation that takes `slowdown` times as long beside them."""
    return contended(lambda ready: fuse(profile, cost, settings, ready), profile.ready, slowdown)


def communicate_beside(
    schedule: Schedule, cost: LinkCost, communicators: int, slowdown: float
) -> tuple[Flow, ComputeClock]:
    """The buckets, and the computation that takes `slowdown` times as long beside them."""
    return contended(
        lambda ready: communicate(replace(schedule, ready=ready), cost, communicators), schedule.ready, slowdown
    )


def exposed_breakdown(
    profile: Profile,
    cost: LinkCost,
    schedule: Schedule,
    flow: Flow,
    clock: ComputeClock,
    communicators: int,
) -> Breakdown:
    """Split what is exposed beside and after backward; the definitions stand beside the fields of `Breakdown`."""
    backward_end, first = (float(clock.when(done)) for done in (profile.backward_s, profile.ready[0]))
    contention = backward_end - profile.backward_s
    tail = flow.end_s - backward_end
    if tail <= 0:
        return Breakdown(contention_s=contention)
    moving = covered_s(flow.on_link.tolist(), flow.finishes.tolist(), backward_end)
    holding = covered_s(flow.starts.tolist(), flow.finishes.tolist(), backward_end)
    link = float(cost.transfer(schedule.sizes).sum()) / cost.best_efficiency(communicators)
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
    return max(least_s(profile.backward_s, on_link, slowdown), communication_bound(profile, cost, communicators))


def travel_spans(
    communicators: Iterable[int], labels: Iterable[str], flow: Messages, sizes: Iterable[float], backward: float
) -> tuple[Span, ...]:
    """Every bucket on its communicator; `backward` is when the overlapping backward starts."""
    return tuple(
        Span(f"communicator {communicator}", label, backward + float(start), backward + float(stop), int(size))
        for communicator, label, start, stop, size in zip(
            communicators, labels, flow.starts, flow.finishes, sizes, strict=True
        )
    )
