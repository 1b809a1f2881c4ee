"""A decoder under FSDP from the times of one block: one flat gradient a unit, as FSDP1 sends them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Traffic
from backbeat.model import Gradient, Profile

UPDATE_BYTES = 100
"""Memory traffic per element of an AdamW that is a loop of single kernels over fp32 (88), and of clipping by norm."""
ATTENTION_BACKWARD = 2.5
"""Arithmetic of attention's backward over its forward's."""
DIRECTIONS = ("forward", "backward")


def decoder(
    one: Profile,
    two: Profile,
    shape: Mapping[str, Any],
    model: OperatorModel,
    compute: float = 1.0,
    attention: float = 1.0,
) -> Profile:
    """Of a GPT with as many layers as `shape` says, from models with one block and with two. Forward and backward take
    `compute` times as long, and attention `attention` times."""
    layers, hidden = shape["layers"], shape["hidden"]
    forward_s, backward_s = two.forward_s - one.forward_s, two.backward_s - one.backward_s
    rest_forward_s, rest_backward_s = one.forward_s - forward_s, one.backward_s - backward_s
    assert two.compute_shares is not None
    of_attention_s = two.compute_shares.attention * (forward_s + backward_s + (rest_forward_s + rest_backward_s) / 2)
    more_s = (attention - 1) * of_attention_s
    share = 1 / (1 + (shape["recompute"] == "full") + ATTENTION_BACKWARD)
    forward_s, backward_s = compute * (forward_s + share * more_s), compute * (backward_s + (1 - share) * more_s)
    rest_forward_s, rest_backward_s = compute * rest_forward_s, compute * rest_backward_s
    # Attention and an MLP of four times the width, with biases, and two layer norms.
    block, embedding = 12 * hidden**2 + 13 * hidden, (shape["vocab"] + shape["sequence"]) * hidden
    gradients = [Gradient(name="norm.weight", bytes=8 * hidden, ready_s=rest_backward_s, forward_s=rest_forward_s)]
    for done, layer in enumerate(reversed(range(layers)), start=1):
        ready_s = rest_backward_s + done * backward_s
        gradients.append(Gradient(name=f"blocks.{layer}.flat", bytes=4 * block, ready_s=ready_s, forward_s=forward_s))
    total_s = rest_backward_s + layers * backward_s
    gradients.append(Gradient(name="embed.flat", bytes=4 * embedding, ready_s=total_s, forward_s=0.0))
    elements = layers * block + embedding + 2 * hidden
    return Profile(
        name=shape["name"],
        model=shape["name"],
        batch_size=two.batch_size,
        precision="bf16",
        device=two.device,
        forward_s=rest_forward_s + layers * forward_s,
        backward_s=total_s,
        update_s=model.seconds(Traffic("pointwise", UPDATE_BYTES * float(elements), 4)),
        gradients=tuple(gradients),
        compute_shares=two.compute_shares,
    )


def fsdp1(
    units: int, workers: int, *, reshard: bool, prefetch: int, reduce_dtype: str, shard: int = 0
) -> dict[str, Any]:
    """FSDP1 in the words of FSDP2, as a plan's file has it. Computation never waits for a reduce-scatter before the end
    of backward, so inputs are not counted."""
    shard = shard or workers
    return {
        "strategy": "fsdp",
        "model": "decoder",
        "workers": workers,
        "sharding": {
            "mesh": {"replicate": workers // shard, "shard": shard},
            "param_dtype": "bf16",
            "reduce_dtype": reduce_dtype,
            "reduce_scatter_buffers": units + 1,
            "separate_reduce_scatter": False,
            "units": [
                {"modules": [f"blocks.{unit}"], "reshard": reshard, "prefetch": prefetch} for unit in range(units)
            ],
        },
    }


def attention_factor(told: Mapping[str, Any], peaks: Mapping[str, Any], model: OperatorModel, gpu: str) -> float:
    """How many times as long as by the GPU's operator model a kernel of attention takes, by what was published of it on
    another, and by the shares of peak that such kernels reach on both."""
    shape = (told["heads"], told["tokens"], told["tokens"], told["width"], "causal")
    works = {way: Attention("bf16", *shape, way == "backward") for way in DIRECTIONS}
    seconds = {way: model.seconds(work) for way, work in works.items()}
    peak = model.accelerator.rate("bf16") or math.nan
    if "shares" in told:
        taken_s = sum(work.flops / peak / told["shares"][way] for way, work in works.items())
    else:
        taken_s = sum(seconds[way] * told["times"][way] for way in DIRECTIONS)
    return float(peaks[told["on"]] / peaks[gpu] * taken_s / sum(seconds.values()))
