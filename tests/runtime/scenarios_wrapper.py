"""The wrapper as a module: buffers, copies, checkpoints of it, `torch.compile`, outputs, plans and process groups."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from scenario_rig import Context, Oracle, SkipScenarioError, both, fresh_steps, mlp, scenario, small_plan, start, train
from scenarios_graphs import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.model import Bucket, Plan


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
        communicators=1,
        buckets=tuple(
            Bucket(gradients=tuple(prefix + name for name in bucket.gradients), communicator=0)
            for bucket in plan.buckets
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

    def body(m: Any, r: int, step: int) -> None:
        out = m(ctx.data(3, 6, step=step, rank=r))["out"][0]
        (out.sum() + getattr(m, "module", m).aux).backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


@scenario("a loss that passes through no output of the wrapper")
def hidden_loss(ctx: Context) -> None:
    wrapped, oracle = start(ctx, Outputs)

    def body(m: Any, r: int, step: int) -> None:
        m(ctx.data(3, 6, step=step, rank=r))
        getattr(m, "module", m).aux.backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)


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
        communicators=1,
        buckets=(
            Bucket(gradients=("6.weight", "4.bias"), communicator=0),
            Bucket(gradients=("0.bias",), communicator=0),
        ),
    )
    train(ctx, model, ctx.wrap(model, plan=plan), oracle, steps=4)


@scenario("a plan whose order is far from the ready order")
def shuffled_plan(ctx: Context) -> None:
    model = ctx.build(mlp)
    oracle = Oracle(ctx, model)
    names = [name for name, _ in model.named_parameters()]
    buckets = (names[0:3], names[5:8], names[3:5])
    plan = Plan(
        strategy="test",
        model="test",
        communicators=2,
        buckets=tuple(Bucket(gradients=tuple(g), communicator=i % 2) for i, g in enumerate(buckets)),
    )
    train(ctx, model, ctx.wrap(model, plan=plan), oracle, steps=4)


@scenario("gradients travel as bf16 (reduce_dtype)")
def reduce_dtype(ctx: Context) -> None:
    if ctx.route == "stock":
        raise SkipScenarioError("stock DDP has no reduce dtype")
    wrapped, oracle = start(ctx, reduce_dtype="bf16")
    fresh_steps(
        ctx,
        wrapped,
        oracle,
        3,
        lambda m, r, step: m(ctx.data(3, 6, step=step, rank=r)).sum().backward(),
        rtol=2e-2,
        atol=2e-2,
    )


@scenario("a process group of some of the ranks")
def subgroup(ctx: Context) -> None:
    if ctx.size < 4:
        raise SkipScenarioError("needs four ranks")
    half = [[0, 1], [2, 3]]
    buckets = [dist.new_group(ranks) for ranks in half]
    mine = ctx.rank // 2
    model = ctx.build(mlp)
    inner = Context(ctx.rank % 2, 2, ctx.device.type, ctx.route)
    inner.device = ctx.device
    oracle = Oracle(inner, model)
    plan = small_plan(model)
    wrapped = ctx.wrap(model, plan=plan, process_group=buckets[mine])

    def body(m: Any, r: int, step: int) -> None:
        m(ctx.data(3, 6, step=step, rank=r + 2 * mine)).sum().backward()

    fresh_steps(inner, wrapped, oracle, 3, body)


@scenario("create_graph: a gradient penalty inside the loss")
def double_backward(ctx: Context) -> None:
    wrapped, oracle = start(ctx)

    def body(m: Any, r: int, step: int) -> None:
        x = ctx.data(3, 6, step=step, rank=r).requires_grad_()
        y = m(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().sum() + slope.square().sum()).backward()

    fresh_steps(ctx, wrapped, oracle, 3, body)
