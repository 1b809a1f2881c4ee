"""Training situations, each against a mean of local gradients made by hand.

A scenario is written once and runs on several routes: backbeat's reducer, the same groups on two channels, the same
groups decoupled (scattered, and gathered in others), the same groups encoded without loss, the plan through torch's
reducer (`backend="ddp"`), and stock DDP for the record.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from scenario_rig import SCENARIOS as SCENARIOS
from scenario_rig import Context, Oracle, SkipScenarioError, both, mlp, scenario, small_plan, start, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from backbeat.model import Group, Plan


@scenario("ordinary training")
def plain(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=5)


@scenario("no plan: stock DDP's groups, rebuilt once in ready order")
def no_plan(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    train(ctx, model, ctx.wrap(model, bucket_cap_mb=0.0004), oracle, steps=5)


@scenario("two channels")
def two_channels(ctx: Context) -> None:
    model = ctx.build(lambda: mlp(depth=6))
    oracle = Oracle(ctx, model)
    train(ctx, model, ctx.wrap(model, plan=small_plan(model, channels=2)), oracle, steps=5)


@scenario("gradients accumulated over two synchronised backwards")
def accumulate(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(4):
        if step % 2 == 0:
            wrapped.zero_grad()
            oracle.each(lambda m, r: m.zero_grad())
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), str(step))


@scenario("zero_grad(set_to_none=False)")
def keep_zeros(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(4):
        wrapped.zero_grad(set_to_none=False)
        oracle.each(lambda m, r: m.zero_grad(set_to_none=False))
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), str(step))


@scenario("no_sync: accumulate locally, then synchronise")
def no_sync(ctx: Context) -> None:
    _no_sync(ctx)


@scenario("no_sync with static_graph=True")
def no_sync_static(ctx: Context) -> None:
    _no_sync(ctx, static_graph=True)


@scenario("no_sync with find_unused_parameters=True")
def no_sync_unused_flag(ctx: Context) -> None:
    _no_sync(ctx, find_unused_parameters=True)


def _no_sync(ctx: Context, **options: Any) -> None:
    wrapped, oracle = start(ctx, **options)
    for step in range(4):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, micro: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=10 * step + micro, rank=r)).sum().backward()

        with wrapped.no_sync():
            for micro in range(2):
                body(wrapped, ctx.rank, micro)
        oracle.each(lambda m, r: [body(m, r, micro) for micro in range(2)])
        oracle.check(wrapped, f"step {step} before the sync")
        both(ctx, wrapped, oracle, lambda m, r: body(m, r, 2), f"step {step}")


@scenario("no_sync around the first step of all")
def no_sync_first(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    with wrapped.no_sync():
        wrapped(ctx.data(3, 6, step=0, rank=ctx.rank)).sum().backward()
    oracle.each(lambda m, r: m(ctx.data(3, 6, step=0, rank=r)).sum().backward())
    for step in range(1, 3):
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), str(step))


@scenario("no_sync decides at forward: backward outside stays local, backward inside is synchronised")
def no_sync_forward_decides(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    wrapped.zero_grad()
    oracle.each(lambda m, r: m.zero_grad())
    with wrapped.no_sync():
        local = wrapped(ctx.data(3, 6, step=20, rank=ctx.rank)).sum()
    local.backward()
    oracle.each(lambda m, r: m(ctx.data(3, 6, step=20, rank=r)).sum().backward())
    oracle.check(wrapped, "forward inside no_sync")
    synced = wrapped(ctx.data(3, 6, step=21, rank=ctx.rank)).sum()
    with wrapped.no_sync():
        synced.backward()
    oracle.each(lambda m, r: m(ctx.data(3, 6, step=21, rank=r)).sum().backward())
    oracle.reduce()
    oracle.check(wrapped, "forward outside no_sync")


@scenario("no_sync and synchronised forwards in one backward")
def no_sync_mixed(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            with m.no_sync() if hasattr(m, "no_sync") else nullcontext():
                first = m(ctx.data(3, 6, step=step, rank=r)).sum()
            (first + m(ctx.data(3, 6, step=50 + step, rank=r)).square().sum()).backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("forward, forward, backward, backward")
def forward_forward(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(4):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        inputs = [ctx.data(3, 6, step=10 * step + i, rank=ctx.rank) for i in range(2)]
        losses = [wrapped(x).square().sum() for x in inputs]
        for i, loss in enumerate(losses):
            loss.backward()
            oracle.each(lambda m, r, i=i, s=step: m(ctx.data(3, 6, step=10 * s + i, rank=r)).square().sum().backward())
            oracle.reduce()
            oracle.check(wrapped, f"step {step} backward {i}")


@scenario("the wrapper used twice in one backward")
def double_use(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            y = m(ctx.data(3, 6, step=step, rank=r))
            m(y * 2).square().sum().backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("one forward, two backwards (retain_graph)")
def retain_graph(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        y = wrapped(ctx.data(3, 6, step=step, rank=ctx.rank))
        for i, loss in enumerate((y.sum(), y.square().sum())):
            loss.backward(retain_graph=i == 0)

        def body(m: Any, r: int, step: int = step) -> None:
            y = m(ctx.data(3, 6, step=step, rank=r))
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()

        oracle.each(body)
        oracle.reduce()
        oracle.check(wrapped, f"step {step}")


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
    _must_raise(FloatingPointError, lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward())
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


@scenario("an exception in backward at another place on each rank, then good steps")
def exception_differs(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Breakable)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    wrapped.module.fail_at = ctx.rank % 3
    _must_raise(FloatingPointError, lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward())
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


@scenario("an exception in backward on one rank: the others are told, then good steps")
def exception_on_one(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Breakable, strict=True)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    if ctx.rank == 0:
        wrapped.module.fail_at = 1
    _must_raise(
        (FloatingPointError, RuntimeError),
        lambda: wrapped(ctx.data(3, 6, step=9, rank=ctx.rank)).square().sum().backward(),
        match="planted" if ctx.rank == 0 else "rank 0 broke off",
    )
    wrapped.module.fail_at = None
    train(ctx, wrapped.module, wrapped, oracle, steps=3)


def _must_raise(kind: Any, call: Callable[[], Any], match: str = "") -> None:
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError("nothing was raised")
    assert match in said, f"the message is {said!r}, without {match!r}"


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


@scenario("fp32, bf16 and fp64 parameters in one model")
def mixed_dtypes(ctx: Context) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6).bfloat16()
            self.c = nn.Linear(6, 6).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).bfloat16()).double())

    wrapped, oracle = start(ctx, Mixed)
    for step in range(4):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(
            ctx,
            wrapped,
            oracle,
            lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).square().sum().backward(),
            str(step),
            rtol=2e-2,
            atol=2e-2,
        )


@scenario("fp16 model")
def half(ctx: Context) -> None:
    _lower(ctx, torch.float16)


@scenario("bf16 model")
def brain(ctx: Context) -> None:
    _lower(ctx, torch.bfloat16)


def _lower(ctx: Context, dtype: torch.dtype) -> None:
    wrapped, oracle = start(ctx, lambda: mlp().to(dtype))
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(
            ctx,
            wrapped,
            oracle,
            lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r).to(dtype)).float().square().sum().backward(),
            str(step),
            rtol=2e-2,
            atol=2e-2,
        )


@scenario("autocast to bf16")
def autocast(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
                loss = m(ctx.data(3, 6, step=step, rank=r)).float().square().sum()
            loss.backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("complex parameters")
def complex_parameters(ctx: Context) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
            self.b = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64).T)
            self.real = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.real(x).to(torch.complex64) @ self.w + self.b).abs()

    wrapped, oracle = start(ctx, Complex)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), str(step))


@scenario("sparse embedding gradients")
def sparse(ctx: Context) -> None:
    if ctx.device.type != "cpu":
        raise SkipScenarioError("NCCL cannot sum sparse tensors")

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 6, sparse=True)
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(x))

    wrapped, oracle = start(ctx, Sparse)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            rows = torch.tensor([step, r, 3 + r])
            m(rows).square().sum().backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("channels-last weights keep their strides")
def channels_last(ctx: Context) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)

    wrapped, oracle = start(ctx, factory)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(2, 3, 8, 8, step=step, rank=r)).square().sum().backward()

        both(ctx, wrapped, oracle, body, str(step), rtol=1e-4, atol=1e-4)
        for parameter in wrapped.parameters():
            assert parameter.grad.stride() == parameter.stride(), "the gradient's strides are not the parameter's"


@scenario("NaN and Inf pass through")
def not_finite(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: nn.Linear(6, 6))
    for step, bad in enumerate((float("nan"), float("inf"), 1.0)):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, bad: float = bad, step: int = step) -> None:
            x = ctx.data(3, 6, step=step, rank=r)
            if r == 0:
                x[0, 0] = bad
            m(x).sum().backward()

        both(ctx, wrapped, oracle, body, str(bad), equal_nan=True)


@scenario("clipping by norm sees reduced gradients")
def clipping(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        body = lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).square().sum().backward()  # noqa: E731
        both(ctx, wrapped, oracle, body, "before clipping")
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        oracle.each(lambda m, r: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
        oracle.check(wrapped, "after clipping")


@scenario("GradScaler: unscale, an overflow on one rank skips the step everywhere")
def grad_scaler(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: nn.Linear(6, 6))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    ctx.attach(wrapped, optimizer)
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=16.0)
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    x = ctx.data(3, 6, step=0, rank=ctx.rank)
    if ctx.rank == 0:
        x[0, 0] = float("inf")
    scaler.scale(wrapped(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    for old, new in zip(before, wrapped.parameters(), strict=True):
        assert torch.equal(old, new), "a step was taken with an overflow on one rank"
    assert scaler.get_scale() == 8.0, "the scale was not halved"
    optimizer.zero_grad()
    scaler.scale(wrapped(ctx.data(3, 6, step=1, rank=ctx.rank)).square().sum()).backward()
    scaler.unscale_(optimizer)
    oracle.each(lambda m, r: m(ctx.data(3, 6, step=1, rank=r)).square().sum().backward())
    oracle.reduce()
    oracle.check(wrapped, "unscaled")


@scenario("communication hooks: allreduce, fp16 compression, PowerSGD")
def comm_hooks(ctx: Context) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if ctx.route == "decoupled":
        raise SkipScenarioError("decoupled plans refuse communication hooks by name")

    for name, tolerance in (("allreduce_hook", 1e-5), ("fp16_compress_hook", 2e-2)):
        wrapped, oracle = start(ctx)
        wrapped.register_comm_hook(None, getattr(default_hooks, name))
        for step in range(3):
            wrapped.zero_grad()
            oracle.each(lambda m, r: m.zero_grad())
            both(
                ctx,
                wrapped,
                oracle,
                lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(),
                f"{name} {step}",
                rtol=tolerance,
                atol=tolerance,
            )
    wrapped, oracle = start(ctx)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(2):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(ctx, wrapped, oracle, lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(), "power")


@scenario("a communication hook with parameters unused by rank")
def comm_hook_unused(ctx: Context) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if ctx.route == "decoupled":
        raise SkipScenarioError("decoupled plans refuse communication hooks by name")
    wrapped, oracle = start(ctx, Branches)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(4):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r), use="l" if r == 0 else "r").sum().backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("buffers are broadcast from rank 0")
def buffers(ctx: Context) -> None:
    model = ctx.build(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    replica = copy.deepcopy(model)
    wrapped = ctx.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(ctx.data(5, 6, step=step, rank=ctx.rank)).square().sum().backward()
        replica(ctx.data(5, 6, step=step, rank=0))
    with torch.no_grad():
        wrapped(ctx.data(5, 6, step=9, rank=ctx.rank))
        wrapped.require_forward_param_sync = True
    wrapped.eval()
    wrapped(ctx.data(5, 6, step=9, rank=ctx.rank)).sum().backward()
    replica(ctx.data(5, 6, step=9, rank=0))
    found = wrapped.module[1].running_mean
    torch.testing.assert_close(found, replica[1].running_mean, msg="running_mean is not rank 0's")


@scenario("join: ranks with fewer batches")
def join(ctx: Context) -> None:
    for by_initial in (True, False):
        wrapped, oracle = start(ctx)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        ctx.attach(wrapped, optimizer)
        others = [torch.optim.SGD(replica.parameters(), lr=0.05) for replica in oracle.replicas]
        with wrapped.join(divide_by_initial_world_size=by_initial):
            for step in range(3 + ctx.rank):
                optimizer.zero_grad()
                wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).square().sum().backward()
                optimizer.step()
        for step in range(3 + ctx.size - 1):
            active = [r for r in range(ctx.size) if step < 3 + r]
            for other in others:
                other.zero_grad()
            for r in active:
                oracle.replicas[r](ctx.data(3, 6, step=step, rank=r)).square().sum().backward()
            sums = {}
            for r in active:
                for name, parameter in oracle.replicas[r].named_parameters():
                    sums[name] = sums.get(name, 0) + parameter.grad
            divisor = ctx.size if by_initial else len(active)
            for replica in oracle.replicas:
                for name, parameter in replica.named_parameters():
                    parameter.grad = sums[name] / divisor
            for other in others:
                other.step()
        for name, parameter in oracle.replicas[0].named_parameters():
            found = dict(wrapped.module.named_parameters())[name]
            torch.testing.assert_close(found, parameter, msg=f"{name} after join, by_initial={by_initial}")


@scenario("deepcopy and pickle: the copy trains on its own")
def copies(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    twin = copy.deepcopy(wrapped)
    twin_oracle = Oracle(ctx, twin.module)
    train(ctx, twin.module, twin, twin_oracle, steps=2)
    twin.zero_grad()
    loaded = pickle.loads(pickle.dumps(twin))
    loaded_oracle = Oracle(ctx, loaded.module)
    train(ctx, loaded.module, loaded, loaded_oracle, steps=2)
    wrapped.zero_grad()
    oracle.each(lambda m, r: m.zero_grad())
    both(ctx, wrapped, oracle, lambda m, r: m(ctx.data(3, 6, step=7, rank=r)).sum().backward(), "the original")


@scenario("state_dict keys and loading are stock DDP's")
def state_dict(ctx: Context) -> None:
    wrapped, _ = start(ctx)
    keys = list(wrapped.state_dict())
    assert keys == ["module." + key for key in wrapped.module.state_dict()], keys
    buffer = io.BytesIO()
    torch.save(wrapped.state_dict(), buffer)
    buffer.seek(0)
    other, oracle = start(ctx)
    other.load_state_dict(torch.load(buffer))
    train(ctx, other.module, other, oracle, steps=1)
    assert isinstance(other, TorchDDP)


@scenario("torch.compile inside the wrapper")
def compile_inside(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    plan = small_plan(model)
    compiled = torch.compile(model, backend="aot_eager")
    names = dict(compiled.named_parameters())
    prefix = next(iter(names)).removesuffix(next(iter(dict(model.named_parameters()))))
    plan = Plan(
        strategy="test",
        model="test",
        channels=1,
        groups=tuple(
            Group(gradients=tuple(prefix + name for name in group.gradients), channel=0) for group in plan.groups
        ),
    )
    wrapped = ctx.wrap(compiled, plan=plan)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum().backward()
        oracle.each(lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward())
        oracle.reduce()
        oracle.check(model, str(step))
    torch._dynamo.reset()


@scenario("torch.compile outside the wrapper, with small buckets")
def compile_outside(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    wrapped = ctx.wrap(model, plan=small_plan(model) if ctx.route == "backbeat" else None, bucket_cap_mb=0.0002)
    compiled = torch.compile(wrapped, backend="aot_eager")
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        compiled(ctx.data(3, 6, step=step, rank=ctx.rank)).sum().backward()
        oracle.each(lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward())
        oracle.reduce()
        oracle.check(model, str(step))
    torch._dynamo.reset()


class Outputs(nn.Module):
    """Returns a dictionary with a list in it, and keeps an auxiliary loss to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.a(x)
        self.aux = self.b(y).square().mean()
        return {"out": [y, None], "name": "text"}


