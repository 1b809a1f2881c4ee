"""One step of a transformer under a layout: stages, pipeline, replicas, memory."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from typing import Any, Literal

import msgspec

from backbeat.cost.operator_model import OperatorModel
from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.accelerator import operator_model
from backbeat.model.architecture import Architecture, architecture_named
from backbeat.model.cluster import Cluster, cluster_of
from backbeat.model.files import checked
from backbeat.model.framework import Framework, framework_named
from backbeat.model.gpu_memory import MemoryByKind, device_bytes, fitting
from backbeat.model.layout import Job, Layout, job_of
from backbeat.model.possible_layout import check_layout
from backbeat.model.prediction import COMPUTE, Band, Breakdown, Note, Prediction
from backbeat.steps.layout_memory import layout_memory
from backbeat.steps.layout_step import PipelineStep
from backbeat.steps.pipeline import closed_form, run_pipeline
from backbeat.steps.rank_parameters import rank_parameters
from backbeat.steps.replicas import ReplicaTimer, ReplicaTimes
from backbeat.steps.slow_ranks import check_stragglers, slow_pipelines, step_wait
from backbeat.steps.stage_graph import StageTimes
from backbeat.steps.stage_layers import StageLayers, split_layers
from backbeat.steps.stage_times import StageTimer
from backbeat.steps.unit_passes import UnitPasses

LayoutModel = Architecture | str
LayoutCluster = Cluster | Network | str | os.PathLike[str]
Family = Literal["closed-form", "events"]
"""How a step is found: by formula, or by simulating its events."""
PREDICTED: tuple[Family, ...] = ("closed-form", "events")
ERROR, ERROR_WITH_EXPERTS = 0.13, 0.35
"""How far nine of ten published layouts are off, beyond what the network's band explains: 112 rows without experts and
41 with, of the development rows of validation."""
_LIMITING = 0.1
"""A part that takes less than this share of a step is not what limits it."""


def predict_layout(
    model: LayoutModel,
    cluster: LayoutCluster,
    layout: Layout | str | None = None,
    *,
    global_batch: int,
    sequence: int,
    gpus: int | None = None,
    precision: str = "bf16",
    family: Family = "events",
    band: bool = True,
    **given: Any,
) -> Prediction:
    """Predict a step.

    The layout is given whole (`Layout`, or text as the command line takes it) or by its fields: dp=8, tp=4, pp=2, cp=1,
    ep=1, micro_batch=1, recompute="selective", schedule="1f1b", chunks=1, zero=1. Further options are those of
    `predictor_of`.

    >>> found = predict_layout("llama-3-8b", "dgx-h100", dp=8, tp=2, global_batch=256, sequence=8192, recompute="full")
    >>> found.fits, 0.3 < found.mfu < 0.6
    ('yes', True)
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    fields = {name: given.pop(name) for name in Layout.__struct_fields__ if name in given}
    if layout is None or fields:
        layout = checked({**msgspec.to_builtins(layout or Layout()), **fields}, Layout, "the layout: ")
    if family not in PREDICTED:
        raise InputError(f"family is {family!r}: predicted are {' and '.join(PREDICTED)}; `backbeat lab` executes")
    predictor = predictor_of(model, cluster, job_of(global_batch, sequence, precision), **given)
    check_layout(predictor.model, layout, predictor.job, gpus)
    check_stragglers(predictor.stragglers, layout.gpus, predictor.cluster.per_node)
    found = predictor.predict(layout, family)
    return predictor.ranged(found, family) if band else found


