"""What gradients are made of, and who looks at them: formats, layouts, clipping, scaling, hooks."""

from __future__ import annotations

from typing import Any

import torch
from scenario_rig import Context, SkipScenarioError, both, fresh_steps, mlp, scenario, start
from scenarios_graphs import Branches
from torch import nn


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
    fresh_steps(
        ctx,
        wrapped,
        oracle,
        4,
        lambda m, r, step: m(ctx.data(3, 6, step=step, rank=r)).square().sum().backward(),
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
    fresh_steps(
        ctx,
        wrapped,
        oracle,
        3,
        lambda m, r, step: m(ctx.data(3, 6, step=step, rank=r).to(dtype)).float().square().sum().backward(),
        rtol=2e-2,
        atol=2e-2,
    )


@scenario("autocast to bf16")
def autocast(ctx: Context) -> None:
    wrapped, oracle = start(ctx)

    def body(m: Any, r: int, step: int) -> None:
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            loss = m(ctx.data(3, 6, step=step, rank=r)).float().square().sum()
        loss.backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


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
    fresh_steps(ctx, wrapped, oracle, 3, lambda m, r, step: m(ctx.data(3, 6, step=step, rank=r)).sum().backward())


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

    def body(m: Any, r: int, step: int) -> None:
        rows = torch.tensor([step, r, 3 + r])
        m(rows).square().sum().backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


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

    wrapped, oracle = start(ctx, Branches)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)

    def body(m: Any, r: int, step: int) -> None:
        m(ctx.data(3, 6, step=step, rank=r), use="l" if r == 0 else "r").sum().backward()

    fresh_steps(ctx, wrapped, oracle, 4, body)
