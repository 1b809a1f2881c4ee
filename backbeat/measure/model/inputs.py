"""What the profiler was given, checked before it costs time: the model, the device, and what the loss returned."""

from __future__ import annotations

import torch

from backbeat.errors import InputError, MissingPartError


def check_model(model: object) -> None:
    """Refuse what cannot be profiled as one worker's model."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"the model is a {type(model).__name__}: it must be a torch.nn.Module")
    kind = type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
        raise InputError(f"the model is wrapped in {kind}: profile the module inside it, on one worker (model.module)")
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise InputError("the model has lazy parameters without a shape: run one forward before profiling it")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError(f"the model is spread over {', '.join(sorted(devices))}: profile a model on one device")


def device_of(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    """Where to measure: the device asked for, or the one the model is on."""
    if device is None:
        first = next(model.parameters(), None)
        where = torch.device("cpu") if first is None else first.device
    else:
        where = parse_device(device)
    if where.type == "meta":
        raise InputError("the model is on the meta device: give device='cpu' or 'cuda' and real weights, or --analytic")
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def parse_device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}: it must be cpu, cuda or cuda:N") from None
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"device is {str(device)!r}: profiles are measured on cpu or cuda")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise MissingPartError(
                f"device {device}: this PyTorch ({torch.__version__}) sees no CUDA device; use --device cpu, "
                "install a CUDA build and driver, or compute the profile with --analytic"
            )
        if where.index is not None and where.index >= torch.cuda.device_count():
            raise InputError(f"device {device}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return where


def check_loss(loss: object) -> None:
    """Whatever `loss(model, batch)` returned must be something backward can start from."""
    if not isinstance(loss, torch.Tensor):
        hint = "; return its .loss" if isinstance(getattr(loss, "loss", None), torch.Tensor) else ""
        raise InputError(f"loss(model, batch) returned a {type(loss).__name__}: it must return one tensor{hint}")
    if loss.numel() != 1:
        raise InputError(
            f"loss(model, batch) returned a tensor of shape {tuple(loss.shape)}: backward starts from one number; "
            "take its .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise InputError(
            "loss(model, batch) needs no gradient: nothing trains; "
            "check that some parameter has requires_grad and that no torch.no_grad() or .detach() cuts it off"
        )
