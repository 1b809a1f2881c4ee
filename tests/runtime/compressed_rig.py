"""What checks of compressed plans share: plans and wrappers that encode, and what is owed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from scenario_rig import Context, mlp, small_plan
from torch import nn

from backbeat.model import Plan
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel

ALL = Compression(density=1.0)
SOME = Compression(density=0.1)


def compressed(model: nn.Module, compression: Compression | None, *, every: int = 1, communicators: int = 1) -> Plan:
    """Small buckets, each `every`th of them compressed."""
    plan = small_plan(model, communicators=communicators)
    buckets = [replace(g, compression=compression if i % every == 0 else None) for i, g in enumerate(plan.buckets)]
    return replace(plan, buckets=tuple(buckets))


def wrap(ctx: Context, kind: Compression, factory: Callable[[], nn.Module] = mlp, **options: Any) -> Any:
    every = options.pop("every", 1)
    model = ctx.build(factory)
    return DistributedDataParallel(model, plan=compressed(model, kind, every=every), **options)


def backward(ctx: Context, model: Any, step: int, **arguments: Any) -> torch.Tensor:
    loss = model(ctx.data(3, 6, step=step, rank=ctx.rank), **arguments).square().mean()
    loss.backward()
    return loss.detach()


def same_everywhere(ctx: Context, model: nn.Module, what: str) -> None:
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(ctx.size)]
    dist.all_gather(gathered, flat)
    for rank, other in enumerate(gathered):
        assert torch.equal(other, gathered[0]), f"{what}: the weights of rank {rank} are not rank 0's"


def owed(ctx: Context, wrapped: Any) -> dict[str, torch.Tensor]:
    """The sum over ranks of what each has not sent, over their number."""
    state = wrapped.residual_state_dict()
    found = {}
    for name, parameter in wrapped.module.named_parameters():
        mine = state["residuals"].get(name, torch.zeros_like(parameter)).clone().to(ctx.device)
        dist.all_reduce(mine)
        found[name] = mine / ctx.size
    return found


def local_gradients(ctx: Context, model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """The mean over ranks of the gradients of this step, made by hand."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(ctx.size):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        replica(ctx.data(3, 6, step=step, rank=rank)).square().mean().backward()
        for name, parameter in replica.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad / ctx.size
    return found
