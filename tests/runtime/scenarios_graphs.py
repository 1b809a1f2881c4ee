"""Graphs that are not the plain one: unused and frozen parameters, exceptions, checkpoints, another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rank_asserts import raises
from scenario_rig import Context, both, mlp, scenario, start, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Branches(nn.Module):
    """Two branches, of which the caller picks which run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, use: str = "lr") -> torch.Tensor:
        y = self.stem(x)
        out = y
        if "l" in use:
            out = out + self.left(y)
        if "r" in use:
            out = out + self.right(y)
        if "s" in use:
            out = out + self.spare(y)
        return out


def _branches(ctx: Context, pattern: Callable[[int, int], str], steps: int, **options: Any) -> None:
    wrapped, oracle = start(ctx, Branches, **options)
    for step in range(steps):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r), use=pattern(step, r)).square().sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


@scenario("parameters unused on every rank, no flag: their .grad stays None")
def unused_everywhere(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "lr", 4)


@scenario("parameters unused on some ranks, no flag")
def unused_by_rank(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "l" if rank == 0 else "r", 4)


@scenario("parameters unused in some steps, no flag")
def unused_by_step(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "lr" if step % 2 else "l", 8)


@scenario("parameters unused on changing ranks and steps, no flag")
def unused_changing(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "lrs"[(step + rank) % 3] + "lr"[(step * rank) % 2], 12)


@scenario("parameters unused for long, then used by one rank")
def unused_then_used(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "lrs" if step >= 9 and rank == ctx.size - 1 else "lr", 14)


@scenario("find_unused_parameters=True, parameters unused by rank and step")
def unused_with_flag(ctx: Context) -> None:
    _branches(
        ctx, lambda step, rank: "lrs"[(step + rank) % 3] + "lr"[(step * rank) % 2], 6, find_unused_parameters=True
    )


@scenario("static_graph=True, a parameter unused in every step")
def unused_static(ctx: Context) -> None:
    _branches(ctx, lambda step, rank: "lr", 4, static_graph=True)


@scenario("accumulation where the second backward uses fewer parameters")
def unused_accumulating(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Branches)
    for step in range(6):
        if step % 2 == 0:
            wrapped.zero_grad()
            oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r), use="lr" if step % 2 == 0 else "l").square().sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


@scenario("no_sync backward uses parameters that the synchronised one does not")
def unused_after_no_sync(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Branches)
    for step in range(4):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        with wrapped.no_sync():
            wrapped(ctx.data(3, 6, step=step, rank=ctx.rank), use="rs" if ctx.rank == 0 else "r").sum().backward()
        oracle.each(
            lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r), use="rs" if r == 0 else "r").sum().backward()
        )

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=30 + step, rank=r), use="l").square().sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


@scenario("parameters unfrozen after wrapping")
def unfrozen(ctx: Context) -> None:
    def factory() -> nn.Module:
        model = mlp()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    wrapped, oracle = start(ctx, factory)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    for model in (wrapped.module, *oracle.replicas):
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


@scenario("parameters frozen after wrapping")
def frozen(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    for model in (wrapped.module, *oracle.replicas):
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
    train(ctx, wrapped.module, wrapped, oracle, steps=8)
    for model in (wrapped.module, *oracle.replicas):
        for parameter in model[2].parameters():
            parameter.requires_grad_(True)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fail:
            raise FloatingPointError("a planted failure")
        return gradient, None


class Breakable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = Fails.apply(layer(x), self.fail_at == index)
        return x


@scenario("an exception in backward on every rank, then good steps")
def exception_everywhere(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Breakable)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    wrapped.module.fail_at = 1
    raises(FloatingPointError, lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward())
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


@scenario("an exception in backward at another place on each rank, then good steps")
def exception_differs(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Breakable)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    wrapped.module.fail_at = ctx.rank % 3
    raises(FloatingPointError, lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward())
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


@scenario("an exception in backward on one rank: the others are told, then good steps")
def exception_on_one(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Breakable, strict=True)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    if ctx.rank == 0:
        wrapped.module.fail_at = 1
    raises(
        (FloatingPointError, RuntimeError),
        lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward(),
        match="planted" if ctx.rank == 0 else "rank 0 broke off",
    )
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


class Checkpointed(nn.Module):
    """A shared block and single ones, each under a checkpoint."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.reentrant, self.twice = reentrant, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = checkpoint(self.shared, y, use_reentrant=self.reentrant)
        if self.twice:
            y = checkpoint(self.shared, torch.tanh(y), use_reentrant=self.reentrant)
        return checkpoint(self.last, torch.tanh(y), use_reentrant=self.reentrant)


@scenario("activation checkpointing, not reentrant")
def checkpointed(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: Checkpointed(False, True))
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


@scenario("activation checkpointing, reentrant")
def checkpointed_reentrant(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: Checkpointed(True, False))
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


@scenario("a shared module under reentrant checkpointing")
def shared_reentrant(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: Checkpointed(True, True))
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


@scenario("reentrant checkpointing of a shared module switched on in mid-training")
def reentrant_later(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: Checkpointed(False, True))
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    for model in (wrapped.module, *oracle.replicas):
        model.reentrant = True
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


class Twice(nn.Module):
    """The same block plainly and, further from the loss, where the caller says so under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)
        self.block = nn.Linear(6, 6)
        self.nested = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = checkpoint(self.block, x, use_reentrant=True) if self.nested else x
        return self.block(torch.tanh(self.last(y)))


@scenario("a module used plainly, later also under a reentrant checkpoint that ends backward")
def reentrant_beside(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Twice)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    for model in (wrapped.module, *oracle.replicas):
        model.nested = True
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


@scenario("the whole wrapper under a reentrant checkpoint")
def wrapper_reentrant(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            x = ctx.data(3, 6, step=step, rank=r).requires_grad_()
            checkpoint(m, x, use_reentrant=True).square().sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


class Reordered(nn.Module):
    """Runs its layers in the order given, so that gradients become ready in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.order: Sequence[int] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


@scenario("ready order that differs between ranks and steps")
def ready_order(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Reordered)
    for step in range(6):

        def order(rank: int, step: int = step) -> list[int]:
            return [(i * (1 if rank % 2 == 0 else -1) + step) % 4 for i in range(4)]

        wrapped.module.order = order(ctx.rank)
        for rank, replica in enumerate(oracle.replicas):
            replica.order = order(rank)
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), str(step))
