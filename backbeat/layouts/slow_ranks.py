"""Ranks that compute more slowly than others, always or now and then, and who waits for them.

Ranks that share a layer wait for each other in every layer. These are the ranks of `tp` and `cp`, and those that
exchange experts' tokens. With ZeRO 2 and 3, where replicas communicate in every pass, they are all ranks of a stage.
Such a group is as slow as its slowest rank. Stages wait along the pipeline; replicas at the end of the step, to reduce
gradients.

A measured profile of some of the model's layers says how much ranks vary, and how long these layers take.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.cost.accelerators import accelerator
from backbeat.errors import InputError
from backbeat.layouts.layout import Job, Layout
from backbeat.layouts.stage_times import StageTimer
from backbeat.model.profile import DTYPE_BYTES, Profile
from backbeat.simulate.stragglers import Straggling, straggling

if TYPE_CHECKING:
    from backbeat.layouts.predict_layout import LayoutPredictor

_ALIKE = 0.05
"""How far the parameters of a profile may be from whole layers of the model."""


def check_stragglers(stragglers: Mapping[int, float], gpus: int, per_node: int) -> None:
    for rank, slowdown in stragglers.items():
        # A node is given as its ranks.
        name = f"straggler rank {rank} (node {rank // per_node})"
        if not 0 <= rank < gpus:
            last = (gpus - 1) // per_node
            raise InputError(f"{name} is not there: ranks of {gpus} GPUs are 0 to {gpus - 1}, their nodes 0 to {last}")
        if not 1 <= slowdown < math.inf:
            raise InputError(f"{name} has slowdown {slowdown}: it is 1 or more, like 1.3")


def group_size(layout: Layout) -> int:
    """Consecutive ranks of a stage that wait for each other in every layer.

    >>> group_size(Layout(dp=4, tp=2)), group_size(Layout(dp=4, tp=2, ep=4)), group_size(Layout(dp=4, tp=2, zero=3))
    (2, 4, 8)
    """
    return layout.stage_gpus if layout.zero >= 2 else math.lcm(layout.tp * layout.cp, layout.ep)


def slow_pipelines(layout: Layout, stragglers: Mapping[int, float]) -> list[tuple[float, ...]]:
    """How many times as long each stage computes, for every pipeline that holds a slow rank, without repetitions.

    >>> slow_pipelines(Layout(dp=2, tp=2, pp=2), {5: 1.3})
    [(1.0, 1.3)]
    """
    found: dict[int, list[float]] = {}
    for rank, slowdown in stragglers.items():
        stage, within_stage = divmod(rank, layout.stage_gpus)
        factors = found.setdefault(within_stage // group_size(layout), [1.0] * layout.pp)
        factors[stage] = max(factors[stage], slowdown)
    return sorted({tuple(factors) for factors in found.values()})


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """What a profile of layers says."""

    factor: float
    """How many times as long they take as the operator model says."""
    layers: int
    iteration_s: tuple[float, ...]
    """One by one: how much they vary."""


def measured_block(block: Profile | str | os.PathLike[str], predictor: LayoutPredictor) -> MeasuredBlock:
    """Of one dense layer of the model or of several, without embedding and head, on one GPU of the cluster."""
    model, gpu = predictor.model, predictor.cluster.accelerator
    profile = block if isinstance(block, Profile) else Profile.load(block)
    if profile.sequence_length is None:
        raise InputError(f"profile {profile.name!r} does not say its sequence length: profile the block again")
    device = accelerator(profile.device)
    if device is None or device.name != gpu.name:
        raise InputError(
            f"profile {profile.name!r} was measured on {profile.device}, the cluster has {gpu.name}: "
            "measure the block on one of its GPUs"
        )
    each = model.attention_parameters + model.mlp_parameters(model.ffn)
    held = sum(gradient.bytes for gradient in profile.gradients) / DTYPE_BYTES[profile.gradient_dtype]
    layers = max(1, round(held / each))
    if abs(held / (layers * each) - 1) > _ALIKE:
        raise InputError(
            f"profile {profile.name!r} has {held / 1e6:.1f}M parameters, a layer of {model.name} {each / 1e6:.1f}M: "
            "profile one dense layer, or several, without embedding and head"
        )
    job = Job(global_batch=profile.batch_size, sequence=profile.sequence_length, precision=predictor.job.precision)
    alone = Layout(micro_batch=profile.batch_size)
    timer = StageTimer(model, alone, job, predictor.cluster, predictor.operators, predictor.conventions)
    predicted = layers * timer.layer(sparse=False).total_s
    return MeasuredBlock((profile.forward_s + profile.backward_s) / predicted, layers, profile.iteration_s)


def step_wait(block: MeasuredBlock, layout: Layout, compute_s: float, draws: float) -> Straggling | None:
    """How long a step waits for ranks that are slow now and then. Each rank computes for `compute_s`, the time of
    `draws` blocks. These are taken to vary as the measured block's iterations do; None where they do not say.

    In every block a group waits for its slowest rank; at the end of the step all wait for the slowest group, whose
    blocks are late and early in turn.
    """
    group = group_size(layout)
    inside = straggling(block.iteration_s, group)
    between = straggling(block.iteration_s, layout.gpus // group, draws)
    if inside is None or between is None:
        return None
    # A block takes so many times as long here as where it was measured.
    each = compute_s / draws / statistics.fmean(block.iteration_s)
    always = draws * inside.wait_s
    mean, low, high = ((always + one) * each for one in (between.wait_s, between.p10_s, between.p90_s))
    return Straggling(mean, low, high, inside.extrapolated or between.extrapolated)
