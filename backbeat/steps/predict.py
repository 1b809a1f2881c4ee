"""One prediction in three stages: the step, from its graph; the wait for the slowest worker; and why it takes as long.

The first says when everything happens on the network as it typically is, quiet and busy: one graph, with other link
times. The second is computed after the step, once. The third reads what the first two found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from backbeat.cost.collectives import traffic
from backbeat.cost.stragglers import Straggling, straggling
from backbeat.engine import run
from backbeat.errors import InputError
from backbeat.model import Framework, Network, Plan, Profile
from backbeat.model.accelerator import accelerator
from backbeat.model.checks import whole
from backbeat.model.gpu_memory import MemoryByKind, device_bytes, fitting
from backbeat.model.noted import BEYOND, noted
from backbeat.model.prediction import Band, Breakdown, GapParts, NetworkBand, Note, Prediction, Span
from backbeat.model.profile import device_alone
from backbeat.model.slowdown import ComputeSlowdown, slowdown_of
from backbeat.steps.bucket_step import BucketRun, BucketWay, Explained
from backbeat.steps.host import HostLane, Period, host_issue, paced_s
from backbeat.steps.memory_timeline import memory_timeline
from backbeat.steps.model_chain import Chain, ShardedChain, chain_of
from backbeat.steps.step_memory import step_memory
from backbeat.steps.unit_step import UnitRun, UnitWay

_REPEATS = 0.05
"""Runs of one job on other people's clusters differ by about this much, whatever the network does."""
_ANALYTIC = 0.15
"""How far compute may be off that is computed from shapes. validation/cases/data_parallel has the runs."""
_NEGLIGIBLE = 0.02
"""Exposed time below this share of T(1) is not called a bottleneck."""
_ROUNDING = 1e-9
"""A plan that meets its bound may end so little before it."""
_WORTH_SAYING = 1.005
"""A slowdown of computation."""


def predict(
    profile: Profile,
    network: Network,
    plan: Plan,
    *,
    accumulation: int | None = None,
    broadcast_buffers: bool = True,
    reduction: Framework | None = None,
    gap_parts: bool = False,
) -> Prediction:
    """How long one iteration takes on the network's workers under the plan, and why.

    With `accumulation` micro-batches only the last one's backward overlaps with communication. Where the plan has a
    memory part, every time, T(1) too, is that of an iteration under it, and the peak is predicted; the scaling factor
    is by one worker that keeps everything, whose work is what all of them are asked to do. A `reduction` says
    what else the framework does with the plan's buckets; gradients in the profile must then be as the framework sends
    them. Where the network has a band, the plan is simulated on a quiet and on a busy cluster, too. With `gap_parts`
    what it takes above its bound is told by cause.
    """
    worker = _Worker.of(profile, network, plan, accumulation, reduction)
    steps = _Steps(worker, plan, reduction, broadcast_buffers=broadcast_buffers)
    step = steps.on(network)
    found = _explained(worker, network, plan, step, _waits(worker, network))
    found = replace(found, framework=None if reduction is None else reduction.name)
    if gap_parts:
        found = replace(found, gap_parts=steps.gap_parts(network, step, found))
    margin = _ANALYTIC if profile.analytic or profile.moved_from is not None else _REPEATS
    if network.edges is None:
        return replace(found, range_s=(found.iteration_s * (1 - margin), found.iteration_s * (1 + margin)))
    quiet, busy = (steps.on(edge).paced_s for edge in network.edges)
    # A faster link may delay a bucket that shares it: by so little that it is no edge of the band.
    quiet_s = found.iteration_s + min(quiet - step.paced_s, 0.0)
    busy_s = found.iteration_s + max(busy - step.paced_s, 0.0)
    band = NetworkBand(
        quiet_s=quiet_s,
        busy_s=busy_s,
        quiet_scaling_factor=found.scaling_factor * found.iteration_s / quiet_s if quiet_s > 0 else 1.0,
        busy_scaling_factor=found.scaling_factor * found.iteration_s / busy_s if busy_s > 0 else 1.0,
        margin=margin,
    )
    return replace(found, network_band=band, range_s=(band.shortest_s, band.longest_s))


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
    memory: MemoryByKind | None
    notes: tuple[Note, ...]
    chain: ShardedChain | None
    """In the units of a sharded plan."""

    @classmethod
    def of(
        cls, measured: Profile, network: Network, plan: Plan, accumulation: int | None, reduction: Framework | None
    ) -> _Worker:
        lane = kept_lane = HostLane.of(measured)
        notes: tuple[Note, ...] = ()
        profile = kept = device_alone(measured)
        if plan.memory is not None and (profile.blocks or plan.memory.segments):
            plan.check(profile)
            found = memory_timeline(measured, plan.memory, plan, workers=network.workers)
            profile, notes = found.profile, found.notes
            lane = lane.longer(found.host_more_s)
        micro_batches = profile.accumulation if accumulation is None else whole("accumulation", accumulation)
        if micro_batches < 1:
            raise InputError(f"accumulation is {micro_batches}: an iteration has at least one micro-batch")
        chain = chain_of(kept, plan) if plan.sharding is not None else None
        memory = step_memory(
            measured, plan, workers=network.workers, micro_batches=micro_batches, framework=reduction, chain=chain
        )
        kept_s = paced_s(_compute_s(kept, micro_batches), kept_lane.step_s(micro_batches))
        return cls(measured, profile, kept, kept_s, lane, micro_batches, memory, notes, chain)

    @cached_property
    def device_s(self) -> float:
        return _compute_s(self.profile, self.micro_batches)

    @cached_property
    def single_s(self) -> float:
        """T(1)."""
        return paced_s(self.device_s, self.lane.step_s(self.micro_batches))


