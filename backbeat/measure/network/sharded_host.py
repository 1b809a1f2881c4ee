"""What FSDP2 costs the host: small models are stepped plain and sharded, and the difference is counted.

FSDP2 calls hooks before and after each unit, in forward and in backward. These make views of every parameter, queue
copies and collectives and wait for events. All of it is the host's work, and takes as long for one element as for a
million. Where it is more than the device's work, the host sets the pace of the step.

Two models tell units and parameters apart: both have as many units, one more parameters in each.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from backbeat.measure.model.optimizers import make_optimizer

_UNITS = 4
_FEW, _MANY = 2, 16
"""Parameters of a unit."""
_WARMUP, _STEPS = 3, 8


def measure_sharded_host(group: Any, device: torch.device) -> tuple[float, float]:
    """Seconds for each unit and for each parameter on this rank. Collective: every rank of the group calls it alike."""
    # torch takes a second to import it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    added = []
    for parameters in (_FEW, _MANY):
        plain, sharded = (
            nn.Sequential(*(_SmallUnit(parameters, mesh.size()) for _ in range(_UNITS))).to(device) for _ in range(2)
        )
        for unit in sharded:
            fully_shard(unit, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        added.append(_host_s(sharded, device) - _host_s(plain, device))
    return split(*added)


def split(few_s: float, many_s: float) -> tuple[float, float]:
    """Of what the two models take longer when sharded, the part of a unit and of a parameter.

    Units of 1 ms and parameters of 0.1 ms: 4 units of 2 parameters take 4.8 ms, and of 16 parameters 10.4.

    >>> tuple(round(seconds, 9) for seconds in split(4.8e-3, 10.4e-3))
    (0.001, 0.0001)
    """
    parameter_s = max(many_s - few_s, 0.0) / (_UNITS * (_MANY - _FEW))
    return max(few_s / _UNITS - _FEW * parameter_s, 0.0), parameter_s


class _SmallUnit(nn.Module):
    def __init__(self, parameters: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(parameters))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + torch.cat(list(self.weights)).sum()


def _host_s(model: nn.Module, device: torch.device) -> float:
    """The quickest of a few steps, each issued to an idle device: what disturbs a host makes it slower."""
    optimizer = make_optimizer("adamw", list(model.parameters()))
    given = torch.zeros(1, device=device)
    taken = []
    for _ in range(_WARMUP + _STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        model(given).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(time.perf_counter() - began)
    return min(taken[_WARMUP:])
