"""One iteration, put together: compute, communication, buffers and stragglers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backbeat.cost.collectives import traffic
from backbeat.cost.curve import Curve
from backbeat.errors import InputError
from backbeat.model.prediction import Band, Breakdown, Prediction, Span
from backbeat.simulate.bound import communication_bound
from backbeat.simulate.dynamic import fuse
from backbeat.simulate.engine import simulate
from backbeat.simulate.jitter import Straggling, straggling
from backbeat.simulate.recursion import one_channel
from backbeat.simulate.schedule import Flow, Schedule

if TYPE_CHECKING:
    from backbeat.cost import LinkCost
    from backbeat.model import Network, Plan, Profile

_NEGLIGIBLE = 0.02
"""Exposed time below this share of T(1) is not called a bottleneck."""


def predict(
    profile: Profile,
    network: Network,
    plan: Plan | str,
    *,
    accumulation: int | None = None,
    broadcast_buffers: bool = True,
) -> Prediction:
    """How long one iteration takes on the network's workers under the plan (or the named strategy), and why.

    With `accumulation` micro-batches only the last one's backward overlaps with communication.
    """
    if isinstance(plan, str):
        from backbeat.planners import propose  # late: planners stand to the right of simulate

        plan = propose(profile, network, strategy=plan)
    micro_batches = profile.accumulation if accumulation is None else accumulation
    if micro_batches < 1:
        raise InputError(f"accumulation is {micro_batches}: an iteration has at least one micro-batch")
    cost = network.cost
    names, schedule, flow = run(profile, plan, cost)
    channels = max(plan.channels, 1)

    before = (micro_batches - 1) * (profile.forward_s + profile.backward_s) + profile.forward_s
    single = before + profile.backward_s + profile.update_s
    alone = network.workers == 1
    end = profile.backward_s if alone else max(profile.backward_s, flow.end_s)
    buffers = broadcast_s(network, profile.buffer_bytes) if broadcast_buffers and not alone else 0.0
    waits = None if alone else straggling(profile.iteration_s, network.workers, micro_batches)
    wait = waits.wait_s if waits else 0.0
    steady = buffers + before + end + profile.update_s
    iteration = steady + wait
    bound_end = profile.backward_s if alone else communication_bound(profile, cost, channels)
    notes, extrapolated = _notes(profile, network, plan, schedule, waits)
    breakdown = _breakdown(profile, cost, schedule, flow, end, channels, wait, buffers)
    return Prediction(
        strategy=plan.strategy,
        workers=network.workers,
        channels=plan.channels,
        groups=len(names),
        iteration_s=iteration,
        single_s=single,
        scaling_factor=single / iteration if iteration > 0 else 1.0,
        exposed_s=iteration - single,
        bound_s=before + max(profile.backward_s, bound_end) + profile.update_s + buffers + wait,
        samples_per_s=network.workers * profile.batch_size * micro_batches / iteration if iteration > 0 else 0.0,
        breakdown=breakdown,
        bottleneck=_bottleneck(breakdown, single),
        band=Band(p10_s=steady + waits.p10_s, p90_s=steady + waits.p90_s, extrapolated=waits.extrapolated)
        if waits
        else None,
        extrapolated=extrapolated,
        timeline=() if alone else _timeline(profile, schedule, flow, names, buffers, before, end),
        notes=tuple(notes),
    )


def run(profile: Profile, plan: Plan, cost: LinkCost) -> tuple[list[tuple[str, ...]], Schedule, Flow]:
    """The plan's groups by name, as arrays, and when they travel."""
    if plan.dynamic is not None:
        plan.check(profile)
        ends, schedule, flow = fuse(profile, cost, plan.dynamic)
        order = [gradient.name for gradient in profile.gradients]
        starts = [0, *ends[:-1]]
        return [tuple(order[first:last]) for first, last in zip(starts, ends, strict=True)], schedule, flow
    schedule, names = Schedule.of_plan(profile, plan)
    return names, schedule, communicate(schedule, cost, plan.channels)


def communicate(schedule: Schedule, cost: LinkCost, channels: int) -> Flow:
    """The recursion where one channel is used, the event engine otherwise."""
    return one_channel(schedule, cost) if channels == 1 else simulate(schedule, cost)


