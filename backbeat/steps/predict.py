"""One iteration, put together: compute, communication, buffers and stragglers; and where a scaling curve bends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from backbeat.cost.collectives import traffic
from backbeat.cost.stragglers import LEAST_SAMPLES, Straggling, straggling
from backbeat.errors import InputError
from backbeat.model import Framework, Network, Plan, Profile
from backbeat.model.checks import whole
from backbeat.model.network import HALVES
from backbeat.model.prediction import Band, Breakdown, NetworkBand, Prediction, Span
from backbeat.model.profile import device_alone
from backbeat.model.slowdown import slowdown_of
from backbeat.steps.compressed_cost import remarks
from backbeat.steps.framework_step import framework_iteration
from backbeat.steps.host_lane import HostLane
from backbeat.steps.iteration import Iteration, StepTimes, alone, bucket_iteration
from backbeat.steps.memory_timeline import memory_timeline
from backbeat.steps.sharded_memory import sharded_memory
from backbeat.steps.sharded_step import sharded_iteration, sharded_remarks
from backbeat.units import counted, format_bytes, format_seconds

_REPEATS = 0.05
"""Runs of one job on other people's clusters differ by about this much, whatever the network does."""
_ANALYTIC = 0.15
"""How far compute may be off that is computed from shapes. validation/cases/data_parallel has the runs."""
_NEGLIGIBLE = 0.02
"""Exposed time below this share of T(1) is not called a bottleneck."""
_ROUNDING = 1e-9
"""A plan that meets its bound may end so little before it."""
_UNLIKE = 2.0
"""Iterations that take this many times as long as their parts, or as much less, are noted: a unit may be wrong."""
_WORTH_IT = 0.5
"""Past the knee an added worker brings less than this share of what one worker does alone."""


def predict(
    profile: Profile,
    network: Network,
    plan: Plan,
    *,
    accumulation: int | None = None,
    broadcast_buffers: bool = True,
    reduction: Framework | None = None,
) -> Prediction:
    """How long one iteration takes on the network's workers under the plan, and why.

    With `accumulation` micro-batches only the last one's backward overlaps with communication. Where the plan has a
    memory part, every time, T(1) too, is that of an iteration under it, and the peak is predicted; the scaling factor
    is by one worker that keeps everything, whose work is what all of them are asked to do. A `reduction` says
    what else the framework does with the plan's buckets; gradients in the profile must then be as the framework sends
    them. Where the network has a band, the plan is simulated on a quiet and on a busy cluster, too.
    """
    worker = _Worker.of(profile, network, plan, accumulation)
    wrapped, sharded = plan.sharding is None and reduction is None, plan.sharding is not None
    slowdown = slowdown_of(worker.profile, network, sharded=sharded)
    step = _step(worker, network, plan, reduction, slowdown.factor)
    sends_buffers = broadcast_buffers and network.workers > 1 and not sharded

    def paced(there: Network, times: StepTimes) -> _Paced:
        buffers_s = broadcast_s(there, worker.profile.buffer_bytes) if sends_buffers else 0.0
        return _at_host_pace(worker, there, plan, step.buckets, times, buffers_s, wrapped=wrapped)

    typical = paced(network, step.times)
    found = _explained(worker, network, plan, step, typical, slowdown.notes)
    if network.edges is None:
        return found
    quiet, busy = (
        paced(edge, step.elsewhere(edge, slowdown_of(worker.profile, edge, sharded=sharded).factor)).paced_s
        for edge in network.edges
    )
    # A faster link may delay a bucket that shares it: by so little that it is no edge of the band.
    quiet_s = found.iteration_s + min(quiet - typical.paced_s, 0.0)
    busy_s = found.iteration_s + max(busy - typical.paced_s, 0.0)
    return replace(
        found,
        network_band=NetworkBand(
            quiet_s=quiet_s,
            busy_s=busy_s,
            quiet_scaling_factor=found.scaling_factor * found.iteration_s / quiet_s if quiet_s > 0 else 1.0,
            busy_scaling_factor=found.scaling_factor * found.iteration_s / busy_s if busy_s > 0 else 1.0,
            margin=_ANALYTIC if profile.analytic else _REPEATS,
        ),
    )


