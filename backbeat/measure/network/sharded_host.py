"""What FSDP2 costs the host: small models are stepped plain and sharded, and the difference is counted.

FSDP2 calls hooks before and after each unit, in forward and in backward. These make views of every parameter, queue
copies and collectives and wait for events. All of it is the host's work, and takes as long for one element as for a
million. Where it is more than the device's work, the host sets the pace of the step.

Two models tell units and parameters apart: both have as many units, one more parameters in each. Forward and backward
are timed apart from the optimizer, which runs once a step, whatever the number of micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from backbeat.comm.agreement import wait_for_all
from backbeat.comm.spin import until
from backbeat.errors import MissingPartError, where_raised
from backbeat.measure.model.training_step import make_optimizer

if TYPE_CHECKING:
    from backbeat.comm.communicators import Communicators

T = TypeVar("T")

_UNITS = 4
_FEW, _MANY = 2, 16
"""Parameters of a unit."""
_WARMUP, _STEPS, _FEWEST = 3, 8, 2


class StepTime(NamedTuple):
    """What the host takes for a step, in seconds."""

    passes_s: float
    """Forward and backward."""
    update_s: float


def measure_sharded_host(communicators: Communicators, limit_s: float = math.inf) -> tuple[float, float, float]:
    """Seconds on this rank for each unit, each parameter, and each parameter's update. Collective: every rank calls it
    alike. Steps are repeated less often where they take longer than `limit_s`.

    Where FSDP2 does not run, on all ranks or some, this raises MissingPartError on every rank, and the communicators
    are as they were.
    """
    if communicators.backend != "nccl":
        return _measured(communicators, communicators.process_group, limit_s)
    # Of a step that only some ranks issue, collectives are left that never end. They must not stand before what others
    # send.
    own = communicators.new_group()
    try:
        found = _measured(communicators, own, limit_s)
    except MissingPartError:
        own.abort()
        raise
    dist.destroy_process_group(own)
    return found


def _measured(communicators: Communicators, group: Any, limit_s: float) -> tuple[float, float, float]:
    began, store = time.perf_counter(), communicators.store
    added = []
    for parameters in (_FEW, _MANY):
        topic = f"sharded-host/{parameters}"
        plain, step = _together(communicators, topic, partial(_prepare, communicators, group, parameters))
        taken: list[StepTime] = []
        for index in range(_WARMUP + _STEPS):
            enough = f"{topic}/{index}/enough"
            if communicators.rank == 0 and index >= _WARMUP + _FEWEST and time.perf_counter() - began > limit_s:
                store.set(enough, "")
            taken.append(_together(communicators, f"{topic}/{index}", step))
            _until_idle(communicators)
            # Rank 0 wrote it, if at all, before all ranks met in the step.
            if store.check([enough]):
                break
        added.append(StepTime(*(one - two for one, two in zip(_quickest(taken), plain, strict=True))))
    few, many = added
    return *split(few.passes_s, many.passes_s), max(many.update_s, 0.0) / (_UNITS * _MANY)


def split(few_s: float, many_s: float) -> tuple[float, float]:
    """Of what forward and backward of the two models take longer when sharded, the part of a unit and of a parameter.

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


def _prepare(communicators: Communicators, group: Any, parameters: int) -> tuple[StepTime, Callable[[], StepTime]]:
    """What a plain step takes, and how a sharded one is taken. Nothing is sent yet."""
    # torch takes a second to import it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = communicators.device
    mesh = DeviceMesh.from_group(group, device.type)
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


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> StepTime:
    """Issuing a step to an idle device."""
    began = time.perf_counter()
    model(given).sum().backward()
    passed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepTime(passed - began, time.perf_counter() - passed)


def _quickest(taken: list[StepTime]) -> StepTime:
    """What disturbs a host makes it slower."""
    return StepTime(*(min(part) for part in zip(*taken[_WARMUP:], strict=True)))


def _until_idle(communicators: Communicators) -> None:
    if communicators.device.type == "cuda":
        cuda: Any = torch.cuda  # untyped in parts
        done = cuda.Event()
        done.record()
        until(done, communicators.timeout.total_seconds())


def _together(communicators: Communicators, topic: str, call: Callable[[], T]) -> T:
    """What the call returns on this rank. What it raises on one rank ends the measurement on all of them.

    Ranks tell each other in the store. A GPU's host does not wait for collectives that it issues, so no rank waits for
    one that failed.
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
    where = "" if failed == communicators.size else f" on {failed} of {communicators.size} ranks"
    raise MissingPartError(f"FSDP2 does not run{where} ({store.get(f'{topic}/error').decode()})")
