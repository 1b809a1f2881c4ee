"""What the user asked for beyond torch's own arguments, checked: the plan, how it runs, and a memory budget."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.runtime.memory.budget import budget_size, check_memory, within_budget
from backbeat.runtime.reduce.partition import BUCKET_BYTES, FIRST_BUCKET_BYTES

if TYPE_CHECKING:
    from backbeat.model import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """How training treats compressed buckets."""

    momentum_correction: bool = False
    """Each rank keeps the momentum of an attached SGD itself and selects from it; the optimizer then applies none."""
    factor_masking: bool = False
    """With momentum correction, an element that is sent loses its velocity, so that old momentum stops pushing. DGC
    does so at densities of 0.1 %; where an element is sent every few steps it takes away most of the momentum."""
    warmup_steps: int = 0
    """Steps over which the density falls from 25 % to the plan's."""

    def __post_init__(self) -> None:
        for name in ("momentum_correction", "factor_masking"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if not isinstance(self.warmup_steps, int) or isinstance(self.warmup_steps, bool):
            raise InputError(f"warmup_steps is {self.warmup_steps!r}: it must be a whole number")
        if self.warmup_steps < 0:
            raise InputError(f"warmup_steps is {self.warmup_steps}: it must be 0 or more")


def options_of(given: CompressionOptions | Mapping[str, Any] | None) -> CompressionOptions:
    """The options that a user gave, as an object, a mapping or not at all."""
    if given is None:
        return CompressionOptions()
    if isinstance(given, CompressionOptions):
        return given
    if not isinstance(given, Mapping):
        raise InputError(
            f"compression is {given!r}: it must be a dict or backbeat.runtime.compressed.CompressionOptions"
        )
    known = [field.name for field in fields(CompressionOptions)]
    for name in given:
        if name not in known:
            raise InputError(f"compression has {name!r}: it must be one of {', '.join(known)}")
    return CompressionOptions(**given)


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

    return set(STRATEGIES) - {"horovod", "decoupled", "compressed"}


# Typed as Any throughout: torch's own wrapper has no annotations.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)
UNSUPPORTED = {
    "mixed_precision": "use torch.autocast, or reducer='ddp'",
    "delay_all_reduce_named_params": "put these gradients in the plan's last bucket, or use reducer='ddp'",
    "param_to_hook_all_reduce": "put these gradients in the plan's last bucket, or use reducer='ddp'",
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


def check_supported(arguments: dict[str, Any]) -> None:
    """Refuse what only torch's own reducer can do."""
    for name, advice in UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise InputError(f"{name}= is not supported by backbeat's reducer: {advice}")


def process_group_of(arguments: dict[str, Any]) -> Any:
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return group if group is not None else dist.distributed_c10d._get_default_group()
    if mesh.ndim != 1:
        raise InputError(f"device_mesh has {mesh.ndim} dimensions: data parallelism needs one; give mesh['dp']")
    return mesh.get_group(mesh_dim=0)


def _device_ids_of(
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


def set_torch_attributes(wrapper: Any, arguments: dict[str, Any]) -> None:
    """What frameworks and inherited methods read, as torch's constructor would, without its reducer; refuses what it
    refuses."""
    module = arguments["module"]
    wrapper.logger = None
    wrapper._use_python_reducer = False
    wrapper.process_group = process_group_of(arguments)
    if arguments.get("device_mesh") is not None:
        wrapper.device_mesh = arguments["device_mesh"]
    wrapper.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    wrapper._module_parameters = [p for n, p in module.named_parameters() if n not in wrapper.parameters_to_ignore]
    _set_devices(wrapper, arguments)
    wrapper.dim = arguments.get("dim", 0)
    wrapper.module = module
    wrapper.device = next(iter(wrapper._module_parameters)).device
    _set_buffer_rules(wrapper, arguments)
    wrapper.find_unused_parameters = arguments.get("find_unused_parameters", False)
    wrapper.require_backward_grad_sync = True
    wrapper.require_forward_param_sync = True
    wrapper.gradient_as_bucket_view = True
    wrapper.batched_grad_copy = True
    wrapper.mixed_precision = None
    wrapper.skip_all_reduce_unused_params = arguments.get("skip_all_reduce_unused_params", False)
    wrapper.static_graph = False
    wrapper._static_graph_delay_allreduce_enqueued = True
    wrapper.broadcast_bucket_size = 250 * 1024 * 1024
    cap = cap_bytes_of(arguments)
    # torch.compile splits the graph where a bucket of this size would end, and refuses less than the first bucket.
    wrapper.bucket_bytes_cap = max(FIRST_BUCKET_BYTES, cap or BUCKET_BYTES)
    wrapper.bucket_bytes_cap_default = cap is None
    wrapper.bucket_bytes_cap_list = []
    wrapper.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
    wrapper._delay_grad_buffer = None
    wrapper._delay_grad_views = []
    wrapper._delay_all_reduce_params = []
    wrapper._delay_all_reduce_all_params = False
    wrapper._comm_hooks = []
    wrapper._accum_grad_hooks = []
    wrapper._has_rebuilt_buckets = False
    wrapper._lazy_init_ran = True
    wrapper._ddp_sink_clone = False
    wrapper._divide_by_initial_world_size = True
    wrapper._passing_sync_batchnorm_handle(wrapper.module)


def cap_bytes_of(arguments: dict[str, Any]) -> int | None:
    """`bucket_cap_mb` in bytes, where it was given."""
    cap = arguments.get("bucket_cap_mb")
    return None if cap is None else int(cap * 2**20)


def _set_devices(wrapper: Any, arguments: dict[str, Any]) -> None:
    parameters = wrapper._module_parameters
    if not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in parameters):
        raise InputError("the model updates parameters in backward: backbeat reduces gradients before the update")
    devices = {p.device for p in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            f"DistributedDataParallel's input module must be on the same type of devices, but has parameters on {types}"
        )
    wrapper.device_type = next(iter(types))
    wrapper.is_multi_device_module = len(devices) > 1
    wrapper.device_ids, wrapper.output_device = _device_ids_of(
        arguments, wrapper.device_type, wrapper.is_multi_device_module, devices
    )


def _set_buffer_rules(wrapper: Any, arguments: dict[str, Any]) -> None:
    broadcast = arguments.get("broadcast_buffers")
    forward_sync = arguments.get("forward_sync_buffers")
    wrapper._init_sync_buffers = True if forward_sync is not None else broadcast is None or bool(broadcast)
    chosen = forward_sync if forward_sync is not None else broadcast
    # A property over `forward_sync_buffers` in newer torch, a plain attribute in older.
    wrapper.broadcast_buffers = True if chosen is None else bool(chosen)
    wrapper.forward_sync_buffers = wrapper.broadcast_buffers


def check_model(module: Module) -> None:
    """Refuse FSDP, DTensor and pipeline models, nested wrappers, and parameters that have no shape yet."""
    _check_pipeline(module)
    for name, child in module.named_modules():
        place = f"module {name!r}" if name else "the model"
        kind = _sharded_kind(child)
        if kind:
            raise InputError(
                f"{place} is a {kind} module: its parameters are sharded, so gradients must not be averaged whole; "
                "use it without backbeat's wrapper, or unshard the model"
            )
    for name, parameter in module.named_parameters():
        if _is_dtensor(parameter):
            raise InputError(
                f"parameter {name!r} is a DTensor (tensor parallel or sharded): backbeat reduces plain tensors only; "
                "wrap a model without DTensors"
            )
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"parameter {name!r} is uninitialized: run one forward pass before wrapping the model")


def _sharded_kind(module: Module) -> str | None:
    for base in type(module).__mro__:
        if base.__name__ == "FullyShardedDataParallel":
            return "FullyShardedDataParallel (FSDP)"
        if base.__name__ == "FSDPModule":
            return "fully_shard (FSDP2)"
    return None


def _is_dtensor(parameter: Any) -> bool:
    return any(
        base.__name__ == "DTensor" and "torch.distributed" in base.__module__ for base in type(parameter).__mro__
    )


def _check_pipeline(module: Module) -> None:
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.distributed.pipelining") or base.__name__ in {"PipelineStage", "Pipe"}:
            raise InputError(
                f"the model is a pipeline ({type(module).__name__}): its schedule runs several backwards a step; "
                "wrap each stage's submodule in torch's own DDP, as pipelining asks for"
            )