def knee(curve: Sequence[Prediction]) -> int | None:
    """The number of workers past which an added one brings less than half of what one does alone.

    Counted from one worker: it is 1 where the first point of the curve does not pay either, however the curve goes on.
    None where all of it pays: the knee lies beyond.
    """
    points = sorted(curve, key=lambda point: point.workers)
    if not points:
        raise InputError("a scaling curve needs at least one number of workers")
    workers = 1
    previous = None
    for point in points:
        if point.workers > 1:
            # Both sides times the scaling factor, which is 0 for a profile that computes nothing.
            each = point.samples_per_s / point.workers
            before = each if previous is None else previous.samples_per_s * point.scaling_factor
            added = point.samples_per_s * point.scaling_factor - before
            if added < _WORTH_IT * each * (point.workers - workers):
                return workers
        workers, previous = point.workers, point
    return None


@dataclass(frozen=True)
class _Worker:
    """One worker's iteration under the plan, without communication."""

    measured: Profile
    """As it was given."""
    profile: Profile
    """Without waiting for the host; under the plan's memory part, where it has one."""
    kept: Profile
    """The same without the memory part."""
    kept_s: float
    """T(1) of that."""
    lane: HostLane
    micro_batches: int
    peak_bytes: int | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, measured: Profile, network: Network, plan: Plan, accumulation: int | None) -> _Worker:
        lane = kept_lane = HostLane.of(measured)
        peak = None
        notes: tuple[str, ...] = ()
        profile = kept = device_alone(measured)
        if plan.memory is not None and (profile.blocks or plan.memory.segments):
            plan.check(profile)
            found = memory_timeline(measured, plan.memory, plan, workers=network.workers)
            profile, peak, notes = found.profile, found.peak_bytes, found.notes
            lane = lane.longer(found.host_more_s)
        micro_batches = profile.accumulation if accumulation is None else whole("accumulation", accumulation)
        if micro_batches < 1:
            raise InputError(f"accumulation is {micro_batches}: an iteration has at least one micro-batch")
        if plan.sharding is not None:
            held = sharded_memory(measured, plan, micro_batches=micro_batches)
            peak = held.total_bytes if held else None
        kept_s = kept_lane.paced(_compute_s(kept, micro_batches), micro_batches)
        return cls(measured, profile, kept, kept_s, lane, micro_batches, peak, notes)

    @cached_property
    def before_s(self) -> float:
        """The micro-batches before the last."""
        return (self.micro_batches - 1) * (self.profile.forward_s + self.profile.backward_s)

    @cached_property
    def device_s(self) -> float:
        return _compute_s(self.profile, self.micro_batches)

    @cached_property
    def single_s(self) -> float:
        """T(1)."""
        return self.lane.paced(self.device_s, self.micro_batches)


def _compute_s(profile: Profile, micro_batches: int) -> float:
    passes = (micro_batches - 1) * (profile.forward_s + profile.backward_s)
    return passes + profile.forward_s + profile.backward_s + profile.update_s


def _step(worker: _Worker, network: Network, plan: Plan, reduction: Framework | None, slowdown: float) -> Iteration:
    """The simulation that such a plan needs."""
    if network.workers == 1:
        return alone(worker.profile, plan, worker.before_s)
    if reduction is not None:
        return framework_iteration(worker.profile, network, plan, reduction, worker.micro_batches, slowdown)
    if plan.sharding is not None:
        return sharded_iteration(worker.kept, network, plan, micro_batches=worker.micro_batches, slowdown=slowdown)
    return bucket_iteration(worker.profile, network, plan, worker.before_s, slowdown)


class _Paced(NamedTuple):
    """A step with buffers and the host in it."""

    buffers_s: float
    """Broadcasting them."""
    device_s: float
    """With them, if the host is ahead."""
    paced_s: float
    issued_s: float
    """Of the host, issuing it."""


def _at_host_pace(
    worker: _Worker, network: Network, plan: Plan, buckets: int, times: StepTimes, buffers_s: float, *, wrapped: bool
) -> _Paced:
    """backbeat's wrapper, where the plan is `wrapped`, has a hook for each gradient, and a status message after the
    last bucket."""
    lane, micro_batches = worker.lane, worker.micro_batches
    device_s = buffers_s + times.steady_s
    if network.workers == 1:
        return _Paced(buffers_s, device_s, worker.single_s, worker.single_s)
    names = [gradient.name for gradient in worker.profile.gradients]
    host = None if network.sharded is None else network.sharded.host
    if plan.sharding is not None and host is not None and lane.by_block:
        # What FSDP2 was measured to take of the host holds its collectives.
        added_s = host.micro_batch_s(buckets, len(names), *plan.sharding.resharded_counts(names))
        lane = lane.longer(added_s, host.update_s * len(names))
        return _Paced(buffers_s, device_s, lane.paced(device_s, micro_batches), lane.step_s(micro_batches))
    sent, hooks = times.messages, len(names) if wrapped else 0
    tail_s = times.tail_s if wrapped else None
    paced = lane.paced(device_s, micro_batches, collectives=sent, gradients=hooks, tail_s=tail_s)
    return _Paced(buffers_s, device_s, paced, lane.step_s(micro_batches, collectives=sent, gradients=hooks))


