"""What the user asked for beyond torch's own arguments, checked: the plan, how it runs, and a memory budget."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.runtime.compressed.compression_options import CompressionOptions, options_of
from backbeat.runtime.memory.budget import budget_size, check_memory, within_budget
from backbeat.runtime.reduce.torch_ddp import cap_bytes_of, check_model, process_group_of

if TYPE_CHECKING:
    from torch.nn import Module

    from backbeat.model import MemoryPlan

logger = logging.getLogger("backbeat.runtime")

REDUCE_DTYPES: dict[Any, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperSettings:
    """What the user asked for, beyond torch's own arguments."""

    plan: Plan | None
    strategy: str | None
    """To plan with once the model is measured."""
    network: Network | str | os.PathLike[str] | None
    communicators: int | None
    reduce_dtype: torch.dtype | None
    strict: bool
    cap_bytes: int | None
    """`bucket_cap_mb`, where it was given."""
    find_unused: bool
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
    if communicators is not None and communicators < 1:
        raise InputError(f"communicators is {communicators}: it must be 1 or more")
    check_model(module)
    loaded, strategy = resolve_plan(plan)
    group = process_group_of(arguments)
    workers = dist.get_world_size(group)
    if loaded is not None and loaded.workers not in (None, workers) and dist.get_rank(group) == 0:
        logger.warning(
            "the plan was made for %d ranks, this job has %d: gradients are right all the same, but other buckets may "
            "be faster; make a plan for this job with `backbeat plan … --workers %d`",
            loaded.workers,
            workers,
            workers,
        )
    loaded, memory = within_budget(loaded, strategy, memory_budget, profile, network, workers)
    check_memory(module, memory)
    settings = WrapperSettings(
        plan=loaded,
        strategy=strategy if loaded is None else None,
        network=network,
        communicators=communicators,
        reduce_dtype=REDUCE_DTYPES[reduce_dtype] if reduce_dtype else None,
        strict=strict,
        cap_bytes=cap_bytes_of(arguments),
        find_unused=arguments.get("find_unused_parameters", False),
        compression=options_of(compression),
        budget_bytes=budget_size(memory_budget)
        if memory_budget is not None
        else memory.budget_bytes
        if memory is not None
        else None,
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
    found: Plan | None
    strategy: str | None
    if plan is None or isinstance(plan, Plan):
        found, strategy = plan, None
    elif plan == "decoupled":
        raise _decoupled()
    elif plan == "compressed":
        raise InputError(
            "plan='compressed' cannot be chosen while training runs, since it changes what the optimizer sees: make "
            "the plan first (`backbeat plan … --strategy compressed -o plan.json`) and give plan='plan.json'"
        )
    elif isinstance(plan, str) and plan.partition(":")[0] in sharded_strategies():
        raise InputError(
            f"plan={plan!r} shards parameters, and DistributedDataParallel sends gradients in buckets: make the plan "
            f"(`backbeat plan … --strategy {plan} -o plan.json`) and run it with "
            "`fully_shard(model, plan='plan.json', mesh=mesh)` of backbeat.runtime"
        )
    elif isinstance(plan, str) and (plan == "auto" or plan in strategies()):
        found, strategy = None, plan
    else:
        if isinstance(plan, (str, os.PathLike)):
            _check_spelling(os.fspath(plan))
        found, strategy = Plan.load(plan), None
    if found is not None:
        found.need_buckets("DistributedDataParallel")
    if found is not None and found.decoupled:
        raise _decoupled()
    if found is not None and found.dynamic is not None:
        raise InputError(
            f"the plan's strategy {found.strategy!r} forms buckets at run time, which fixed buckets cannot run: "
            "plan with another strategy"
        )
    return found, strategy


def _decoupled() -> InputError:
    return InputError(
        "a decoupled plan is predicted (`backbeat plan`) and replayed (`backbeat lab`), not run: "
        "make a plan of strategy best or optimal instead"
    )


def _check_spelling(plan: str) -> None:
    """A name that is no file, but nearly a strategy's, was meant as one."""
    close = difflib.get_close_matches(plan, sorted({"auto", *strategies()}), n=1, cutoff=0.7)
    if close and not os.path.exists(plan):
        raise InputError(f"plan={plan!r} is neither a file nor a strategy: did you mean {close[0]!r}?")


def strategies() -> set[str]:
    """Names that plan fixed buckets."""
    from backbeat.planners import STRATEGIES

    return set(STRATEGIES) - {"horovod", "decoupled", "compressed"} - sharded_strategies()


def sharded_strategies() -> frozenset[str]:
    from backbeat.planners import SHARDED

    return SHARDED