def predictor_of(
    model: LayoutModel,
    cluster: LayoutCluster,
    job: Job,
    *,
    framework: str | Framework = "megatron",
    overlap: str | None = None,
    dispatcher: str | None = None,
    accelerator: str | None = None,
    imbalance: float = 1.0,
    compute_factor: float = 1.0,
    stragglers: Mapping[int, float] | None = None,
    contention: bool = False,
    iteration_s: Sequence[float] = (),
    measured_layers: float = 1.0,
) -> LayoutPredictor:
    """The predictor of this job's layouts.

    `overlap` is what hides behind computation (none, dp or dp+tp), `dispatcher` that of tokens to experts (alltoall or
    deepep); by default the framework's. `stragglers` are ranks that compute more slowly, with their slowdown:
    {13: 1.3}. With `contention`, computation takes longer beside communication: rates fitted to whole published steps
    hold that already.
    """
    there = cluster_of(cluster, accelerator)
    if contention != there.contention:
        there = replace(there, contention=contention)
    return LayoutPredictor(
        model=architecture_named(model),
        cluster=there,
        job=job,
        framework=framework_named(framework, layouts=True, overlap=overlap, dispatcher=dispatcher),
        imbalance=imbalance,
        compute_factor=compute_factor,
        stragglers=stragglers or {},
        iteration_s=tuple(iteration_s),
        measured_layers=measured_layers,
    )


_operators = lru_cache(maxsize=32)(operator_model)