@scenario("outputs in dictionaries and lists; an auxiliary loss beside them")
def outputs(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Outputs)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            out = m(ctx.data(3, 6, step=step, rank=r))["out"][0]
            (out.sum() + getattr(m, "module", m).aux).backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("a loss that passes through no output of the wrapper")
def hidden_loss(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Outputs)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r))
            getattr(m, "module", m).aux.backward()

        both(ctx, wrapped, oracle, body, str(step))


@scenario("evaluation between training steps, by some ranks only")
def evaluation(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        train(ctx, wrapped.module, wrapped, oracle, steps=1)
        wrapped.eval()
        if ctx.rank == 0:
            with torch.no_grad():
                wrapped(ctx.data(3, 6, step=step, rank=0))
        wrapped.train()


@scenario("parameters marked to be ignored stay local")
def ignored(ctx: Context) -> None:
    model = ctx.build(Branches)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["left.weight", "left.bias"])
    oracle = Oracle(ctx, model)
    wrapped = ctx.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r), use="lrs").sum().backward()

        body(wrapped, ctx.rank)
        oracle.each(body)
        own = {n: p.grad.clone() for n, p in oracle.replicas[ctx.rank].left.named_parameters()}
        oracle.reduce()
        for name, gradient in own.items():
            dict(oracle.replicas[ctx.rank].left.named_parameters())[name].grad = gradient
        oracle.check(wrapped, str(step))


