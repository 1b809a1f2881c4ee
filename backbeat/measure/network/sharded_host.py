"""What FSDP2 costs the host: small models are stepped plain and sharded, and the difference is counted.

FSDP2 calls hooks before and after each unit, in forward and in backward. These make views of every parameter, queue
copies and collectives and wait for events. All of it is the host's work, and takes as long for one element as for a
million. Where it is more than the device's work, the host sets the pace of the step.

Two models tell units and parameters apart: both have as many units, one more parameters in each. Each is sharded twice:
units that are resharded after forward are gathered once more for backward. Forward and backward are timed apart from
the optimizer, which runs once a step, whatever the number of micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from backbeat.comm.agreement import RankStore
from backbeat.errors import MissingPartError, where_raised
from backbeat.measure.model.training_step import make_optimizer
from backbeat.measure.network.bench import until_idle
from backbeat.model.collective_times import ShardedHost

if TYPE_CHECKING:
    from backbeat.comm.communicators import Communicators

T = TypeVar("T")

_UNITS = 4
_FEW, _MANY = 2, 24
"""Parameters of a unit."""
_WARMUP, _STEPS, _FEWEST = 3, 8, 4


class StepTime(NamedTuple):
    """What the host takes for a step, in seconds."""

    passes_s: float
    """Forward and backward."""
    update_s: float


class AddedHostTimes(NamedTuple):
    """What FSDP2 adds to the host's time for forward and backward of a small model, in seconds. Units have few or many
    parameters, and are kept until backward or resharded after forward."""

    few_s: float
    many_s: float
    few_resharded_s: float
    many_resharded_s: float
    update_s: float
    """The update of the larger model."""


def by_unit_and_parameter(added: AddedHostTimes) -> ShardedHost:
    """What each unit and each parameter adds.

    Units of 1 ms and parameters of 0.1 ms: 4 units of 2 parameters take 4.8 ms, and of 24 parameters 13.6. Resharded
    units take 0.5 ms more.

    >>> by_unit_and_parameter(AddedHostTimes(4.8e-3, 13.6e-3, 6.8e-3, 15.6e-3, 0.0)).reshard_unit_s
    0.0005
    """

    def split(few_s: float, many_s: float) -> tuple[float, float]:
        """The part of a unit, and of a parameter."""
        parameter_s = max(many_s - few_s, 0.0) / (_UNITS * (_MANY - _FEW))
        return max(few_s / _UNITS - _FEW * parameter_s, 0.0), parameter_s

    more_s = (added.few_resharded_s - added.few_s, added.many_resharded_s - added.many_s)
    update_s = max(added.update_s, 0.0) / (_UNITS * _MANY)
    found = (*split(added.few_s, added.many_s), update_s, *split(*more_s))
    names = ("unit_s", "parameter_s", "update_s", "reshard_unit_s", "reshard_parameter_s")
    return ShardedHost(**{name: float(f"{seconds:.4g}") for name, seconds in zip(names, found, strict=True)})


def measure_sharded_host(communicators: Communicators, limit_s: float = math.inf) -> AddedHostTimes:
    """On this rank. Collective: every rank calls it alike. Steps are repeated less often where they take longer than
    `limit_s`.

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


def _measured(communicators: Communicators, group: Any, limit_s: float) -> AddedHostTimes:
    until_s = time.perf_counter() + limit_s
    added: dict[tuple[int, bool], StepTime] = {}
    for parameters in (_FEW, _MANY):
        plain = _usual(communicators, group, parameters, None, until_s)
        for reshard in (False, True):
            taken = _usual(communicators, group, parameters, reshard, until_s)
            added[parameters, reshard] = StepTime(*(one - two for one, two in zip(taken, plain, strict=True)))
    return AddedHostTimes(
        few_s=added[_FEW, False].passes_s,
        many_s=added[_MANY, False].passes_s,
        few_resharded_s=added[_FEW, True].passes_s,
        many_resharded_s=added[_MANY, True].passes_s,
        update_s=added[_MANY, False].update_s,
    )


def _usual(communicators: Communicators, group: Any, parameters: int, reshard: bool | None, until_s: float) -> StepTime:
    """The median step: what disturbs a host is in every few steps of training, too. All ranks take as many, and fewer
    once it is later than `until_s` on rank 0. A model with `reshard` None is not sharded."""
    store, topic = communicators.store, f"sharded-host/{parameters}/{reshard}"
    step = _together(communicators, topic, partial(_prepare, communicators, group, parameters, reshard))
    taken = []
    for index in range(_WARMUP + _STEPS):
        enough = f"{topic}/{index}/enough"
        if communicators.rank == 0 and index >= _WARMUP + _FEWEST and time.perf_counter() > until_s:
            store.set(enough, "")
        taken.append(_together(communicators, f"{topic}/{index}", step))
        until_idle(communicators.device, communicators.timeout.total_seconds())
        # Rank 0 wrote it, if at all, before all ranks met in the step.
        if store.check([enough]):
            break
    return StepTime(*(median(part) for part in zip(*taken[_WARMUP:], strict=True)))


class _SmallLayer(nn.Module):
    """One parameter, in a module of its own as in models."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.weight


def _prepare(communicators: Communicators, group: Any, parameters: int, reshard: bool | None) -> Callable[[], StepTime]:
    """How a step is taken of units of so many parameters, each with an element for every rank. Nothing is sent yet."""
    units = (nn.Sequential(*(_SmallLayer(communicators.size) for _ in range(parameters))) for _ in range(_UNITS))
    model = nn.Sequential(*units).to(communicators.device)
    if reshard is not None:
        # torch takes a second to import it.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, communicators.device.type)
        for unit in model:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
    given = torch.zeros(communicators.size, device=communicators.device)
    return partial(_step_s, model, make_optimizer("adamw", list(model.parameters())), given)


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> StepTime:
    """Issuing a step to an idle device."""
    began = time.perf_counter()
    model(given).sum().backward()
    passed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepTime(passed - began, time.perf_counter() - passed)


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
    ranks = RankStore(communicators, topic)
    ranks.wait_for_all("FSDP2 was tried", "look at what the others printed, and start all again")
    failed = store.add(f"{topic}/failed", 0)
    if not failed:
        return found
    where = "" if failed == communicators.size else f" on {failed} of {communicators.size} ranks"
    raise MissingPartError(f"FSDP2 does not run{where} ({store.get(f'{topic}/error').decode()})")
