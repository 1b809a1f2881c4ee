"""What the installed torch's `fully_shard` offers, and what a plan asks of it.

Settings that this torch lacks are refused by name: a plan without them is another plan, with another time and peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from backbeat.errors import InputError
from backbeat.model import Plan, Sharding
from backbeat.units import format_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NEWER_SETTINGS = (
    ("reduce_scatter_buffers", "set_reduce_scatter_max_input_buffers", 1),
    ("separate_reduce_scatter", "set_separate_reduce_scatter_group", False),
)
"""Settings that came with torch 2.13: in the plan's `sharding`, the method of `FSDPModule`, and what older ones do."""


def check_settings(plan: Plan, sharding: Sharding) -> None:
    """Refuse settings that the installed torch does not have."""
    for field, method, default in NEWER_SETTINGS:
        value = getattr(sharding, field)
        if value != default and not hasattr(FSDPModule, method):
            raise InputError(
                f"the plan says {field}={value}, and torch {torch.__version__} has no FSDPModule.{method} (torch 2.13 "
                f"has): {_without(plan)}install torch 2.13, or make the plan again where this torch is installed"
            )


def set_settings(root: nn.Module, sharding: Sharding) -> None:
    """Apply the plan's settings to every unit. All ranks call it: they make a separate group together."""
    for field, method, default in NEWER_SETTINGS:
        value = getattr(sharding, field)
        if value != default:
            getattr(root, method)(value)


def mixed_precision(sharding: Sharding, parameters: Iterable[nn.Parameter]) -> MixedPrecisionPolicy:
    """The plan's dtypes, as far as they change anything for a unit of these parameters: a policy that names a dtype
    also casts every input to it.

    As autocast does, it only narrows, and leaves fp64 alone: a model in bf16 stays so under a plan that says fp32.
    """
    held = {one.dtype for one in parameters if one.is_floating_point()}
    param_dtype = DTYPES[sharding.param_dtype]
    reduce_dtype = DTYPES[sharding.reduce_dtype]
    gathered = param_dtype if torch.float32 in held and param_dtype != torch.float32 else None
    computed = {gathered} if gathered is not None else held
    # Without one, gradients are reduced as they are computed: in the dtype that was gathered.
    allowed = torch.float32 in computed or reduce_dtype == torch.float32
    changes = allowed and computed - {reduce_dtype, torch.float64}
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce_dtype if changes else None)


def _without(plan: Plan) -> str:
    """What going without is predicted to cost, where the plan says it."""
    found = plan.predicted
    if found is None or found.older_torch_s is None or found.iteration_s is None:
        return ""
    return (
        f"without it an iteration is predicted to take {format_seconds(found.older_torch_s)} instead of "
        f"{format_seconds(found.iteration_s)}; "
    )


def sends_gradients(module: FSDPModule) -> tuple[bool, bool]:
    """Whether backward reduces this unit's gradients among its shards, and among the copies of these."""
    state: Any = module._get_fsdp_state()
    # One group a unit up to torch 2.12, several since.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    found = [group for group in groups if group is not None]
    return all(group.reduce_grads for group in found), all(group.all_reduce_grads for group in found)
