"""One iteration as a training framework runs it: its overlap, its collective, and a sharded update.

Parameters that the last update sharded are gathered first: all of them before forward or, as Megatron does, the first
bucket before forward and each next one while forward works on the bucket before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import Framework, Network, Plan, Profile
from backbeat.model.prediction import Breakdown, Span
from backbeat.model.profile import DTYPE_BYTES
from backbeat.model.slowdown import least_s
from backbeat.steps.bucket_travel import BucketTravel
from backbeat.steps.iteration import BucketRun, Iteration, StepTimes, exposed_breakdown, least_end_s
from backbeat.steps.schedule import Schedule, capped, running_sums
from backbeat.steps.sharded_cost import half_curve


def framework_iteration(
    profile: Profile, network: Network, plan: Plan, reduction: Framework, micro_batches: int, slowdown: float = 1.0
) -> Iteration:
    """The plan's buckets, reduced as the framework does it. The profile's gradients are as large as they travel."""
    schedule, buckets = Schedule.of_plan(profile, plan)
    hides = reduction.overlapped != "none"
    sent = schedule if hides else replace(schedule, ready=np.full_like(schedule.ready, profile.backward_s))
    travel = BucketTravel(sent, profile.backward_s)
    # With "every" each micro-batch ends as the last does; otherwise those before it only compute.
    repeats = micro_batches if reduction.overlapped == "every" else 1
    update = reduction.updated_s(profile.update_s, network.workers)
    before = (micro_batches - repeats) * (profile.forward_s + profile.backward_s)

    def on(there: Network, factor: float) -> tuple[BucketRun, GatheredForward, float]:
        """The buckets, the forward before them, and when the backward begins that they overlap with last."""
        flow, clock = travel.at(_cost(there, reduction), factor if hides else 1.0)
        run = BucketRun(buckets, sent, flow, clock, profile.backward_s)
        gathered = gather_before(profile, there, reduction, factor)
        return run, gathered, gathered.forward_end_s + before + (repeats - 1) * (profile.forward_s + run.end_s)

    def elsewhere(other: Network, factor: float) -> StepTimes:
        run, gathered, start = on(other, factor)
        messages = len(buckets) + len(gathered.spans)
        return StepTimes(start + run.end_s + update, run.end_s - run.backward_end_s, messages)

    run, gathered, start = on(network, slowdown)
    cost, communicators = _cost(network, reduction), plan.communicators
    exposed = exposed_breakdown(profile, cost, run, communicators)
    compute = micro_batches * (profile.forward_s + profile.backward_s) + update
    bound = compute - profile.backward_s + least_end_s(profile, cost, communicators, slowdown)
    return run.iteration(
        steady_s=start + run.end_s + update,
        bound_s=bound,
        breakdown=Breakdown(
            latency_s=repeats * exposed.latency_s,
            bandwidth_s=repeats * exposed.bandwidth_s,
            waiting_s=repeats * exposed.waiting_s,
            contention_s=repeats * exposed.contention_s + gathered.contention_s,
            gather_s=gathered.stalled_s,
            sharding_s=update - profile.update_s,
        ),
        elsewhere=elsewhere,
        backward=start,
        update_s=update,
        forward=gathered.forward_start_s,
        gathers=gathered.spans,
    )


def _cost(network: Network, reduction: Framework) -> LinkCost:
    if reduction.collective == "reduce_scatter":
        return LinkCost(half_curve(network, "reduce_scatter"))
    return network.cost


@dataclass(frozen=True, slots=True)
class GatheredForward:
    """The first forward of an iteration, and the parameters that are gathered for it; times count from the
    start of the iteration."""

    forward_start_s: float
    forward_end_s: float
    stalled_s: float
    """Forward waiting for parameters."""
    contention_s: float
    spans: tuple[Span, ...]


def gather_before(profile: Profile, network: Network, reduction: Framework, slowdown: float) -> GatheredForward:
    """Gather what the last update sharded, before forward or behind it."""
    if not reduction.zero:
        return GatheredForward(0.0, profile.forward_s, 0.0, 0.0, ())
    rows = gather_parts(profile, network, reduction)
    times, parts = [seconds for seconds, _, _ in rows], [(size, compute) for _, compute, size in rows]
    starts: list[float] = []
    now = contention = 0.0
    if reduction.hides_gathers:
        # Forward enters a bucket once it is there; the next one is gathered from then on.
        starts.append(0.0)
        now = begun = times[0]
        for index, (_, compute) in enumerate(parts):
            ahead = times[index + 1] if index + 1 < len(parts) else 0.0
            starts.append(now)
            slowed = min(compute * slowdown, least_s(compute, ahead, slowdown))
            contention += slowed - compute
            now += max(slowed, ahead)
        starts.pop()
    else:
        *starts, begun = running_sums(times).tolist()
        now = begun + profile.forward_s
    spans = tuple(
        Span("communicator 0", f"all-gather {index + 1} of {len(parts)}", start, start + seconds, int(size))
        for index, (start, seconds, (size, _)) in enumerate(zip(starts, times, parts, strict=True))
    )
    return GatheredForward(begun, now, now - profile.forward_s - contention, contention, spans)


def gather_parts(profile: Profile, network: Network, reduction: Framework) -> list[tuple[float, float, float]]:
    """Of each message: what it takes, the forward that needs it, and its bytes."""
    if not reduction.zero:
        return []
    width = DTYPE_BYTES[reduction.gather_dtype or profile.gradient_dtype]
    sizes = profile.sizes[::-1] * (width / DTYPE_BYTES[profile.gradient_dtype])
    ends = [len(sizes)]
    if reduction.gather_elements is not None:
        cap = width * reduction.cap(reduction.gather_elements, network.workers)
        ends = capped(sizes.tolist(), [float(cap)])
    sums, computed = running_sums(sizes).tolist(), running_sums(_forward_s(profile)).tolist()
    bounds = list(pairwise([0, *ends]))
    curve = half_curve(network, "all_gather")
    parts = [(sums[last] - sums[first], computed[last] - computed[first]) for first, last in bounds]
    return [(float(curve.time(size)), forward_s, size) for size, forward_s in parts]


def _forward_s(profile: Profile) -> NDArray[np.float64]:
    """Forward time of each gradient's module, in the order forward runs: the reverse of ready order. Where the profile
    lacks some, all are taken from the shape of backward."""
    known = [gradient.forward_s for gradient in profile.gradients]
    spans = np.diff(profile.ready, prepend=0.0) if None in known else np.array(known, dtype=np.float64)
    total = float(spans.sum())
    shares = spans / total if total > 0 else np.full(len(spans), 1 / len(spans))
    return np.asarray(shares * profile.forward_s)[::-1]
