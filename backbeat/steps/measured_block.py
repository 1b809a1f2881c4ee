"""A measured profile of a model's layers used instead of the operator model's times."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.cost.accelerators import accelerator
from backbeat.errors import InputError
from backbeat.model.layout import Job, Layout
from backbeat.model.profile import DTYPE_BYTES, Profile
from backbeat.steps.stage_times import StageTimer

if TYPE_CHECKING:
    from backbeat.steps.predict_layout import LayoutPredictor

_ALIKE = 0.05
"""How far the parameters of a profile may be from whole layers of the model."""


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
    timer = StageTimer(model, alone, job, predictor.cluster, predictor.operators, predictor.framework)
    predicted = layers * timer.layer(sparse=False, windowed=len(model.windowed) == model.layers).total_s
    return MeasuredBlock((profile.forward_s + profile.backward_s) / predicted, layers, profile.iteration_s)
