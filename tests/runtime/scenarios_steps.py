"""Which backwards are synchronised: accumulation, `no_sync`, several forwards and backwards of one wrapper."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from scenario_rig import Context, Oracle, both, fresh_steps, mlp, scenario, small_plan, start, train


@scenario("ordinary training")
def plain(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=5)


@scenario("no plan: stock DDP's buckets, rebuilt once in ready order")
def no_plan(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    train(ctx, model, ctx.wrap(model, bucket_cap_mb=0.0004), oracle, steps=5)


@scenario("two communicators")
def two_communicators(ctx: Context) -> None:
    model = ctx.build(lambda: mlp(depth=6))
    oracle = Oracle(ctx, model)
    train(ctx, model, ctx.wrap(model, plan=small_plan(model, communicators=2)), oracle, steps=5)


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

    def body(m: Any, r: int, step: int) -> None:
        with m.no_sync() if hasattr(m, "no_sync") else nullcontext():
            first = m(ctx.data(3, 6, step=step, rank=r)).sum()
        (first + m(ctx.data(3, 6, step=50 + step, rank=r)).square().sum()).backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


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

    def body(m: Any, r: int, step: int) -> None:
        y = m(ctx.data(3, 6, step=step, rank=r))
        m(y * 2).square().sum().backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


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
