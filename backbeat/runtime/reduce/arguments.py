"""The wrapper's arguments: torch's own by their names in the installed version, and what `plan=` may be."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn import Module

from backbeat.errors import InputError
from backbeat.model import Plan

# Typed as Any throughout: torch's own wrapper has no annotations.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)
WIRE: dict[Any, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}
UNSUPPORTED = {
    "mixed_precision": "use torch.autocast, or backend='ddp'",
    "delay_all_reduce_named_params": "put these gradients in the plan's last group, or use backend='ddp'",
    "param_to_hook_all_reduce": "put these gradients in the plan's last group, or use backend='ddp'",
}


def bind(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the installed torch's own names."""
    try:
        bound = TORCH_SIGNATURE.bind(None, module, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"DistributedDataParallel: {error}") from None
    arguments = dict(bound.arguments)
    arguments.pop("self")
    if arguments.get("check_reduction"):
        warnings.warn("`check_reduction` is deprecated and does nothing.", FutureWarning, stacklevel=3)
    return arguments


def resolve_plan(plan: Plan | str | os.PathLike[str] | None) -> tuple[Plan | None, str | None]:
    """A plan to run at once, or the name of a strategy to plan with once the model is measured."""
    found: Plan | None
    strategy: str | None
    if plan is None or isinstance(plan, Plan):
        found, strategy = plan, None
    elif plan == "decoupled":
        raise _decoupled()
    elif plan == "sparse":
        raise InputError(
            "plan='sparse' cannot be chosen while training runs, since it changes what the optimizer sees: make the "
            "plan first (`backbeat plan … --strategy sparse -o plan.json`) and give plan='plan.json'"
        )
    elif isinstance(plan, str) and (plan == "auto" or plan in strategies()):
        found, strategy = None, plan
    else:
        if isinstance(plan, (str, os.PathLike)):
            _check_spelling(os.fspath(plan))
        found, strategy = Plan.load(plan), None
    if found is not None and found.decoupled:
        raise _decoupled()
    if found is not None and found.dynamic is not None:
        raise InputError(
            f"the plan's strategy {found.strategy!r} forms groups at run time, which fixed groups cannot run: "
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


def respread(plan: Plan, communicators: int) -> Plan:
    """The same groups in the same order, round robin over another number of communicators."""
    groups = tuple(
        msgspec.structs.replace(group, communicator=index % communicators) for index, group in enumerate(plan.buckets)
    )
    return msgspec.structs.replace(plan, communicators=communicators, buckets=groups)


def strategies() -> set[str]:
    """Names that plan fixed groups."""
    from backbeat.planners import STRATEGIES

    return set(STRATEGIES) - {"horovod", "decoupled", "sparse"}


def process_group_of(arguments: dict[str, Any]) -> Any:
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return group if group is not None else dist.distributed_c10d._get_default_group()
    if mesh.ndim != 1:
        raise InputError(f"device_mesh has {mesh.ndim} dimensions: data parallelism needs one; give mesh['dp']")
    return mesh.get_group(mesh_dim=0)


def device_ids_of(
    arguments: dict[str, Any], device_type: str, multi: bool, devices: set[torch.device]
) -> tuple[list[int] | None, int | None]:
    ids, output = arguments.get("device_ids"), arguments.get("output_device")
    if ids is not None and len(ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if not ids or device_type == "cpu" or multi:
        if ids or output:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU "
                f"modules, but got device_ids {ids}, output_device {output}, and module parameters {devices}."
            )
        return None, None
    index = torch._utils._get_device_index
    found = [index(device, True) for device in ids]
    return found, index(ids[0] if output is None else output, True)
