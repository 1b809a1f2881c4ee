"""The layouts of a question, and their words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from backbeat.answer.ways import in_order
from backbeat.errors import InputError
from backbeat.model import Framework, Profile
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.layout import Layout, Precision, job_of
from backbeat.model.profile import device_alone
from backbeat.planners.layout_ways import LayoutWays, usual_zero
from backbeat.steps.predict_layout import LayoutPredictor, predictor_of

if TYPE_CHECKING:
    from backbeat.answer.asked import Asked

_LACKING = {
    "lora": "adapters are not predicted in layouts: profile the module with them (`backbeat profile --analytic`)",
    "optimizer": "layouts are predicted with AdamW: leave it out",
}


def layout_ways(asked: Asked, parts: Mapping[str, Any] | None, gpus: int) -> LayoutWays:
    """Of this question; all layouts without parts."""
    told = dict(parts or {})
    recompute = told.pop("recompute", asked.given.get("recompute"))
    batch = asked.given.get("batch") or (None if asked.profile is None else asked.profile.batch_size)
    return LayoutWays(
        predictor=predictor(asked, gpus),
        gpus=gpus,
        parts=None if parts is None else told,
        batch=batch,
        recompute=recompute,
    )


def predictor(asked: Asked, gpus: int) -> LayoutPredictor:
    """Of the layouts of this job on so many GPUs, with the pieces that were run for other numbers."""
    found = asked.layout_predictor
    job = replace(found.job, global_batch=asked.global_batch(gpus))
    return changed(found, job=job, stragglers=asked.stragglers(gpus))


def any_predictor(asked: Asked) -> LayoutPredictor:
    """Of a step of one sequence."""
    shape, given, gpu = asked.shape, asked.given, asked.gpu
    if shape is None:
        raise InputError(
            f"profile {asked.subject.name!r} does not say its architecture, which tp, pp, cp and ep need: ask for the "
            "model's config.json or name"
        )
    if gpu is None:
        raise InputError(
            f"network {asked.network.name!r} does not say what GPUs it joins: name them with accelerator, like h100"
        )
    for name, why in _LACKING.items():
        if name in given and asked.profile is None and given[name] != "adamw":
            raise InputError(f"{name} is {given[name]!r}: {why}")
    if asked.precision not in get_args(Precision):
        raise InputError(
            f"precision is {asked.precision}: layouts are predicted in {', '.join(get_args(Precision))}; ask for "
            "data-parallel ways in others"
        )
    framework = asked.framework
    if "reduce_dtype" in given:
        framework = replace(framework, reduce_dtype=given["reduce_dtype"])
    if given.get("compile"):
        framework = replace(framework, kernels="compiled", unfused=1.0)
    cluster = Cluster(asked.network, gpu, load=given.get("load", asked.network.how_busy))
    alone = None if asked.profile is None else asked.there(asked.profile)
    if alone is None and asked.undescribed is None:
        alone = asked.described(1)
    found = predictor_of(
        shape,
        cluster,
        job_of(1, asked.sequence, asked.precision),
        framework=framework,
        imbalance=given.get("imbalance", 1.0),
        compute_factor=asked.compute_factor * (1.0 if alone is None else _longer(alone, shape, cluster, framework)),
        iteration_s=() if asked.profile is None or alone is None else alone.iteration_s,
        measured_layers=shape.layers * (1 if asked.profile is None else asked.profile.accumulation),
    )
    return changed(found, most_bytes=given.get("memory"))


def _longer(profile: Profile, shape: Architecture, cluster: Cluster, framework: Framework) -> float:
    """How many times as long one GPU takes for the profile's forward and backward as the operators of a layout."""
    job = job_of(profile.batch_size, profile.sequence_length or 1, profile.precision)
    layout = Layout(micro_batch=profile.batch_size, zero=0)
    parts = predictor_of(shape, cluster, job, framework=framework).predict(layout, "closed-form").breakdown
    computed_s = parts.matmul_s + parts.attention_s + parts.memory_s + parts.host_s
    own = device_alone(profile)
    return (own.forward_s + own.backward_s) / computed_s


def layout_word(layout: Layout, framework: Framework, told: Collection[str] = ()) -> str:
    """A layout as rows name it: without what this framework would choose by itself, and without micro-batch and
    recomputing where nobody `told` them, which a row says beside its name."""
    usual = usual_zero(framework, layout.pp)
    left = {f"zero={usual}", f"dp={layout.dp}"}
    left |= {
        f"{name}={value}"
        for name, value in (("micro", layout.micro_batch), ("recompute", layout.recompute))
        if name not in told
    }
    parts = [part for part in layout.label.split("+") if part not in left]
    if layout.zero == 1 != usual and not layout.zero_group:
        parts.append("zero=1")
    return in_order(parts) or f"dp={layout.dp}"