def broadcast_s(network: Network, size: int) -> float:
    """A broadcast of module buffers: measured where the network has it, otherwise from the all-reduce.

    An all-reduce is a reduction and a broadcast: half its steps, and the ratio of the two's traffic.
    """
    if size == 0:
        return 0.0
    if network.broadcast is not None:
        return float(Curve.of(network.broadcast).time(size))
    curve = network.cost.isolated
    ratio = traffic("broadcast", "ring", network.workers) / traffic("all_reduce", "ring", network.workers)
    return float(curve.startup(size)) / 2 + float(curve.work(size)) * ratio


def _breakdown(
    profile: Profile,
    cost: LinkCost,
    schedule: Schedule,
    flow: Flow,
    end: float,
    channels: int,
    wait: float,
    buffers: float,
) -> Breakdown:
    """Split what is exposed after backward; the definitions stand beside the fields of `Breakdown`."""
    tail = end - profile.backward_s
    if tail <= 0:
        return Breakdown(stragglers_s=wait, buffers_s=buffers)
    moving = _covered(flow.on_link, flow.finishes, profile.backward_s)
    holding = _covered(flow.starts, flow.finishes, profile.backward_s)
    link = float(cost.work(schedule.sizes).sum()) / cost.best_efficiency(channels)
    too_much = max(link - (profile.backward_s - float(profile.ready[0])), 0.0)
    startup, bandwidth = max(holding - moving, 0.0), min(moving, too_much)
    return Breakdown(
        startup_s=startup,
        bandwidth_s=bandwidth,
        waiting_s=max(tail - startup - bandwidth, 0.0),
        stragglers_s=wait,
        buffers_s=buffers,
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


def _bottleneck(breakdown: Breakdown, single: float) -> str:
    parts = {
        "startup": breakdown.startup_s,
        "bandwidth": breakdown.bandwidth_s,
        "waiting": breakdown.waiting_s,
        "stragglers": breakdown.stragglers_s,
        "buffers": breakdown.buffers_s,
    }
    if sum(parts.values()) < _NEGLIGIBLE * single:
        return "compute"
    return max(parts, key=lambda part: parts[part])


def _timeline(
    profile: Profile,
    schedule: Schedule,
    flow: Flow,
    names: list[tuple[str, ...]],
    buffers: float,
    before: float,
    end: float,
) -> tuple[Span, ...]:
    backward = buffers + before
    spans = [
        Span("compute", "forward", buffers, backward),
        Span("compute", "backward", backward, backward + profile.backward_s),
        Span("compute", "update", backward + end, backward + end + profile.update_s),
    ]
    if buffers:
        spans.insert(0, Span("channel 0", "buffers", 0.0, buffers, profile.buffer_bytes))
    rows = zip(
        schedule.channels,
        names,
        (flow.starts + backward).tolist(),
        (flow.finishes + backward).tolist(),
        schedule.sizes.tolist(),
        strict=True,
    )
    spans.extend(
        Span(f"channel {channel}", _label(group), start, stop, int(size)) for channel, group, start, stop, size in rows
    )
    return tuple(spans)


def _label(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def _notes(
    profile: Profile, network: Network, plan: Plan, schedule: Schedule, waits: Straggling | None
) -> tuple[list[str], bool]:
    notes: list[str] = []
    extrapolated = False
    if profile.analytic:
        notes.append(f"the profile {profile.name} is computed from shapes and peak rates, not measured")
    if plan.workers is not None and plan.workers != network.workers:
        notes.append(f"the plan was made for {plan.workers} workers, this is {network.workers}")
    if plan.dynamic is None and (left := plan.missing(profile)):
        notes.append(f"{len(left)} gradients are not in the plan and travel in one group behind it, from {left[0]}")
    if network.moved_from is not None:
        extrapolated = True
        notes.append(
            f"all-reduce times at {network.workers} workers are extrapolated from {network.moved_from.workers} "
            f"({network.topology.algorithm})"
        )
    points = (network.moved_from.all_reduce if network.moved_from else network.all_reduce).points
    if points and float(schedule.sizes.max()) > points[-1][0]:
        extrapolated = True
        notes.append(f"groups above {points[-1][0]} bytes lie beyond the largest message measured")
    if waits is not None and waits.extrapolated:
        extrapolated = True
        notes.append(
            f"the slowest of {network.workers} workers is extrapolated from {len(profile.iteration_s)} iteration times"
        )
    return notes, extrapolated
