"""One step of a transformer under a layout: stages, pipeline, replicas, memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from backbeat.cost.operator_model import OperatorModel, operator_model
from backbeat.errors import InputError
from backbeat.layouts.architectures import transformer
from backbeat.layouts.cluster import GpuCluster, cluster_of
from backbeat.layouts.conventions import Conventions, conventions_named
from backbeat.layouts.layout import Job, Layout, check, job_of, micro_batches
from backbeat.layouts.layout_memory import MemoryByKind, memory
from backbeat.layouts.layout_prediction import Family, LayoutPrediction, StepBreakdown
from backbeat.layouts.measured_block import block_factor
from backbeat.layouts.pipeline import PipelineRun, closed_form, run
from backbeat.layouts.replicas import RankParameters, ReplicaTimer, ReplicaTimes, rank_parameters
from backbeat.layouts.stage_times import PARTS, StageTimer, StageTimes, split_layers
from backbeat.model.prediction import Span

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from backbeat.layouts.transformer import Transformer
    from backbeat.model import Network, Profile

PREDICTED: tuple[Family, ...] = ("closed-form", "events")
"""The families that `predict` answers in."""
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def predict(
    model: Transformer | str | os.PathLike[str] | Mapping[str, Any],
    cluster: GpuCluster | Network | str | os.PathLike[str],
    layout: Layout | str | None = None,
    *,
    global_batch: int,
    sequence: int,
    gpus: int | None = None,
    precision: str = "bf16",
    framework: str | Conventions = "megatron",
    accelerator: str | None = None,
    family: Family = "events",
    imbalance: float = 1.0,
    compute_factor: float = 1.0,
    block: Profile | str | os.PathLike[str] | None = None,
    band: bool = True,
    **fields: Any,
) -> LayoutPrediction:
    """Predict a step.

    The layout is given whole (`Layout`, or text as the command line takes it) or by its fields: dp=8, tp=4, pp=2, cp=1,
    ep=1, micro_batch=1, recompute="selective", schedule="1f1b", chunks=1, zero=1. `imbalance` is the busiest expert
    rank's tokens over the average's. `compute_factor` is how many times as long computation takes as the operator model
    says: a measured step of one layout gives it, or `block`, a measured profile of one of the model's dense layers.

    >>> found = predict("llama-3-8b", "dgx-h100", dp=8, tp=2, global_batch=256, sequence=8192, recompute="full")
    >>> found.fits, 0.3 < found.mfu < 0.6
    (True, True)
    """
    shapes = transformer(model)
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    if layout is None or fields:
        layout = _changed(layout or Layout(), fields)
    if family not in PREDICTED:
        raise InputError(f"family is {family!r}: predicted are {' and '.join(PREDICTED)}; `backbeat lab` executes")
    job = job_of(global_batch, sequence, precision)
    check(shapes, layout, job, gpus)
    there = cluster_of(cluster, accelerator)
    predictor = LayoutPredictor(shapes, there, job, conventions_named(framework), imbalance, compute_factor)
    if block is not None:
        predictor = predictor.with_block(block)
    found = predictor.predict(layout, family)
    return predictor.banded(found) if band else found


def _changed(layout: Layout, fields: dict[str, Any]) -> Layout:
    unknown = next((name for name in fields if name not in Layout.__struct_fields__), None)
    if unknown is not None:
        raise InputError(f"a layout has no {unknown!r}: it has {', '.join(Layout.__struct_fields__)}")
    try:
        return msgspec.convert({**msgspec.to_builtins(layout), **fields}, Layout)
    except msgspec.ValidationError as error:
        raise InputError(f"the layout: {error}") from None


@lru_cache(maxsize=32)
def _operators(short_name: str, precision: str) -> OperatorModel:
    return operator_model(short_name, precision)


class LayoutPredictor:
    """Predicts layouts of one job on one cluster; layouts share what is computed of operators."""

    def __init__(
        self,
        model: Transformer,
        cluster: GpuCluster,
        job: Job,
        conventions: Conventions,
        imbalance: float = 1.0,
        compute_factor: float = 1.0,
    ) -> None:
        if not 1 <= imbalance < float("inf"):
            raise InputError(f"imbalance is {imbalance}: the busiest rank has at least the average, 1 or more")
        if not 0 < compute_factor < float("inf"):
            raise InputError(f"compute_factor is {compute_factor}: it is measured over predicted time, above zero")
        self.model, self.cluster, self.job, self.conventions = model, cluster, job, conventions
        self.imbalance, self.compute_factor = imbalance, compute_factor
        self.operators = _operators(cluster.accelerator.short_name, job.precision)

    def on(self, cluster: GpuCluster) -> LayoutPredictor:
        return LayoutPredictor(self.model, cluster, self.job, self.conventions, self.imbalance, self.compute_factor)

    def with_block(self, block: Profile | str | os.PathLike[str]) -> LayoutPredictor:
        """Computation as fast as a measured profile of the model's layers says."""
        precision = self.job.precision
        factor = block_factor(block, self.model, self.cluster, self.operators, self.conventions, precision)
        return LayoutPredictor(
            self.model, self.cluster, self.job, self.conventions, self.imbalance, self.compute_factor * factor
        )

    def memory(self, layout: Layout) -> MemoryByKind:
        """Of one GPU, which takes no time to say: what does not fit need not be timed."""
        count = micro_batches(layout, self.job)
        return memory(self.model, layout, self.job, self.conventions, count, self.imbalance)

    def fits(self, layout: Layout) -> bool:
        return self.memory(layout).total <= self.cluster.accelerator.memory_bytes

    def banded(self, found: LayoutPrediction) -> LayoutPrediction:
        """With the step on a quiet and on a busy cluster."""
        if self.cluster.edges is None:
            return found
        middle, quiet, busy = (
            self.on(each).predict(found.layout, "closed-form").step_s for each in (self.cluster, *self.cluster.edges)
        )
        return msgspec.structs.replace(found, band_s=(found.step_s * quiet / middle, found.step_s * busy / middle))

    def predict(self, layout: Layout, family: Family = "events") -> LayoutPrediction:
        """A layout that can be; whoever calls has checked it."""
        count = micro_batches(layout, self.job)
        kinds = split_layers(self.model, layout)
        replicas = ReplicaTimer(self.model, layout, self.cluster, self.operators, self.conventions)
        timer = StageTimer(
            self.model,
            layout,
            self.job,
            self.cluster,
            self.operators,
            self.conventions,
            imbalance=self.imbalance,
            compute_factor=self.compute_factor,
        )
        own = [_with_pass(each, self.conventions.pass_s / layout.chunks) for each in timer.stages()]
        times = [replicas.sharded_passes(each, kind) for each, kind in zip(own, kinds, strict=True)]
        send = self._send_s(layout, timer)
        if family == "events":
            passes = run(layout.schedule, layout.pp, count, times, send, self.conventions.streams)
        else:
            passes = closed_form(layout.schedule, layout.pp, count, times, send)
        afters = []
        for stage in range(layout.pp):
            held = [rank_parameters(self.model, layout, kind) for kind in kinds[stage :: layout.pp]]
            total = RankParameters(sum(each.dense for each in held), sum(each.expert for each in held))
            window = passes.end_s[stage] - passes.last_backward_s[stage]
            forward = sum(each.forward_s for each in times[stage :: layout.pp])
            afters.append(replicas.after(total, window, forward))
        return self._assembled(layout, family, count, own, times, passes, afters)

    def _send_s(self, layout: Layout, timer: StageTimer) -> float:
        """Activations of a micro-batch to the next stage; without sequence parallelism Megatron scatters and gathers
        them, so that each rank sends its share."""
        if layout.pp == 1:
            return 0.0
        size = 2 * timer.builder.tokens * self.model.hidden
        stride = layout.tp * layout.cp * layout.dp
        sent = self.cluster.send_s(size / layout.tp, layout.pp, stride)
        if layout.tp > 1 and not layout.sequence_parallel:
            sent += self.cluster.collective_s("all_gather", size, layout.tp)
        return sent

    def _assembled(
        self,
        layout: Layout,
        family: Family,
        count: int,
        own: Sequence[StageTimes],
        times: Sequence[StageTimes],
        passes: PipelineRun,
        afters: Sequence[ReplicaTimes],
    ) -> LayoutPrediction:
        pp = layout.pp
        # All stages wait for the norm of all gradients before they update.
        reduced = max(end + after.reduce_s for end, after in zip(passes.end_s, afters, strict=True))
        update, gather = max(each.update_s for each in afters), max(each.gather_s for each in afters)
        update *= self.compute_factor
        step = reduced + update + gather
        works = [sum(each.total_s for each in own[stage::pp]) for stage in range(pp)]
        busiest = max(range(pp), key=lambda stage: works[stage])
        parts = [count * sum(each.parts[place] for each in own[busiest::pp]) for place in range(len(PARTS))]
        sharded = count * (sum(each.total_s for each in times[busiest::pp]) - works[busiest])
        idle = passes.seconds - sum(parts) - sharded
        breakdown = StepBreakdown(
            **dict(zip(PARTS, parts, strict=True)),
            parameters=sharded,
            bubble=max(0.0, idle) if pp > 1 else 0.0,
            reduce=reduced - passes.seconds,
            update=update,
            gather=gather,
        )
        busy = count * sum(each.total_s for each in times) / pp
        peak = self.cluster.accelerator.peak_flops(self.job.precision) or 0.0
        flops = self.model.flops_per_token(self.job.sequence) * self.job.tokens
        return LayoutPrediction(
            model=self.model.name,
            cluster=self.cluster.name,
            layout=layout,
            job=self.job,
            gpus=layout.gpus,
            family=family,
            step_s=step,
            mfu=flops / (step * layout.gpus * peak),
            memory=self.memory(layout),
            limit_bytes=self.cluster.accelerator.memory_bytes,
            breakdown=breakdown,
            bubble_share=max(0.0, 1 - busy / passes.seconds),
            timeline=_spans(passes, afters, step, update, gather),
            notes=(f"compute: {self.operators.origin}",),
        )


