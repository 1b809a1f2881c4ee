"""What the user asked for, checked: torch's arguments in the installed version, our options, and the model."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Network, Plan, Profile
from backbeat.model.checks import at_least
from backbeat.planners import FIXED_BUCKETS, is_sharded
from backbeat.runtime.compressed.compression_options import CompressionOptions, options_of
from backbeat.runtime.memory.budget import budget_size, check_memory, within_budget
from backbeat.runtime.plain_model import check_model
from backbeat.runtime.reduce.partition import BucketChoices
from backbeat.runtime.torch_internals import TORCH_SIGNATURE

logger = logging.getLogger("backbeat.runtime")

UNSUPPORTED = {
    "mixed_precision": "use torch.autocast, or reducer='ddp'",
    "delay_all_reduce_named_params": "put these gradients in the plan's last bucket, or use reducer='ddp'",
    "param_to_hook_all_reduce": "put these gradients in the plan's last bucket, or use reducer='ddp'",
}
REDUCE_DTYPES: dict[Any, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperSettings:
    """What the user asked for, beyond torch's own arguments."""

    buckets: BucketChoices
    strategy: str | None
    """To plan with once the model is measured."""
    network: Network | str | os.PathLike[str] | None
    reduce_dtype: torch.dtype | None
    strict: bool
    skip_unused: bool
    """`skip_all_reduce_unused_params`, where torch has it."""
    compression: CompressionOptions
    """How compressed buckets are trained with."""
    budget_bytes: int | None
    """Device memory that an iteration may take."""


def settings_of(
    module: Module,
    arguments: dict[str, Any],
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    communicators: int | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    strict: bool = False,
    compression: CompressionOptions | Mapping[str, Any] | None = None,
    memory_budget: int | str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> tuple[WrapperSettings, MemoryPlan | None]:
    """The wrapper's options, checked against the model and torch's own arguments; and the memory plan, if any."""
    if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
        raise InputError(
            f"reduce_dtype is {reduce_dtype!r}: it must be 'bf16' or 'fp16', or left out to send gradients as they are"
        )
    if communicators is not None:
        at_least("communicators", communicators, 1)
    check_model(module)
    loaded, strategy = resolve_plan(plan)
    group = process_group_of(arguments)
    workers = dist.get_world_size(group)
    if loaded is not None and loaded.workers not in (None, workers) and dist.get_rank(group) == 0:
        logger.warning(
            "the plan was made for %d ranks, this job has %d: gradients are right all the same, but other buckets may "
            "be faster; make a plan for this job with `backbeat plan … --gpus %d`",
            loaded.workers,
            workers,
            workers,
        )
    skip_unused = arguments.get("skip_all_reduce_unused_params", False)
    if skip_unused and loaded is not None and loaded.compressed:
        raise InputError(
            "skip_all_reduce_unused_params=True, and the plan has compressed buckets: these send what was not sent yet "
            "of unused parameters, too; leave the option out, or run a plan without compression"
        )
    loaded, memory = within_budget(loaded, strategy, memory_budget, profile, network, workers)
    check_memory(module, memory)
    planned_bytes = memory.budget_bytes if memory is not None else None
    cap_mb = arguments.get("bucket_cap_mb")
    settings = WrapperSettings(
        buckets=BucketChoices(
            plan=loaded,
            communicators=communicators,
            cap_bytes=None if cap_mb is None else int(cap_mb * 2**20),
            find_unused=arguments.get("find_unused_parameters", False) and not arguments.get("static_graph", False),
        ),
        strategy=strategy if loaded is None else None,
        network=network,
        reduce_dtype=REDUCE_DTYPES[reduce_dtype] if reduce_dtype else None,
        strict=strict,
        skip_unused=skip_unused,
        compression=options_of(compression),
        budget_bytes=planned_bytes if memory_budget is None else budget_size(memory_budget),
    )
    return settings, memory


def split_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our own options, and torch's arguments."""
    own = inspect.signature(settings_of).parameters.keys() - {"module", "arguments"}
    return (
        {name: value for name, value in kwargs.items() if name in own},
        {name: value for name, value in kwargs.items() if name not in own},
    )


def resolve_plan(plan: Plan | str | os.PathLike[str] | None) -> tuple[Plan | None, str | None]:
    """A plan to run at once, or the name of a strategy to plan with once the model is measured."""
    if plan is None:
        return None, None
    if plan == "compressed":
        raise InputError(
            "plan='compressed' cannot be chosen while training runs, since it changes what the optimizer sees: make "
            "the plan first (`backbeat plan … --way compressed -o plan.json`) and give plan='plan.json'"
        )
    if isinstance(plan, str) and is_sharded(plan):
        raise InputError(
            f"plan={plan!r} shards parameters, and DistributedDataParallel sends gradients in buckets: make the plan "
            f"(`backbeat plan … --way {plan} -o plan.json`) and run it with "
            "`fully_shard(model, plan='plan.json', mesh=mesh)` of backbeat.runtime"
        )
    if isinstance(plan, str) and (plan == "auto" or plan in FIXED_BUCKETS):
        return None, plan
    if not isinstance(plan, Plan):
        text = os.fspath(plan) if isinstance(plan, (str, os.PathLike)) else ""
        close = difflib.get_close_matches(text, sorted({"auto", *FIXED_BUCKETS}), n=1, cutoff=0.7)
        if close and not os.path.exists(text):
            raise InputError(f"plan={text!r} is neither a file nor a strategy: did you mean {close[0]!r}?")
        plan = Plan.load(plan)
    plan.need_buckets("DistributedDataParallel")
    if plan.dynamic is not None:
        raise InputError(
            f"the plan's strategy {plan.strategy!r} forms buckets at run time, which fixed buckets cannot run: "
            "plan with another strategy"
        )
    return plan, None


def bind(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Torch's arguments by the installed version's own names."""
    try:
        bound = TORCH_SIGNATURE.bind(None, module, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"DistributedDataParallel: {error}") from None
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def process_group_of(arguments: dict[str, Any]) -> Any:
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return group if group is not None else dist.distributed_c10d._get_default_group()
    if mesh.ndim != 1:
        raise InputError(f"device_mesh has {mesh.ndim} dimensions: data parallelism needs one; give mesh['dp']")
    return mesh.get_group(mesh_dim=0)


def check_supported(arguments: dict[str, Any]) -> None:
    """Refuse what only torch's own reducer can do."""
    for name, advice in UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise InputError(f"{name}= is not supported by backbeat's reducer: {advice}")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in arguments["module"].parameters()):
        raise InputError("the model updates parameters in backward: backbeat reduces gradients before the update")


def refuse_inside(outer: Any, wrapper: Any) -> None:
    """A parameter that trains has one wrapper: a second one would send its gradient again, and nothing would tell."""
    if not any(module is wrapper for module in outer.modules()):
        return
    sent = {id(one) for name, one in outer.module.named_parameters() if name not in outer.parameters_to_ignore}
    trained = next(
        (name for name, one in wrapper.module.named_parameters() if one.requires_grad and id(one) in sent), None
    )
    if trained is not None:
        raise InputError(
            f"the model is wrapped twice: a {type(outer).__name__} holds backbeat's, and would send the gradient of "
            f"{trained!r} again. Give one of them the plain model, or freeze the inner one before the outer one is "
            "made; to Accelerate, what is wrapped already goes by accelerator.prepare_model(model, "
            "evaluation_mode=True)"
        )
