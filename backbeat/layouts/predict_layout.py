"""One step of a transformer under a layout: stages, pipeline, replicas, memory."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypedDict

import msgspec

from backbeat.cost.operator_model import OperatorModel
from backbeat.errors import InputError
from backbeat.layouts.architectures import transformer
from backbeat.layouts.layout_memory import MemoryByKind, layout_memory
from backbeat.layouts.layout_prediction import COMPUTE, Family, LayoutPrediction, StepBreakdown
from backbeat.layouts.measured_block import MeasuredBlock, measured_block
from backbeat.layouts.pipeline import PipelineRun, closed_form, run_pipeline
from backbeat.layouts.possible_layout import check_layout
from backbeat.layouts.replicas import ReplicaTimer, ReplicaTimes
from backbeat.layouts.slow_ranks import check_stragglers, slow_pipelines, step_wait
from backbeat.layouts.stage_layers import StageLayers, split_layers
from backbeat.layouts.stage_times import PartSeconds, StageTimer, StageTimes
from backbeat.layouts.transformer import Transformer
from backbeat.layouts.unit_passes import UnitPasses
from backbeat.model import Network, Profile
from backbeat.model.accelerator import operator_model
from backbeat.model.cluster import Cluster, cluster_of
from backbeat.model.files import checked
from backbeat.model.framework import Framework, framework_named
from backbeat.model.layout import Job, Layout, job_of
from backbeat.model.prediction import Span

ModelInput = Transformer | str | os.PathLike[str] | Mapping[str, Any]
ClusterInput = Cluster | Network | str | os.PathLike[str]
PREDICTED: tuple[Family, ...] = ("closed-form", "events")
"""The families that `predict` answers in."""
ERROR, ERROR_WITH_EXPERTS = 0.13, 0.35
"""How far nine of ten published layouts are off, beyond what the network's band explains: 112 rows without experts and
41 with, of the development rows of validation."""
_TOO_LONG = "the pipeline has too many operations to be simulated: its time is the closed form's"
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class PredictorOptions(TypedDict, total=False):
    """What `predict` and `search` take beside the job; `predictor_of` has the defaults."""

    framework: str | Framework
    overlap: str | None
    """What hides behind computation: none, dp or dp+tp. By default what the framework hides."""
    dispatcher: str | None
    """Of tokens to experts: alltoall or deepep."""
    accelerator: str | None
    imbalance: float
    """The busiest expert rank's tokens over the average's."""
    compute_factor: float
    """How many times as long computation takes as the operator model says; a measured step of one layout gives it."""
    block: Profile | str | os.PathLike[str] | None
    """Gives it too: a measured profile of one of the model's dense layers."""
    stragglers: Mapping[int, float] | None
    """Ranks that compute more slowly, with their slowdown: {13: 1.3}."""
    contention: bool | None
    """Count what computation loses beside communication. By default only with a `block`: other rates hold it."""


def predict(
    model: ModelInput,
    cluster: ClusterInput,
    layout: Layout | str | None = None,
    *,
    global_batch: int,
    sequence: int,
    gpus: int | None = None,
    precision: str = "bf16",
    family: Family = "events",
    band: bool = True,
    **given: Any,
) -> LayoutPrediction:
    """Predict a step.

    The layout is given whole (`Layout`, or text as the command line takes it) or by its fields: dp=8, tp=4, pp=2, cp=1,
    ep=1, micro_batch=1, recompute="selective", schedule="1f1b", chunks=1, zero=1. Further options are those of
    `PredictorOptions`: framework="megatron", accelerator="h100", imbalance=1.2, compute_factor=1.1, block="layer.json",
    stragglers={13: 1.3}, contention=True.

    >>> found = predict("llama-3-8b", "dgx-h100", dp=8, tp=2, global_batch=256, sequence=8192, recompute="full")
    >>> found.fits, 0.3 < found.mfu < 0.6
    (True, True)
    """
    options = {name: given[name] for name in PredictorOptions.__annotations__ if name in given}
    fields = {name: value for name, value in given.items() if name not in options}
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    unknown = next((name for name in fields if name not in Layout.__struct_fields__), None)
    if unknown is not None:
        raise InputError(f"a layout has no {unknown!r}: it has {', '.join(Layout.__struct_fields__)}")
    if layout is None or fields:
        layout = checked({**msgspec.to_builtins(layout or Layout()), **fields}, Layout, "the layout: ")
    if family not in PREDICTED:
        raise InputError(f"family is {family!r}: predicted are {' and '.join(PREDICTED)}; `backbeat lab` executes")
    predictor = predictor_of(model, cluster, job_of(global_batch, sequence, precision), **options)
    check_layout(predictor.model, layout, predictor.job, gpus)
    check_stragglers(predictor.stragglers, layout.gpus, predictor.cluster.per_node)
    found = predictor.predict(layout, family)
    return predictor.banded(found) if band else found