def _explained(
    worker: _Worker, network: Network, plan: Plan, step: Iteration, times: _Paced, slowed: tuple[str, ...]
) -> Prediction:
    """The step with the wait for the slowest worker, and why it takes as long."""
    profile, single, micro_batches = worker.profile, worker.single_s, worker.micro_batches
    buffers, device, paced, issued = times
    waits = None
    if network.workers > 1:
        waits = straggling(profile.iteration_s, network.workers, micro_batches / profile.accumulation)
    wait = waits.wait_s if waits else 0.0
    host_alone = paced > device and issued >= paced
    iteration = paced + wait
    bound = worker.lane.paced(step.bound_s + buffers, micro_batches) + wait
    notes, extrapolated = _notes(worker.measured, network, plan, step.largest_bytes, waits)
    if paced > device:
        how = "sets the pace" if host_alone else "issues a backward after the last step's communication has ended"
        notes.append(
            f"the host {how}: a step takes {format_seconds(paced)} that would take {format_seconds(device)} "
            "if the device never waited for work"
        )
    not_kept_s = single - worker.kept_s
    if not_kept_s > _NEGLIGIBLE * single:
        notes.append(
            f"what is not kept of activations costs {format_seconds(not_kept_s)} of each step; scaling counts it as "
            "lost"
        )
    breakdown = replace(
        step.breakdown, stragglers_s=wait, buffers_s=buffers, host_s=(paced - device) - (single - worker.device_s)
    )
    return Prediction(
        strategy=plan.strategy,
        workers=network.workers,
        communicators=plan.communicators,
        buckets=step.buckets,
        iteration_s=iteration,
        single_s=single,
        scaling_factor=worker.kept_s / iteration if iteration > 0 else 1.0,
        exposed_s=iteration - single,
        bound_s=iteration if iteration < bound <= iteration * (1 + _ROUNDING) else bound,
        samples_per_s=network.workers * profile.batch_size * micro_batches / iteration if iteration > 0 else 0.0,
        breakdown=breakdown,
        bottleneck="host" if host_alone else _bottleneck(breakdown, not_kept_s, single),
        band=Band(p10_s=paced + waits.p10_s, p90_s=paced + waits.p90_s, extrapolated=waits.extrapolated)
        if waits
        else None,
        peak_bytes=worker.peak_bytes,
        extrapolated=extrapolated,
        timeline=(
            *_shifted(step.timeline, buffers, profile.buffer_bytes),
            *((Span("compute", "waiting for the host", device, paced),) if paced > device else ()),
        ),
        notes=(*worker.notes, *notes, *slowed),
    )


def _shifted(timeline: tuple[Span, ...], buffers: float, size: int) -> tuple[Span, ...]:
    """The timeline after the buffers' broadcast."""
    if not timeline or not buffers:
        return timeline
    later = (Span(span.lane, span.name, span.start_s + buffers, span.end_s + buffers, span.bytes) for span in timeline)
    return (Span("communicator 0", "buffers", 0.0, buffers, size), *later)


def broadcast_s(network: Network, size: int) -> float:
    """A broadcast of module buffers: measured where the network has it, otherwise from the all-reduce.

    An all-reduce is a reduction and a broadcast: half its steps, and the ratio of the two's traffic.
    """
    if size == 0:
        return 0.0
    if network.broadcast is not None:
        return float(network.broadcast.curve.time(size))
    curve = network.cost.isolated
    ratio = traffic("broadcast", "ring", network.workers) / traffic("all_reduce", "ring", network.workers)
    return float(curve.latency(size)) / 2 + float(curve.transfer(size)) * ratio