def _compute_s(profile: Profile, micro_batches: int) -> float:
    passes = (micro_batches - 1) * (profile.forward_s + profile.backward_s)
    return passes + profile.forward_s + profile.backward_s + profile.update_s


class _AloneRun(NamedTuple):
    """One worker: nothing travels."""

    profile: Profile
    number: int
    end_s: float
    messages: int = 0

    def explained(self) -> Explained:
        update = self.end_s - self.profile.update_s
        backward = update - self.profile.backward_s
        drawn = (
            Span("compute", "forward", 0.0, backward),
            Span("compute", "backward", backward, update),
            Span("compute", "update", update, self.end_s),
        )
        return Explained(self.end_s, Breakdown(), drawn, self.number, 0.0)


class _HostedStep(NamedTuple):
    """A step on one network."""

    run: BucketRun | UnitRun | _AloneRun
    """As if the host were always ahead."""
    paced_s: float
    """With the host in it."""
    issued_s: float
    """Of the host, issuing it."""
    slowdown: ComputeSlowdown


class _Steps:
    """The step of such a plan, on one network or on several."""

    def __init__(self, worker: _Worker, plan: Plan, reduction: Framework | None, *, broadcast_buffers: bool) -> None:
        self.worker, self.plan, self.broadcast_buffers = worker, plan, broadcast_buffers
        self.wrapped = plan.sharding is None and reduction is None
        """By backbeat's wrapper: it has a hook for each gradient, and a status message after the last bucket."""
        self.names = [gradient.name for gradient in worker.profile.gradients]
        self.reduction = reduction
        self._way: BucketWay | UnitWay | None = None

    @property
    def way(self) -> BucketWay | UnitWay:
        worker, plan = self.worker, self.plan
        if self._way is None and plan.sharding is not None:
            self._way = UnitWay(worker.kept, plan, worker.micro_batches, worker.chain)
        elif self._way is None:
            self._way = BucketWay(worker.profile, plan, worker.micro_batches, self.reduction)
        return self._way

    def on(self, network: Network) -> _HostedStep:
        worker, plan, micro_batches = self.worker, self.plan, self.worker.micro_batches
        if network.workers == 1:
            plan.check(worker.profile)
            count = len(plan.buckets) if plan.sharding is None else len(plan.sharding.units)
            alone = _AloneRun(worker.profile, count, worker.device_s)
            return _HostedStep(alone, worker.single_s, worker.single_s, ComputeSlowdown())
        slowdown = slowdown_of(worker.profile, network, sharded=plan.sharding is not None)
        if plan.sharding is None:
            return self._with_buckets(network, slowdown)
        assert isinstance(self.way, UnitWay)
        run, lane, sent = self.way.on(network, slowdown.factor), worker.lane, 0
        host = None if network.sharded is None else network.sharded.host
        if host is None or not lane.by_block:
            sent = run.messages
        else:
            # What FSDP2 was measured to take of the host holds its collectives.
            counts = plan.sharding.resharded_counts(self.names)
            units = self.way.chain.count + self.way.chain.has_root
            lane = lane.longer(host.micro_batch_s(units, len(self.names), *counts), host.update_s * len(self.names))
        issued_s = lane.step_s(micro_batches, collectives=sent)
        return _HostedStep(run, paced_s(run.end_s, issued_s), issued_s, slowdown)

    def _with_buckets(self, network: Network, slowdown: ComputeSlowdown) -> _HostedStep:
        worker, micro_batches, way = self.worker, self.worker.micro_batches, self.way
        assert isinstance(way, BucketWay)
        buffers_s = broadcast_s(network, worker.profile.buffer_bytes) if self.broadcast_buffers else 0.0
        run = way.on(network, slowdown.factor, buffers_s)
        counts: dict[str, int] = {"collectives": run.messages, "gradients": len(self.names) if self.wrapped else 0}
        issued_s = worker.lane.step_s(micro_batches, **counts)
        if not (self.wrapped and worker.lane.by_block and way.dynamic is None):
            return _HostedStep(run, paced_s(run.end_s, issued_s), issued_s, slowdown)
        pieces = Chain.of_profile(worker.kept, self.plan.memory).pieces
        issue = host_issue(worker.lane, worker.measured, pieces, **counts)
        status_s = issue.after_status_s(micro_batches) + run.tail_s

        def repeated() -> Period:
            return way.repeated(network, slowdown.factor, buffers_s, issue)

        return _HostedStep(run, paced_s(run.end_s, issued_s, status_s, repeated), issued_s, slowdown)

    def gap_parts(self, network: Network, step: _HostedStep, found: Prediction) -> GapParts | None:
        """What the step takes above its bound, by cause: what it would take less without each, one after the other."""
        graph = None if isinstance(step.run, _AloneRun) else step.run.graph
        if graph is None:
            return None
        left = found.iteration_s - (found.bound_s or 0.0)
        free = graph.retimed({}, slowdowns={})
        without = (step.paced_s, step.run.end_s, run(free).end_s, run(free.unlimited()).end_s)
        parts = []
        for before, after in pairwise(without):
            parts.append(min(max(before - after, 0.0), max(left, 0.0)))
            left -= parts[-1]
        host_s, contention_s, communicators_s = parts
        return GapParts(host_s, contention_s, communicators_s, max(left, 0.0))