def predictor_of(
    model: ModelInput,
    cluster: ClusterInput,
    job: Job,
    *,
    framework: str | Framework = "megatron",
    overlap: str | None = None,
    dispatcher: str | None = None,
    accelerator: str | None = None,
    imbalance: float = 1.0,
    compute_factor: float = 1.0,
    block: Profile | str | os.PathLike[str] | None = None,
    stragglers: Mapping[int, float] | None = None,
    contention: bool | None = None,
) -> LayoutPredictor:
    """The predictor of this job's layouts, made of what `predict` and `search` take."""
    there = cluster_of(cluster, accelerator)
    # Rates fitted to whole published steps hold what computation loses beside communication; a block's do not.
    counted = block is not None if contention is None else contention
    if counted != there.contention:
        there = replace(there, contention=counted)
    found = LayoutPredictor(
        model=transformer(model),
        cluster=there,
        job=job,
        framework=framework_named(framework, layouts=True, overlap=overlap, dispatcher=dispatcher),
        imbalance=imbalance,
        compute_factor=compute_factor,
        stragglers=stragglers or {},
    )
    return found if block is None else replace(found, block=measured_block(block, found))


_operators = lru_cache(maxsize=32)(operator_model)


@dataclass(frozen=True, kw_only=True)
class LayoutPredictor:
    """Predicts layouts of one job on one cluster."""

    model: Transformer
    cluster: Cluster
    job: Job
    framework: Framework
    imbalance: float = 1.0
    compute_factor: float = 1.0
    """Given by the caller; a measured block has a factor of its own on top."""
    block: MeasuredBlock | None = None
    stragglers: Mapping[int, float] = field(default_factory=dict)
    spun: bool = False
    """Ranks spin their computation, and their hosts do not run ahead of it."""
    pieces: dict[Hashable, StageTimes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Those that were run."""
    memories: dict[Layout, MemoryByKind] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < float("inf"):
            raise InputError(f"imbalance is {self.imbalance}: the busiest rank has at least the average, 1 or more")
        if not 0 < self.compute_factor < float("inf"):
            raise InputError(f"compute_factor is {self.compute_factor}: it is measured over predicted time, above zero")

    @cached_property
    def operators(self) -> OperatorModel:
        return _operators(self.cluster.accelerator, self.job.precision)

    @cached_property
    def _edges(self) -> tuple[LayoutPredictor, ...]:
        """The same on a quiet and on a busy cluster, where these are known."""
        return tuple(replace(self, cluster=each) for each in self.cluster.edges or ())

    def memory(self, layout: Layout) -> MemoryByKind:
        """What one GPU holds. Quick to compute, so layouts that do not fit need not be timed."""
        if layout not in self.memories:
            self.memories[layout] = layout_memory(self.model, layout, self.job, self.framework, self.imbalance)
        return self.memories[layout]

    def timer(self, layout: Layout, slowdown: float = 1.0) -> StageTimer:
        """Of stages that compute `slowdown` times as long as healthy ones."""
        parts = (self.model, layout, self.job, self.cluster, self.operators, self.framework)
        return StageTimer(
            *parts, imbalance=self.imbalance, compute_factor=self._factor * slowdown, spun=self.spun, known=self.pieces
        )

    def fits(self, layout: Layout) -> bool:
        return self.memory(layout).total <= self.cluster.accelerator.memory_bytes

    def banded(self, found: LayoutPrediction) -> LayoutPrediction:
        """The same prediction, with the range of times to expect."""
        quiet = busy = 1.0
        if self._edges:
            middle, *edges = (each.predict(found.layout, "closed-form").step_s for each in (self, *self._edges))
            quiet, busy = (each / middle for each in edges)
        off = 1 + (ERROR_WITH_EXPERTS if self.model.experts else ERROR)
        return msgspec.structs.replace(found, band_s=(found.step_s * quiet / off, found.step_s * busy * off))

    def predict(self, layout: Layout, family: Family = "events", *, timeline: bool = True) -> LayoutPrediction:
        """Predict a layout that the caller has checked. Steps of many micro-batches are predicted faster without a
        `timeline`."""
        even = self._step_times(layout, family, (1.0,) * layout.pp, listed=timeline)
        found = self._assembled(layout, family, even)
        if self.stragglers:
            found = self._with_slow_ranks(found, even)
        return found if self.block is None else self._with_waits(found, self.block)

    def _step_times(self, layout: Layout, family: Family, slowdowns: Sequence[float], *, listed: bool) -> _StepTimes:
        """One pipeline, whose stages compute `slowdowns` times as long as healthy ones."""
        pp, count = layout.pp, layout.micro_batches(self.job)
        kinds = split_layers(self.model, layout, by_cost=self.framework.stages_by_cost)
        replicas = ReplicaTimer(self.model, layout, self.cluster, self.operators, self.framework)
        timers = {slowdown: self.timer(layout, slowdown) for slowdown in set(slowdowns)}
        # What the framework adds to a micro-batch, half of it in each direction.
        pass_s = self.framework.pass_s / layout.chunks
        added = StageTimes(pass_s / 2, pass_s / 2, 0.0, PartSeconds(host=pass_s))
        runs: dict[tuple[float, StageLayers], UnitPasses] = {}
        for index, kind in enumerate(kinds):
            slowdown = slowdowns[index % pp]
            if (slowdown, kind) not in runs:
                runs[slowdown, kind] = replicas.unit_passes(timers[slowdown].pieces_of(kind), kind)
        units = [runs[slowdowns[index % pp], kind] for index, kind in enumerate(kinds)]
        times = [each.times + added for each in units]
        sent_bytes = 2 * layout.tokens(self.job) * self.model.hidden
        send = self._send_s(layout, sent_bytes)
        if family == "events":
            streams, late = self.framework.streams, self.cluster.late_s(sent_bytes / layout.tp)
            passes = run_pipeline(layout.schedule, pp, count, times, send, streams, late, listed=listed)
        else:
            passes = closed_form(layout.schedule, pp, count, times, send)
        stages = [sum(times[stage::pp], StageTimes()) for stage in range(pp)]
        windows = [end - last for end, last in zip(passes.end_s, passes.last_backward_s, strict=True)]
        known: dict[Hashable, ReplicaTimes] = {}
        afters = []
        for stage in range(pp):
            own = tuple(kinds[stage::pp])
            # Stages alike end alike, but for rounding.
            key = (own, slowdowns[stage], f"{windows[stage]:.9e}")
            if key not in known:
                known[key] = replicas.after(own, windows[stage], stages[stage], simulated=family == "events")
            afters.append(known[key])
        updates = [each.update_s * self._factor * slow for each, slow in zip(afters, slowdowns, strict=True)]
        idle = 1 - count * sum(each.total_s for each in times) / pp / passes.seconds
        first_s = max(sum(each.gather_s for each in units[stage::pp]) for stage in range(pp))
        gather_s = max(first_s, *(each.gather.seconds for each in afters))
        return _StepTimes(stages, passes, afters, max(updates), gather_s, max(0.0, idle))

    @property
    def _factor(self) -> float:
        return self.compute_factor * (self.block.factor if self.block else 1.0)

    def _send_s(self, layout: Layout, size: float) -> float:
        """Activations of a micro-batch to the next stage; without sequence parallelism Megatron scatters and gathers
        them, so that each rank sends its share."""
        if layout.pp == 1:
            return 0.0
        sent = self.cluster.send_s(size / layout.tp, layout.pp, layout.stage_gpus)
        if layout.tp > 1 and not layout.sequence_parallel:
            sent += self.cluster.collective_s("all_gather", size, layout.tp)
        return sent

    def _assembled(self, layout: Layout, family: Family, times: _StepTimes) -> LayoutPrediction:
        pp, count, passes = layout.pp, layout.micro_batches(self.job), times.passes
        busiest = max(times.stages, key=lambda each: sum(each.parts))
        parts = busiest.parts.times(count)._asdict()
        sharded = count * (busiest.total_s - sum(busiest.parts)) if layout.zero >= 2 else 0.0
        idle = passes.seconds - count * busiest.total_s
        last = max(range(pp), key=lambda stage: passes.end_s[stage] + times.afters[stage].reduce.seconds)
        reducing = times.reduced_s - passes.seconds
        slower = min(times.afters[last].reduce.slower_s, reducing)
        gather = max(times.afters, key=lambda each: each.gather.seconds).gather
        parts["contention"] += slower + gather.slower_s
        breakdown = StepBreakdown(
            **parts,
            parameters=sharded,
            bubble=max(0.0, idle) if pp > 1 else 0.0,
            reduce=reducing - slower,
            update=times.update_s,
            gather=times.gather_s - gather.slower_s,
        )
        peak = self.cluster.accelerator.rate(self.job.precision) or 0.0
        flops = self.model.flops_per_token(self.job.sequence) * self.job.tokens
        return LayoutPrediction(
            model=self.model.name,
            cluster=self.cluster.name,
            layout=layout,
            job=self.job,
            gpus=layout.gpus,
            family=family,
            step_s=times.step_s,
            mfu=flops / (times.step_s * layout.gpus * peak),
            memory=self.memory(layout),
            limit_bytes=self.cluster.accelerator.memory_bytes,
            breakdown=breakdown,
            bubble_share=times.idle_share,
            timeline=times.spans(),
            notes=(
                f"compute: {self.operators.origin}",
                *(self.cluster.notes if breakdown.contention else ()),
                *((_TOO_LONG,) if family == "events" and not times.passes.simulated else ()),
            ),
        )

    def _with_slow_ranks(self, found: LayoutPrediction, even: _StepTimes) -> LayoutPrediction:
        """Everybody waits for the pipeline that ends last."""
        layout, listed = found.layout, bool(even.passes.performed)
        slowed = [
            # A slow rank hides more of its own gather behind its forward, but the others do not.
            replace(self._step_times(layout, found.family, factors, listed=listed), gather_s=even.gather_s)
            for factors in slow_pipelines(layout, self.stragglers)
        ]
        # Where weight gradients fill the waiting, a slower stage may fill it better; nobody can count on that.
        slowest = max([even, *slowed], key=lambda each: each.step_s)
        if slowest.step_s == even.step_s:
            return found
        later = _later(found, slowest.step_s - even.step_s)
        return msgspec.structs.replace(later, bubble_share=slowest.idle_share, timeline=slowest.spans())

    def _with_waits(self, found: LayoutPrediction, block: MeasuredBlock) -> LayoutPrediction:
        """Ranks are slow in turn, as the measured block's iterations differ."""
        layout = found.layout
        computed = sum(found.breakdown.parts[name] for name in COMPUTE if name != "update")
        draws = layout.micro_batches(self.job) * self.model.layers / layout.pp / block.layers
        waits = step_wait(block, layout, computed, draws)
        if waits is None:
            return found
        spread = (found.step_s + waits.p10_s, found.step_s + waits.p90_s)
        notes = found.notes
        if waits.extrapolated:
            notes += (
                f"the slowest of {layout.gpus} GPUs is extrapolated from {len(block.iteration_s)} times of a block",
            )
        return msgspec.structs.replace(_later(found, waits.wait_s), spread_s=spread, notes=notes)


@dataclass(frozen=True)
class _StepTimes:
    """A step of one pipeline."""

    stages: Sequence[StageTimes]
    """One micro-batch through all chunks of each."""
    passes: PipelineRun
    afters: Sequence[ReplicaTimes]
    update_s: float
    gather_s: float
    idle_share: float
    """Of the passes' time, what the average stage does nothing in."""

    @property
    def reduced_s(self) -> float:
        """All stages wait for the norm of all gradients before they update."""
        ends = zip(self.passes.end_s, self.afters, strict=True)
        return max(end + after.reduce.seconds for end, after in ends)

    @property
    def step_s(self) -> float:
        return self.reduced_s + self.update_s + self.gather_s

    def spans(self) -> tuple[Span, ...]:
        passes, update, gather = self.passes, self.update_s, self.gather_s
        if not passes.performed:
            return ()
        spans = []
        for stage, (kind, micro_batch, chunk), start_s, end_s in passes.performed:
            name = f"{_NAMES[kind]} {micro_batch}" + (f" chunk {chunk}" if chunk else "")
            spans.append(Span(f"stage {stage}", name, start_s, end_s))
        end = self.step_s - gather
        for stage, (done, after) in enumerate(zip(passes.end_s, self.afters, strict=True)):
            if after.reduce.seconds:
                spans.append(Span(f"stage {stage}", "reduce gradients", done, done + after.reduce.seconds))
            spans.append(Span(f"stage {stage}", "update", end - update, end))
            if gather:
                spans.append(Span(f"stage {stage}", "gather parameters", end, self.step_s))
        return tuple(spans)


def _later(found: LayoutPrediction, wait_s: float) -> LayoutPrediction:
    """The same with so much more waiting for slow ranks."""
    step = found.step_s + wait_s
    waited = msgspec.structs.replace(found.breakdown, stragglers=found.breakdown.stragglers + wait_s)
    return msgspec.structs.replace(found, step_s=step, mfu=found.mfu * found.step_s / step, breakdown=waited)
