"""Models that data parallelism of this kind would train wrongly, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import UninitializedParameter

from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Module


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