def _waits(worker: _Worker, network: Network) -> Straggling | None:
    """For the slowest worker."""
    if network.workers == 1:
        return None
    draws = worker.micro_batches / worker.profile.accumulation
    return straggling(worker.profile.iteration_s, network.workers, draws)


def _explained(
    worker: _Worker, network: Network, plan: Plan, step: _HostedStep, waits: Straggling | None
) -> Prediction:
    """The step with the wait for the slowest worker, and why it takes as long."""
    profile, single, micro_batches = worker.profile, worker.single_s, worker.micro_batches
    device_s, paced, why = step.run.end_s, step.paced_s, step.run.explained()
    wait = waits.wait_s if waits else 0.0
    host_alone = paced > device_s and step.issued_s >= paced
    iteration = paced + wait
    bound = paced_s(why.bound_s, worker.lane.step_s(micro_batches)) + wait
    not_kept_s = single - worker.kept_s
    notes = noted(
        worker.measured,
        network,
        plan,
        why.largest_bytes,
        slowest_extrapolated=waits is not None and waits.extrapolated,
        pieces=() if worker.chain is None else worker.chain.whole.notes,
    )
    if paced > device_s:
        notes.append(Note("host_paces" if host_alone else "host_late", {"paced_s": paced, "device_s": device_s}))
    if not_kept_s > _NEGLIGIBLE * single:
        notes.append(Note("not_kept", {"not_kept_s": not_kept_s}))
    if step.slowdown.factor >= _WORTH_SAYING:
        notes.append(Note("slowed", {"factor": step.slowdown.factor, "origin": step.slowdown.origin}))
    breakdown = replace(why.breakdown, stragglers_s=wait, host_s=(paced - device_s) - (single - worker.device_s))
    waiting = (Span("compute", "waiting for the host", device_s, paced),) if paced > device_s else ()
    samples = network.workers * profile.batch_size * micro_batches
    device = accelerator(profile.device)
    limit = None if device is None else device_bytes(device)
    return Prediction(
        strategy=plan.strategy,
        workers=network.workers,
        model=profile.model,
        cluster=network.name,
        mesh=_mesh(plan, network.workers),
        global_batch=samples,
        batch=profile.batch_size,
        micro_batches=micro_batches,
        sequence=profile.sequence_length,
        precision=profile.precision,
        parameters=worker.measured.trained,
        flops=None if profile.flops_per_sample is None else profile.flops_per_sample * samples,
        peak_flops=None if device is None else device.rate(profile.precision),
        plan=plan,
        communicators=plan.communicators,
        buckets=why.number,
        iteration_s=iteration,
        single_s=single,
        scaling_factor=worker.kept_s / iteration if iteration > 0 else 1.0,
        exposed_s=iteration - single,
        bound_s=iteration if iteration < bound <= iteration * (1 + _ROUNDING) else bound,
        samples_per_s=samples / iteration if iteration > 0 else 0.0,
        breakdown=breakdown,
        bottleneck="host" if host_alone else _bottleneck(breakdown, not_kept_s, single),
        band=Band(p10_s=paced + waits.p10_s, p90_s=paced + waits.p90_s, extrapolated=waits.extrapolated)
        if waits
        else None,
        memory=worker.memory,
        device_bytes=limit,
        fits=fitting(worker.memory, limit, "shape" if profile.analytic else "profile"),
        extrapolated=any(note.kind in BEYOND for note in notes),
        timeline=(*why.timeline, *waiting),
        notes=(*worker.notes, *notes),
    )


def _mesh(plan: Plan, workers: int) -> dict[str, int]:
    sizes = {"replicate": workers}
    if plan.sharding is not None:
        sizes = {"replicate": plan.sharding.mesh.replicate, "shard": plan.sharding.mesh.shard}
    return {name: size for name, size in sizes.items() if size > 1}


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
