"""What FSDP2 costs the host: small models are stepped plain and sharded, and the difference is counted.

FSDP2 calls hooks before and after each unit, in forward and in backward. These make views of every parameter, queue
copies and collectives and wait for events. All of it is the host's work, and takes as long for one element as for a
million. Where it is more than the device's work, the host sets the pace of the step.

Two models tell units and parameters apart: both have as many units, one more parameters in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from backbeat.comm.agreement import wait_for_all
from backbeat.comm.spin import until
from backbeat.errors import MeasurementError, MissingPartError
from backbeat.measure.model.optimizers import make_optimizer
from backbeat.measure.model.training_step import where_raised

if TYPE_CHECKING:
    from backbeat.comm.communicators import Communicators

T = TypeVar("T")

_UNITS = 4
_FEW, _MANY = 2, 16
"""Parameters of a unit."""
_WARMUP, _STEPS = 3, 8


def measure_sharded_host(communicators: Communicators) -> tuple[float, float]:
    """Seconds for each unit and for each parameter on this rank. Collective: every rank calls it alike.

    Where FSDP2 does not run, this raises MissingPartError on every rank, and the communicators are as they were.
    """
    added = []
    for parameters in (_FEW, _MANY):
        topic = f"sharded-host/{parameters}"
        plain_s, step = _together(communicators, topic, partial(_prepare, communicators, parameters), sends=False)
        taken = []
        for index in range(_WARMUP + _STEPS):
            taken.append(_together(communicators, f"{topic}/{index}", step, sends=True))
            _until_idle(communicators)
        added.append(_quickest(taken) - plain_s)
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


def _prepare(communicators: Communicators, parameters: int) -> tuple[float, Callable[[], float]]:
    """What a plain step takes, and how a sharded one is taken. Nothing is sent yet."""
    # torch takes a second to import it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = communicators.device
    mesh = DeviceMesh.from_group(communicators.process_group, device.type)
    plain, sharded = (
        nn.Sequential(*(_SmallUnit(parameters, mesh.size()) for _ in range(_UNITS))).to(device) for _ in range(2)
    )
    for unit in sharded:
        fully_shard(unit, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    given = torch.zeros(1, device=device)
    alone, step = (
        partial(_step_s, model, make_optimizer("adamw", list(model.parameters())), given) for model in (plain, sharded)
    )
    taken = []
    for _ in range(_WARMUP + _STEPS):
        taken.append(alone())
        _until_idle(communicators)
    return _quickest(taken), step


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> float:
    """Issuing a step to an idle device."""
    began = time.perf_counter()
    model(given).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def _quickest(taken: list[float]) -> float:
    """What disturbs a host makes it slower."""
    return min(taken[_WARMUP:])


def _until_idle(communicators: Communicators) -> None:
    if communicators.device.type == "cuda":
        cuda: Any = torch.cuda  # untyped in parts
        done = cuda.Event()
        done.record()
        until(done, communicators.timeout.total_seconds())


def _together(communicators: Communicators, topic: str, call: Callable[[], T], *, sends: bool) -> T:
    """What the call returns on this rank. What it raises on one rank ends the measurement on all of them.

    Ranks tell each other in the store. A GPU's host does not wait for collectives that it issues, so no rank waits for
    one that failed. Of a step that only some ranks issued, collectives are left that never end.
    """
    store = communicators.store
    try:
        found = call()
    except Exception as error:
        store.set(f"{topic}/error", f"rank {communicators.rank}: {where_raised(error)}")
        store.add(f"{topic}/failed", 1)
    wait_for_all(communicators, topic, "FSDP2 was tried", "look at what the others printed, and start all again")
    failed = store.add(f"{topic}/failed", 0)
    if not failed:
        return found
    text = store.get(f"{topic}/error").decode()
    if sends and failed < communicators.size:
        raise MeasurementError(
            f"a step of FSDP2 failed on {failed} of {communicators.size} ranks ({text}): start all of them again"
        )
    raise MissingPartError(f"FSDP2 does not run ({text})")