def _bottleneck(breakdown: Breakdown, not_kept_s: float, single: float) -> str:
    """The largest loss; `not_kept_s` is that of a memory plan."""
    fields = [field for field in Breakdown.__struct_fields__ if field != "sharding_s"]
    parts = {field.removesuffix("_s"): getattr(breakdown, field) for field in fields} | {"memory": not_kept_s}
    # `host` is negative where the device waits for communication in place of the host, which costs nothing.
    if sum(parts.values()) < _NEGLIGIBLE * single:
        return "compute"
    return max(parts, key=lambda part: parts[part])


def _notes(
    profile: Profile, network: Network, plan: Plan, largest_bytes: float, waits: Straggling | None
) -> tuple[list[str], bool]:
    """What to know of the prediction, and whether something in it is extrapolated."""
    far, from_rows = _workers_notes(network, plan)
    large = _size_notes(network, plan, largest_bytes)
    slowest = _slowest_notes(profile, network, waits)
    notes = [*_plan_notes(profile, network, plan), *from_rows, *large, *_unit_notes(profile), *slowest]
    return notes, far or bool(large) or bool(slowest)


def _plan_notes(profile: Profile, network: Network, plan: Plan) -> Iterator[str]:
    """On the profile, the network and what the plan makes of them."""
    if profile.analytic:
        yield f"the profile {profile.name} is computed from shapes and peak rates, not measured"
    yield from (f"network {network.name}: {note}" for note in network.notes)
    if plan.compressed and network.workers > 1:
        yield from remarks(profile, network, plan)
    if plan.sharding is not None:
        yield from sharded_remarks(profile, network, plan.sharding)
    if plan.workers is not None and plan.workers != network.workers:
        yield f"the plan was made for {plan.workers} workers, this is {network.workers}"
    if network.workers > 1 and 0 < len(profile.iteration_s) < LEAST_SAMPLES:
        few = counted(len(profile.iteration_s), "iteration time")
        yield f"no wait for the slowest worker is predicted: {few} say too little, {LEAST_SAMPLES} are needed"
    if plan.dynamic is None and (left := plan.missing(profile)):
        how = f"are taken to travel in one bucket after it, from {left[0]}"
        yield f"{len(left)} gradients are not in the plan and {how}"


def _one_copy(plan: Plan) -> bool:
    """All workers gather together. With several copies parts of the job do: `at` another number than the network's."""
    return plan.sharding is not None and plan.sharding.mesh.replicate == 1


def _workers_notes(network: Network, plan: Plan) -> tuple[bool, list[str]]:
    """Which numbers of workers the times come from; and whether some are extrapolated."""
    workers, far, notes = network.workers, False, []
    used = network.sources() if workers > 1 else ()
    if len(used) == 1:
        far = True
        fabric = network.topology.fabric
        how = network.topology.algorithm + (f", {fabric.kind} fabric" if fabric is not None else "")
        notes.append(f"all-reduce times at {workers} workers are extrapolated from {used[0]} ({how})")
    elif used:
        notes.append(f"all-reduce times at {workers} workers lie between those at {used[0]} and {used[1]}")
    for name in HALVES if _one_copy(plan) else ():
        if len(used := network.sources(name)) == 1:
            far = True
            notes.append(f"{name.replace('_', '-')} times at {workers} workers are extrapolated from {used[0]}")
    return far, notes


def _size_notes(network: Network, plan: Plan, largest_bytes: float) -> list[str]:
    measured = [network.largest_bytes(name) for name in HALVES] if _one_copy(plan) else []
    largest = min((size for size in measured if size is not None), default=network.largest_bytes())
    if largest is None or largest_bytes <= largest:
        return []
    what = "buckets" if plan.sharding is None else "units"
    return [f"{what} above {format_bytes(largest)} lie beyond the largest message measured"]


def _unit_notes(profile: Profile) -> list[str]:
    alone_s = profile.single_s
    usual_s = fmean(profile.iteration_s) if profile.iteration_s else alone_s
    if alone_s / _UNLIKE <= usual_s <= alone_s * _UNLIKE:
        return []
    return [
        f"the profile's iteration_s has a mean of {format_seconds(usual_s)}, forward, backward and update take "
        f"{format_seconds(alone_s)}: are both in seconds? The wait for the slowest worker is taken from the former"
    ]


def _slowest_notes(profile: Profile, network: Network, waits: Straggling | None) -> list[str]:
    if waits is None or not waits.extrapolated:
        return []
    count = len(profile.iteration_s)
    return [f"the slowest of {network.workers} workers is extrapolated from {count} iteration times"]
