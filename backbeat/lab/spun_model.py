"""A model whose parameters are real and whose computation is spun or slept, so that FSDP2 shards and trains it.

Every module holds parameters of the profile's sizes. Its autograd function takes the profile's time in forward and in
backward, and gives zeros for the parameters' gradients. All of FSDP2's hooks, streams, copies and collectives are its
own. The update is spun, too: shards keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from backbeat.lab.jobs import ShardedJob
from backbeat.runtime import fully_shard
from backbeat.simulate.sharded_units import ModelPiece

Compute = Callable[[float], None]
"""Takes this many seconds on the device."""


class SpunPace:
    """How the modules of one model compute."""

    def __init__(self) -> None:
        self.compute: Compute = lambda seconds: None


class SpunModel(nn.Module):
    """The pieces of a profile in the order of forward, under their own names."""

    def __init__(self, job: ShardedJob, device: torch.device) -> None:
        super().__init__()
        self.pace = SpunPace()
        for number, count in enumerate(job.loose):
            self.register_parameter(f"loose{number}", _parameter(count, device))
        self._row: list[SpunModule] = []
        for piece in job.pieces:
            self._row.append(SpunModule(piece, self.pace, device))
            _put(self, piece.name, self._row[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if loose := list(self.parameters(recurse=False)):
            x = _spun(x, self.pace, 0.0, 0.0, *loose)
        for module in self._row:
            x = module(x)
        return x


class SpunModule(nn.Module):
    """One piece."""

    def __init__(self, piece: ModelPiece, pace: SpunPace, device: torch.device) -> None:
        super().__init__()
        self._pace, self._forward_s, self._backward_s = pace, piece.forward_s, piece.backward_s
        for number, count in enumerate(piece.elements):
            self.register_parameter(f"p{number}", _parameter(count, device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _spun(x, self._pace, self._forward_s, self._backward_s, *self.parameters(recurse=False))
        return found


class _Spun(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, pace: SpunPace, forward_s: float, backward_s: float, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.pace, ctx.backward_s = pace, backward_s
        ctx.save_for_backward(*parameters)
        pace.compute(forward_s)
        # FSDP2 warns of modules that return views.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # First: where the plan recomputes, it happens here.
        parameters = ctx.saved_tensors
        ctx.pace.compute(ctx.backward_s)
        return gradients[0], None, None, None, *(torch.zeros_like(parameter) for parameter in parameters)


_spun: Any = _Spun.apply


class SpunStep:
    """A sharded model, and its training step."""

    def __init__(self, job: ShardedJob, device: torch.device, mesh: DeviceMesh) -> None:
        self._update_s = job.update_s
        self._model: Any = SpunModel(job, device)
        fully_shard(self._model, plan=job.plan, mesh=mesh)
        self._input = torch.zeros(1, device=device)

    def run(self, compute: Compute) -> None:
        """Queue one step."""
        self._model.pace.compute = compute
        self._model(self._input).sum().backward()
        compute(self._update_s)
        self._model.zero_grad(set_to_none=True)


def _parameter(elements: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(elements, device=device))


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(last, module)
