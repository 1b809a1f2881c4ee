"""What training situations are run with: a rank's context, the oracle, plans of small buckets, and the loop.

The oracle needs no communication: every rank holds a plain replica of every rank's model, runs all of them, and
averages their gradients itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.model import Bucket, Plan
from backbeat.model.plan import Compression


class SkipScenarioError(Exception):
    """This route or device cannot run the scenario, and is not expected to."""


class Context:
    """What a scenario needs to know of its rank."""

    def __init__(self, rank: int, size: int, device: str, route: str) -> None:
        self.rank, self.size, self.route = rank, size, route
        self.device = torch.device(device, 0) if device != "cpu" else torch.device("cpu")

    def wrap(self, model: nn.Module, *, plan: Plan | None = None, **options: Any) -> Any:
        if self.route == "stock":
            for name in ("reduce_dtype", "communicators", "network", "strict"):
                options.pop(name, None)
            return TorchDDP(model, **options)
        from backbeat.runtime import DistributedDataParallel

        if self.route == "compressed":
            wrapped = DistributedDataParallel(model, plan=all_sent(plan or small_plan(model), model), **options)
            assert type(wrapped.reducer.runner.exchange).__name__ == "CompressedExchange"
            return wrapped
        if self.route == "two-communicators":
            options["communicators"] = 2
        if self.route == "skipping":
            options["skip_all_reduce_unused_params"] = True
        reducer = "ddp" if self.route == "ddp" else "backbeat"
        if reducer == "ddp":
            options.pop("strict", None)
        wrapped = DistributedDataParallel(model, plan=plan, reducer=reducer, **options)
        if self.route == "two-communicators" and wrapped.reducer.communicators.limit < 2:
            raise SkipScenarioError("several NCCL communicators need NCCL 2.26 and NCCL_LAUNCH_ORDER_IMPLICIT=1")
        # Or the route would silently be another one's.
        assert self.route != "two-communicators" or len(wrapped.reducer.communicators) == 2
        return wrapped

    def data(self, *shape: int, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return torch.randn(*shape, generator=generator).to(self.device)

    def build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(7)
        return factory().to(self.device)


class Oracle:
    """Every rank's replica, trained in this process."""

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        self.ctx = ctx
        self.replicas = [copy.deepcopy(model) for _ in range(ctx.size)]

    def each(self, body: Callable[[nn.Module, int], Any]) -> None:
        for rank, replica in enumerate(self.replicas):
            body(replica, rank)

    def reduce(self) -> None:
        """The mean of what the replicas hold; a parameter nobody has a gradient for keeps None."""
        for parameters in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            held = [parameter.grad for parameter in parameters]
            if all(gradient is None for gradient in held):
                continue
            zero = torch.zeros_like(parameters[0])
            dense = [zero if g is None else (g.to_dense() if g.is_sparse else g) for g in held]
            mean = sum(gradient.double() if not gradient.is_complex() else gradient for gradient in dense) / len(dense)
            for parameter in parameters:
                parameter.grad = mean.to(parameter.dtype).clone()

    def check(self, wrapped: nn.Module, what: str = "", rank: int | None = None, **tolerance: Any) -> None:
        mine = dict(getattr(wrapped, "module", wrapped).named_parameters())
        oracle = self.replicas[self.ctx.rank if rank is None else rank]
        for name, parameter in oracle.named_parameters():
            expected, found = parameter.grad, mine[name].grad
            if expected is None or found is None:
                assert expected is None, f"{what}: {name}.grad is None, expected a gradient"
                assert found is None, f"{what}: {name}.grad is a tensor, expected None"
                continue
            found = found.to_dense() if found.is_sparse else found
            expected = expected.to_dense() if expected.is_sparse else expected
            torch.testing.assert_close(
                found, expected, msg=lambda text, name=name: f"{what}: {name}.grad is wrong: {text}", **tolerance
            )


@dataclass(frozen=True)
class Scenario:
    run: Callable[[Context], str | None]
    title: str


SCENARIOS: dict[str, Scenario] = {}
Run = Callable[[Context], str | None]


def registry(prefix: str = "") -> tuple[dict[str, Scenario], Callable[[Run], Run]]:
    """A table of checks, and the decorator that enters one by its name."""
    checks: dict[str, Scenario] = {}

    def check(run: Run) -> Run:
        checks[prefix + run.__name__] = Scenario(run, run.__name__)
        return run

    return checks, check


def scenario(title: str) -> Callable[[Callable[[Context], str | None]], Callable[[Context], str | None]]:
    def register(run: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
        SCENARIOS[run.__name__] = Scenario(run, title)
        return run

    return register


def mlp(width: int = 6, depth: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def small_plan(model: nn.Module, communicators: int = 1, size: int = 2) -> Plan:
    """Buckets of a few gradients in reverse registration order."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    names = [n for n, parameter in model.named_parameters() if parameter.requires_grad and n not in ignored][::-1]
    buckets = [names[start : start + size] for start in range(0, len(names), size)]
    return Plan(
        strategy="test",
        model="test",
        communicators=communicators,
        buckets=tuple(Bucket(gradients=tuple(g), communicator=i % communicators) for i, g in enumerate(buckets)),
    )


def all_sent(plan: Plan, model: nn.Module) -> Plan:
    """The same buckets, two of three compressed so that nothing stays behind: the mean must be the dense one."""
    exact = Compression(density=1.0)
    rows = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.sparse}
    plain = {n for n, p in model.named_parameters() if id(p) in rows or not p.is_floating_point()}
    buckets = []
    for index, bucket in enumerate(plan.buckets):
        compression = exact if index % 3 != 1 and not plain & set(bucket.gradients) else None
        buckets.append(Bucket(gradients=bucket.gradients, communicator=bucket.communicator, compression=compression))
    return Plan(strategy=plan.strategy, model=plan.model, communicators=plan.communicators, buckets=tuple(buckets))


def train(ctx: Context, model: nn.Module, wrapped: Any, oracle: Oracle, steps: int = 3, lr: float = 0.1) -> None:
    """Ordinary steps, compared after each."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    others = [torch.optim.SGD(replica.parameters(), lr=lr) for replica in oracle.replicas]
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).square().sum().backward()
        for other in others:
            other.zero_grad()
        oracle.each(lambda m, r, step=step: m(ctx.data(3, 6, step=step, rank=r)).square().sum().backward())
        oracle.reduce()
        oracle.check(wrapped, f"step {step}")
        optimizer.step()
        for other in others:
            other.step()


def start(ctx: Context, factory: Callable[[], nn.Module] = mlp, **options: Any) -> tuple[Any, Oracle]:
    model = ctx.build(factory)
    oracle = Oracle(ctx, model)
    plan = options.pop("plan", None) or (small_plan(model) if ctx.route != "stock" else None)
    return ctx.wrap(model, plan=plan, **options), oracle


def both(
    ctx: Context, wrapped: Any, oracle: Oracle, body: Callable[[Any, int], None], what: str, **tolerance: Any
) -> None:
    """One synchronised step of the wrapper and of the replicas, compared."""
    body(wrapped, ctx.rank)
    oracle.each(body)
    oracle.reduce()
    oracle.check(wrapped, what, **tolerance)


def fresh_steps(
    ctx: Context, wrapped: Any, oracle: Oracle, steps: int, body: Callable[[Any, int, int], None], **tolerance: Any
) -> None:
    """Synchronised steps that begin without gradients, compared after each. `body` gets model, rank and step."""
    for step in range(steps):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        both(ctx, wrapped, oracle, lambda m, r, step=step: body(m, r, step), str(step), **tolerance)
