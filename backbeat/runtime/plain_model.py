"""Which models can be trained data-parallel: those that nothing has taken apart before."""

from __future__ import annotations

from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from backbeat.errors import InputError

_SHARDED = {"FullyShardedDataParallel": "FSDP", "FSDPModule": "FSDP2"}


def check_model(module: Module) -> None:
    """Refuse pipelines, sharded models, and parameters that have no shape yet."""
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.distributed.pipelining") or base.__name__ in {"PipelineStage", "Pipe"}:
            raise InputError(
                f"the model is a pipeline ({type(module).__name__}): its schedule runs several backwards a step; "
                "wrap each stage's submodule in torch's own DDP, as pipelining asks for"
            )
    for name, child in module.named_modules():
        kind = next((_SHARDED[base.__name__] for base in type(child).__mro__ if base.__name__ in _SHARDED), None)
        if kind:
            raise InputError(
                f"{f'module {name!r}' if name else 'the model'} is sharded by {kind} already: give the plain model, "
                "once"
            )
    for name, parameter in module.named_parameters():
        bases = type(parameter).__mro__
        if any(base.__name__ == "DTensor" and "torch.distributed" in base.__module__ for base in bases):
            raise InputError(
                f"parameter {name!r} is a DTensor (tensor parallel or sharded): backbeat reduces plain tensors only; "
                "wrap a model without DTensors"
            )
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"parameter {name!r} is uninitialized: run one forward pass before wrapping the model")
