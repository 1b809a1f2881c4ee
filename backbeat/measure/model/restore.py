"""Profiling trains for real; this puts everything back as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[None]:
    """Weights, buffers, gradients, the optimizer's state and the random generators leave as they came.

    Copies go to the host, so that they take nothing from the memory being measured.
    """
    tensors = [*model.parameters(), *model.buffers()]
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = None if optimizer is None else copy.deepcopy(_on_host(optimizer.state_dict()))
    for parameter in model.parameters():
        parameter.grad = None
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, saved, strict=True):
                tensor.copy_(before)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value
