"""Profiling trains for real; this puts everything back as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_map_only


@contextlib.contextmanager
def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[None]:
    """Weights, buffers, gradients, the optimizer's state and the random generators leave as they came.

    Copies go to the host, so that they take nothing from the memory being measured.
    """

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    tensors = [*model.parameters(), *model.buffers()]
    saved = [to_host(tensor) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = None if optimizer is None else copy.deepcopy(tree_map_only(torch.Tensor, to_host, optimizer.state_dict()))
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