@dataclass(frozen=True, kw_only=True)
class LayoutPredictor:
    """Predicts layouts of one job on one cluster."""

    model: Architecture
    cluster: Cluster
    job: Job
    framework: Framework
    imbalance: float = 1.0
    """The busiest expert rank's tokens over the average's."""
    compute_factor: float = 1.0
    """How many times as long computation takes as the operator model says; one measured step gives it."""
    most_bytes: int | None = None
    """What a GPU may take, where that is not what it has."""
    iteration_s: tuple[float, ...] = ()
    """Measured on one GPU, one by one: how much computing varies."""
    measured_layers: float = 1.0
    """What one of these computes: layers, each micro-batch counted."""
    stragglers: Mapping[int, float] = field(default_factory=dict)
    spun: bool = False
    """Ranks spin their computation, and their hosts do not run ahead of it."""
    pieces: dict[Hashable, dict[Hashable, StageTimes]] = field(default_factory=dict, repr=False, compare=False)
    """Those that were run on this network: shared with predictors of other global batches, and of other loads."""
    memories: dict[Layout, MemoryByKind] = field(default_factory=dict, init=False, repr=False, compare=False)
    alone: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A micro-batch, and the update, on one GPU that holds everything, by sequences."""

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
        alike = (self.cluster.load, self.job.sequence, self.job.precision, self.framework, self.imbalance, self.spun)
        return StageTimer(
            *parts,
            imbalance=self.imbalance,
            compute_factor=self.compute_factor * slowdown,
            spun=self.spun,
            known=self.pieces.setdefault(alike, {}),
        )

    @property
    def limit_bytes(self) -> int:
        return device_bytes(self.cluster.accelerator) if self.most_bytes is None else self.most_bytes

    def fits(self, layout: Layout) -> bool:
        return fitting(self.memory(layout), self.limit_bytes, "shape") != "no"

    def ranged(self, found: Prediction, family: Family = "events") -> Prediction:
        """The same prediction, with the range of times to expect: the same step on a quiet and on a busy cluster, wider
        by what predictions are off."""
        assert found.layout is not None
        edges = [each.predict(found.layout, family, timeline=False).step_s for each in self._edges]
        off = 1 + (ERROR_WITH_EXPERTS if self.model.experts else ERROR)
        return msgspec.structs.replace(
            found, range_s=(min(edges, default=found.step_s) / off, max(edges, default=found.step_s) * off)
        )

    def predict(self, layout: Layout, family: Family = "events", *, timeline: bool = True) -> Prediction:
        """Predict a layout that the caller has checked. Steps of many micro-batches are predicted faster without a
        `timeline`."""
        even, slowest = self._even_and_slowest(layout, family, listed=timeline)
        return self._explained(layout, family, even, slowest)

    def step_s(self, layout: Layout, family: Family = "closed-form") -> float:
        """The step alone, without waiting for ranks that are slow now and then: faster to rank by."""
        return self._even_and_slowest(layout, family, listed=False)[1].step_s

    def _even_and_slowest(self, layout: Layout, family: Family, *, listed: bool) -> tuple[PipelineStep, PipelineStep]:
        """A pipeline of healthy ranks, and of all pipelines the one that ends last: everybody waits for it."""
        even = self._step_times(layout, family, (1.0,) * layout.pp, listed=listed)
        slowed = [
            # A slow rank hides more of its own gather behind its forward, but the others do not.
            replace(self._step_times(layout, family, factors, listed=listed), gather_s=even.gather_s)
            for factors in slow_pipelines(layout, self.stragglers)
        ]
        # Where weight gradients fill the waiting, a slower stage may fill it better; nobody can count on that.
        return even, max([even, *slowed], key=lambda each: each.step_s)

    def _step_times(self, layout: Layout, family: Family, slowdowns: Sequence[float], *, listed: bool) -> PipelineStep:
        """One pipeline, whose stages compute `slowdowns` times as long as healthy ones."""
        pp, count = layout.pp, layout.micro_batches(self.job)
        kinds = split_layers(self.model, layout, by_cost=self.framework.stages_by_cost)
        replicas = ReplicaTimer(self.model, layout, self.cluster, self.operators, self.framework)
        timers = {slowdown: self.timer(layout, slowdown) for slowdown in set(slowdowns)}
        # What the framework adds to a micro-batch, half of it in each direction.
        pass_s = self.framework.pass_s / layout.chunks
        beside = StageTimes(pass_s / 2, pass_s / 2, 0.0, {"host": pass_s} if pass_s else {})
        runs: dict[tuple[float, StageLayers], UnitPasses] = {}
        for index, kind in enumerate(kinds):
            slowdown = slowdowns[index % pp]
            if (slowdown, kind) not in runs:
                found = replicas.unit_passes(timers[slowdown].pieces_of(kind), kind)
                runs[slowdown, kind] = found._replace(times=found.times + beside)
        units = [runs[slowdowns[index % pp], kind] for index, kind in enumerate(kinds)]
        times = [each.times for each in units]
        sent_bytes = 2 * layout.tokens(self.job) * self.model.hidden
        send = self._send_s(layout, sent_bytes)
        if family == "events":
            streams, late = self.framework.streams, self.cluster.late_s(sent_bytes / layout.tp)
            passes = run_pipeline(layout.schedule, pp, count, times, send, streams, late, listed=listed)
        else:
            passes = closed_form(layout.schedule, pp, count, times, send)
        stages = [reduce(StageTimes.__add__, times[stage::pp]) for stage in range(pp)]
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
        updates = [each.update_s * self.compute_factor * slow for each, slow in zip(afters, slowdowns, strict=True)]
        idle = 1 - count * sum(each.total_s for each in times) / pp / passes.seconds
        first_s = max(sum(each.gather_s for each in units[stage::pp]) for stage in range(pp))
        gather_s = max(first_s, *(each.gather.seconds for each in afters))
        return PipelineStep(stages, passes, afters, max(updates), gather_s, max(0.0, idle))

    def _send_s(self, layout: Layout, size: float) -> float:
        """Activations of a micro-batch to the next stage; without sequence parallelism Megatron scatters and gathers
        them, so that each rank sends its share."""
        if layout.pp == 1:
            return 0.0
        sent = self.cluster.send_s(size / layout.tp, layout.pp, layout.stage_stride)
        if layout.tp > 1 and not layout.sequence_parallel:
            sent += self.cluster.collective_s("all_gather", size, layout.tp)
        return sent

    def _alone_s(self, layout: Layout) -> float:
        """What one GPU of unlimited memory takes for its share of the batch."""
        micro = layout.micro_batch
        if micro not in self.alone:
            one = Layout(micro_batch=micro, zero=0)
            passes_s = sum(stage.total_s for stage in self.timer(one).stages()) + self.framework.pass_s
            held = rank_parameters(self.model, one, *split_layers(self.model, one))
            update_s = ReplicaTimer(self.model, one, self.cluster, self.operators, self.framework).update_s(held)
            self.alone[micro] = passes_s, update_s * self.compute_factor
        passes_s, update_s = self.alone[micro]
        return self.job.global_batch / (layout.gpus * micro) * passes_s + update_s

    def _explained(self, layout: Layout, family: Family, even: PipelineStep, slowest: PipelineStep) -> Prediction:
        """What the slowest pipeline takes, put down to what an even one does and to waiting for the slowest."""
        job, gpu, memory = self.job, self.cluster.accelerator, self.memory(layout)
        parts = even.parts(layout, layout.micro_batches(job))
        parts["stragglers"] = slowest.step_s - even.step_s
        notes = [Note("operators", {"origin": self.operators.origin})]
        if not gpu.measured:
            notes.append(Note("data_sheet", {"device": gpu.name, "like": gpu.like or "H200"}))
        groups = (layout.tp, 1), (layout.cp, layout.tp), layout.dense_group
        origins = self.cluster.origins(*groups) if parts["contention"] else ()
        notes += [Note("beside", {"origin": origin}) for origin in origins]
        if family == "events" and not even.passes.simulated:
            notes.append(Note("closed_form"))
        band = None
        step_s = slowest.step_s
        waits = None
        if self.iteration_s:
            computed = sum(parts.get(name, 0.0) for name in COMPUTE if name != "update")
            draws = layout.micro_batches(job) * self.model.layers / layout.pp / self.measured_layers
            waits = step_wait(self.iteration_s, layout, computed, draws)
        if waits is not None:
            band = Band(p10_s=step_s + waits.p10_s, p90_s=step_s + waits.p90_s, extrapolated=waits.extrapolated)
            parts["stragglers"] += waits.wait_s
            step_s += waits.wait_s
            if waits.extrapolated:
                counts = {"workers": layout.gpus, "iterations": len(self.iteration_s)}
                notes.append(Note("slowest_extrapolated", counts))
        alone_s = self._alone_s(layout)
        other = {name: seconds for name, seconds in parts.items() if name not in ("matmul", "attention")}
        largest = max(other, key=lambda name: other[name])
        sizes = {"shard" if layout.zero == 3 else "replicate": layout.dp, "tp": layout.tp, "pp": layout.pp}
        sizes |= {"cp": layout.cp, "ep": layout.ep}
        return Prediction(
            strategy=layout.label,
            workers=layout.gpus,
            model=self.model.name,
            cluster=self.cluster.name,
            mesh={name: size for name, size in sizes.items() if size > 1},
            framework=self.framework.name,
            global_batch=job.global_batch,
            batch=layout.micro_batch,
            micro_batches=layout.micro_batches(job),
            recompute=layout.recompute,
            sequence=job.sequence,
            precision=job.precision,
            parameters=self.model.parameters,
            flops=self.model.flops_per_token(job.sequence) * job.tokens,
            peak_flops=gpu.rate(job.precision),
            layout=layout,
            iteration_s=step_s,
            single_s=alone_s,
            scaling_factor=alone_s / step_s,
            exposed_s=sum(seconds for name, seconds in parts.items() if name not in COMPUTE),
            samples_per_s=job.global_batch / step_s,
            breakdown=Breakdown(**{f"{name}_s": seconds for name, seconds in parts.items()}),
            bottleneck=largest if parts[largest] > _LIMITING * step_s else "compute",
            bubble_share=slowest.idle_share,
            band=band,
            memory=memory,
            device_bytes=self.limit_bytes,
            fits=fitting(memory, self.limit_bytes, "shape"),
            extrapolated=band is not None and band.extrapolated,
            timeline=slowest.spans(),
            notes=tuple(notes),
        )