def _with_pass(times: StageTimes, pass_s: float) -> StageTimes:
    """A stage's times with what the framework adds to a micro-batch, half of it in each direction."""
    if not pass_s:
        return times
    host = PARTS.index("host")
    parts = tuple(part + (pass_s if place == host else 0.0) for place, part in enumerate(times.parts))
    return StageTimes(times.forward_s + pass_s / 2, times.input_s + pass_s / 2, times.weight_s, parts)


def _spans(
    passes: PipelineRun, afters: Sequence[ReplicaTimes], step_s: float, update_s: float, gather_s: float
) -> tuple[Span, ...]:
    if not passes.performed:
        return ()
    spans = [
        Span(
            f"stage {each.stage}",
            f"{_NAMES[each.operation.kind]} {each.operation.micro_batch}"
            + (f" chunk {each.operation.chunk}" if each.operation.chunk else ""),
            each.start_s,
            each.end_s,
        )
        for each in passes.performed
    ]
    end = step_s - gather_s
    for stage, (done, after) in enumerate(zip(passes.end_s, afters, strict=True)):
        if after.reduce_s:
            spans.append(Span(f"stage {stage}", "reduce gradients", done, done + after.reduce_s))
        spans.append(Span(f"stage {stage}", "update", end - update_s, end))
        if gather_s:
            spans.append(Span(f"stage {stage}", "gather parameters", end, step_s))
    return tuple(spans)