@scenario("a plan that names only some of the parameters")
def partial_plan(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    plan = Plan(
        strategy="test",
        model="test",
        channels=1,
        groups=(Group(gradients=("6.weight", "4.bias"), channel=0), Group(gradients=("0.bias",), channel=0)),
    )
    train(ctx, model, ctx.wrap(model, plan=plan), oracle, steps=4)


@scenario("a plan whose order is far from the ready order")
def shuffled_plan(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    names = [name for name, _ in model.named_parameters()]
    groups = (names[0:3], names[5:8], names[3:5])
    plan = Plan(
        strategy="test",
        model="test",
        channels=2,
        groups=tuple(Group(gradients=tuple(g), channel=i % 2) for i, g in enumerate(groups)),
    )
    train(ctx, model, ctx.wrap(model, plan=plan), oracle, steps=4)


@scenario("gradients travel as bf16 (wire)")
def wire(ctx: Context) -> None:
    if ctx.route == "stock":
        raise SkipScenarioError("stock DDP has no wire format")
    wrapped, oracle = start(ctx, wire="bf16")
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(
            ctx,
            wrapped,
            oracle,
            lambda m, r, s=step: m(ctx.data(3, 6, step=s, rank=r)).sum().backward(),
            str(step),
            rtol=2e-2,
            atol=2e-2,
        )


@scenario("a process group of some of the ranks")
def subgroup(ctx: Context) -> None:
    if ctx.size < 4:
        raise SkipScenarioError("needs four ranks")
    half = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in half]
    mine = ctx.rank // 2
    model = ctx.build(mlp)
    inner = Context(ctx.rank % 2, 2, ctx.device.type, ctx.route)
    inner.device = ctx.device
    oracle = Oracle(inner, model)
    plan = small_plan(model)
    wrapped = ctx.wrap(model, plan=plan, process_group=groups[mine])
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            m(ctx.data(3, 6, step=step, rank=r + 2 * mine)).sum().backward()

        both(inner, wrapped, oracle, body, str(step))


@scenario("create_graph: a gradient penalty inside the loss")
def double_backward(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for step in range(3):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step) -> None:
            x = ctx.data(3, 6, step=step, rank=r).requires_grad_()
            y = m(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.square().sum() + slope.square().sum()).backward()

        both(ctx, wrapped, oracle, body, str(step))
