"""What users do to a model under the wrapper's hands: other memory, other parameters, hooks, copies, optimizers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from rank_asserts import raises
from scenario_rig import Context, Oracle, both, mlp, registry, small_plan, start
from torch import nn

from backbeat.errors import BrokenStepError, InputError
from backbeat.model import Bucket, Plan
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel

CHECKS, check = registry()
OWN_PLAN: set[str] = set()
"""Bring their own plan, so that one route is enough."""


def own_plan(run: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
    OWN_PLAN.add(run.__name__)
    return check(run)


def _plain(ctx: Context) -> Callable[[Any, int, int], None]:
    def body(model: Any, rank: int, step: int) -> None:
        model(ctx.data(3, 6, step=step, rank=rank)).square().sum().mul(0.1).backward()

    return body


def _train(
    ctx: Context, wrapped: Any, oracle: Oracle, body: Callable[[Any, int, int], None], what: str = "", steps: int = 3
) -> None:
    """Ordinary steps, compared after each."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (wrapped, *oracle.replicas)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        both(ctx, wrapped, oracle, lambda model, rank, step=step: body(model, rank, step), f"{what} step {step}")
        for optimizer in optimizers:
            optimizer.step()


def _all(wrapped: Any, oracle: Oracle) -> list[Any]:
    return [wrapped.module, *oracle.replicas]


def _double(parameter: Any) -> None:
    parameter.grad.mul_(2)


@check
def gradients_given_other_memory(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=2)
    for model in _all(wrapped, oracle):
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5
    _train(ctx, wrapped, oracle, _plain(ctx), "afterwards")


@check
def memory_format_changed_after_wrapping(ctx: Context) -> None:
    wrapped, oracle = start(ctx, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2)))

    def body(model: Any, rank: int, step: int) -> None:
        model(ctx.data(2, 3, 5, 5, step=step, rank=rank)).square().sum().mul(0.1).backward()

    _train(ctx, wrapped, oracle, body, steps=2)
    for model in _all(wrapped, oracle):
        model.to(memory_format=torch.channels_last)
    _train(ctx, wrapped, oracle, body, "afterwards")


@check
def gradients_of_the_model_inside_by_one_rank(ctx: Context) -> None:
    """It takes them by itself, as for a picture of what the model looks at. They are kept or dropped, and never sent
    alone."""
    wrapped, oracle = start(ctx)
    body = _plain(ctx)

    def more(model: Any, rank: int, step: int) -> None:
        if rank == 0:
            body(getattr(model, "module", model), rank, step + 10)
            if step:
                model.zero_grad()
        body(model, rank, step)

    _train(ctx, wrapped, oracle, body)
    _train(ctx, wrapped, oracle, more)
    assert wrapped.reducer.steps == 6, wrapped.reducer.steps


@check
def hooks_registered_after_wrapping(ctx: Context) -> None:
    """They see the gradient of their parameter, and what they make of it travels."""
    wrapped, oracle = start(ctx)
    for model in _all(wrapped, oracle):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_double)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=4)


@check
def hooks_registered_in_mid_training(ctx: Context) -> None:
    """At a step that nobody times, one more for another, and between forward and backward."""
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=12)
    handles = [
        parameter.register_post_accumulate_grad_hook(_double)
        for model in _all(wrapped, oracle)
        for parameter in model.parameters()
    ]
    _train(ctx, wrapped, oracle, _plain(ctx), "doubled", steps=2)
    for handle in handles:
        handle.remove()
    parameters = [parameter for model in _all(wrapped, oracle) for parameter in model.parameters()]
    handles = [parameter.register_post_accumulate_grad_hook(_double) for parameter in parameters]
    _train(ctx, wrapped, oracle, _plain(ctx), "doubled by others", steps=2)
    for handle in handles:
        handle.remove()

    def between(model: Any, rank: int, step: int) -> None:
        loss = model(ctx.data(3, 6, step=step, rank=rank)).square().sum().mul(0.1)
        mine = [one.register_post_accumulate_grad_hook(_double) for one in model.parameters()]
        loss.backward()
        for handle in mine:
            handle.remove()

    _train(ctx, wrapped, oracle, between, "doubled after forward", steps=2)


@check
def hooks_that_take_gradients_away(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    for model in _all(wrapped, oracle):
        for parameter in list(model.parameters())[::3]:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    _train(ctx, wrapped, oracle, _plain(ctx), steps=4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return self.inner(x), self.scale


@check
def parameters_among_the_outputs(ctx: Context) -> None:
    """Nothing is left on them by a forward, and `no_sync` holds."""
    wrapped, oracle = start(ctx, Scaled)

    def body(model: Any, rank: int, step: int) -> None:
        found, scale = model(ctx.data(3, 6, step=step, rank=rank))
        (found * scale).square().sum().mul(0.1).backward()

    _train(ctx, wrapped, oracle, body)
    assert not wrapped.module.scale._backward_hooks
    before = wrapped.reducer.steps
    wrapped.zero_grad()
    with wrapped.no_sync():
        body(wrapped, ctx.rank, 9)
    assert wrapped.reducer.steps == before, "a backward under no_sync was synchronised"


@check
def parameters_without_elements(ctx: Context) -> None:
    """Alone in a bucket, too."""

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 6))
            self.first = nn.Linear(6, 6)
            self.none = nn.Parameter(torch.zeros(0))
            self.last = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) + x @ self.empty.t() @ self.empty) + self.none.sum()

    wrapped, oracle = start(ctx, Hollow, plan=small_plan(ctx.build(Hollow), size=1))
    _train(ctx, wrapped, oracle, _plain(ctx))


@check
def exchanged_parameters_are_refused(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx))
    wrapped.module[2].weight = nn.Parameter(torch.zeros(6, 6, device=ctx.device))
    raises(InputError, lambda: _plain(ctx)(wrapped, ctx.rank, 5), "'2.weight' came into the model")
    other, oracle = start(ctx)
    _train(ctx, other, oracle, _plain(ctx))
    other.module.load_state_dict({k: v.clone() for k, v in other.module.state_dict().items()}, assign=True)
    raises(InputError, lambda: _plain(ctx)(other, ctx.rank, 5), "'0.weight' came into the model")


@check
def parameters_that_only_move_are_not_refused(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=2)
    for model in _all(wrapped, oracle):
        nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Tanh())
        model[4].requires_grad_(False)
    _train(ctx, wrapped, oracle, _plain(ctx), "moved")


@check
def parameters_that_come_beside_are_refused_once_they_are_used(ctx: Context) -> None:
    """An average of the weights kept in the model is nobody's gradient; a layer that is trained is."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 6), nn.Linear(6, 6)
            self.more = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.average(self.used(x)) if self.more else self.used(x)

    wrapped, oracle = start(ctx, Growing)
    for model in _all(wrapped, oracle):
        model.average = copy.deepcopy(model.used)
    _train(ctx, wrapped, oracle, _plain(ctx))
    wrapped.module.more = True
    raises(InputError, lambda: _plain(ctx)(wrapped, ctx.rank, 5), "'average.weight' came into the model")


@check
def parameters_that_come_beside_are_refused_where_all_others_came(ctx: Context) -> None:
    """An adapter added to a model that uses all its parameters: no step says that something is missing."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.adapter = nn.Linear(6, 6), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adapter(self.inner(x))

    wrapped, oracle = start(ctx, Adapted)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=3)
    wrapped.module.adapter = nn.Linear(6, 6, device=ctx.device)
    raises(InputError, lambda: _plain(ctx)(wrapped, ctx.rank, 5), "'adapter.weight' came into the model")


@check
def reduce_dtypes_that_differ_are_refused(ctx: Context) -> None:
    """Two formats of one width would be summed as each other's bits."""
    mine = ("fp16", "bf16")[ctx.rank % 2]
    raises(InputError, lambda: start(ctx, reduce_dtype=mine), "reduce_dtype=")


@check
def converted_parameters_are_refused(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=2)
    wrapped.zero_grad()
    wrapped.double()
    loss = wrapped(ctx.data(3, 6, step=0, rank=ctx.rank).double()).square().sum()
    raises(InputError, loss.backward, "is torch.float64 (6, 6) on")


@check
def copies_for_evaluation_ask_nobody(ctx: Context) -> None:
    """One rank alone evaluates a copy; the copy can be trained afterwards."""
    wrapped, oracle = start(ctx)
    _train(ctx, wrapped, oracle, _plain(ctx), steps=2)
    copied, average = copy.deepcopy(wrapped), torch.optim.swa_utils.AveragedModel(wrapped)
    if ctx.rank == 0:
        with torch.no_grad():
            average(ctx.data(3, 6, step=0, rank=0))
        with torch.inference_mode():
            copied(ctx.data(3, 6, step=0, rank=0))
    replicas = copy.deepcopy(oracle)
    _train(ctx, wrapped, oracle, _plain(ctx), "beside a copy")
    _train(ctx, copied, replicas, _plain(ctx), "the copy")


def _compressed(ctx: Context, factory: Callable[[], nn.Module] = mlp, density: float = 1.0) -> tuple[Any, Oracle]:
    """Every bucket compressed; as it stands, so that nothing stays behind."""
    model = ctx.build(factory)
    how = Compression(density=density)
    buckets = tuple(
        Bucket(gradients=bucket.gradients, communicator=0, compression=how) for bucket in small_plan(model).buckets
    )
    plan = Plan(strategy="test", model="test", communicators=1, buckets=buckets)
    return DistributedDataParallel(model, plan=plan), Oracle(ctx, model)


def _updates(ctx: Context, wrapped: Any, oracle: Oracle, optimizers: list[Any], first: int) -> None:
    """Attached training against training by hand, by the weights."""
    for step in range(first, first + 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _plain(ctx)(wrapped, ctx.rank, step)
        oracle.each(lambda model, rank, step=step: _plain(ctx)(model, rank, step))
        oracle.reduce()
        for optimizer in optimizers:
            optimizer.step()
        for mine, other in zip(wrapped.parameters(), oracle.replicas[ctx.rank].parameters(), strict=True):
            torch.testing.assert_close(mine, other, msg=lambda text, step=step: f"step {step}: {text}")


@own_plan
def an_optimizer_in_anothers_place(ctx: Context) -> None:
    wrapped, oracle = _compressed(ctx)
    first = 0
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SGD):
        optimizers = [kind(model.parameters(), lr=0.05) for model in (wrapped, *oracle.replicas)]
        wrapped.attach(optimizers[0], max_grad_norm=None)
        _updates(ctx, wrapped, oracle, optimizers, first)
        first += 3


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.side, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.head(self.trunk(x) + (self.side(x) if both else 0))


@check
def another_default_device(ctx: Context) -> None:
    """As after `torch.set_default_device`: the wrapper's own tensors are where it wants them."""
    model = ctx.build(Beside)
    oracle = Oracle(ctx, model)
    with torch.device("meta"):
        wrapped = ctx.wrap(model, plan=small_plan(model))

    def body(model: Any, rank: int, step: int) -> None:
        x = ctx.data(3, 6, step=step, rank=rank)
        with torch.device("meta"):
            model(x, step < 2 or rank == 0).sum().backward()

    _train(ctx, wrapped, oracle, body)


@own_plan
def accumulation_where_fewer_parameters_follow(ctx: Context) -> None:
    """On one rank, or on none: what was reduced before stays in the gradient."""
    wrapped, oracle = _compressed(ctx, Beside)
    for step in range(4):
        for model in (wrapped, *oracle.replicas):
            model.zero_grad()
        for number, uses in enumerate((lambda rank: True, lambda rank: rank == 0, lambda rank: False)):
            both(
                ctx,
                wrapped,
                oracle,
                lambda model, rank, data=step + 10 * number, uses=uses: (
                    model(ctx.data(3, 6, step=data, rank=rank), uses(rank)).square().sum().mul(0.1).backward()
                ),
                f"step {step}, backward {number}",
            )


@own_plan
def compressed_without_elements(ctx: Context) -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.empty, self.none = (
                nn.Linear(6, 6),
                nn.Parameter(torch.zeros(0)),
                nn.Parameter(torch.zeros(0, 2)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.empty.sum() + self.none.sum()

    wrapped, _ = _compressed(ctx, Hollow, density=0.5)
    for step in range(2):
        wrapped.zero_grad()
        _plain(ctx)(wrapped, ctx.rank, step)
    assert wrapped.module.empty.grad.shape == (0,)


class _Experts(nn.Module):
    """An expert that may be used, early in the graph or not, and a backward that may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.expert, self.head = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, *, expert: bool = False, early: bool = False, fails: bool = False) -> Any:
        hidden = self.stem(self.expert(x) if early else x)
        if expert:
            hidden = hidden + self.expert(x)
        found = self.head(hidden)
        if fails:
            # Before any gradient, and after the hook on the output.
            found.register_hook(_raise)
        return found * 1


def _raise(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def _plan(*buckets: list[str]) -> Plan:
    made = tuple(Bucket(gradients=tuple(names), communicator=0) for names in buckets)
    return Plan(strategy="test", model="test", communicators=1, buckets=made)


def _experts(ctx: Context) -> tuple[Any, Oracle]:
    model = ctx.build(_Experts)
    plan = _plan(["head.weight", "expert.weight"], ["stem.weight"])
    return DistributedDataParallel(copy.deepcopy(model), plan=plan), Oracle(ctx, model)


@own_plan
def what_was_used_before_a_no_sync_backward_that_raised_is_sent(ctx: Context) -> None:
    wrapped, oracle = _experts(ctx)

    def body(model: Any, rank: int) -> None:
        with model.no_sync() if model is wrapped else contextlib.nullcontext():
            model(ctx.data(3, 6, step=0, rank=rank), expert=rank == 0).sum().backward()
        if model is wrapped and rank == 0:
            with model.no_sync():
                loss = model(ctx.data(3, 6, step=1, rank=rank), fails=True).sum()
            raises(ValueError, loss.backward, "on purpose")
        model(ctx.data(3, 6, step=2, rank=rank)).sum().backward()

    both(ctx, wrapped, oracle, body, "after a micro-batch that raised")


@own_plan
def a_late_gradient_does_not_outlive_a_broken_step(ctx: Context) -> None:
    wrapped, oracle = _experts(ctx)
    for step in range(2):
        wrapped.zero_grad()
        wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum().backward()
    wrapped.zero_grad()
    loss = wrapped(ctx.data(3, 6, step=2, rank=ctx.rank), fails=ctx.rank == 0, early=ctx.rank > 0).sum()
    kind, why = (ValueError, "on purpose") if ctx.rank == 0 else (BrokenStepError, "broke off")
    raises(kind, loss.backward, why)

    def body(model: Any, rank: int) -> None:
        model(ctx.data(3, 6, step=3, rank=rank), expert=True).sum().backward()

    both(ctx, wrapped, oracle, body, "after a broken step, without zero_grad")


@own_plan
def a_gradient_handed_on_as_a_view_stays_where_nobody_uses_it(ctx: Context) -> None:
    wrapped, _ = _experts(ctx)
    wrapped(ctx.data(3, 6, step=0, rank=ctx.rank), expert=True).sum().backward()
    weight = wrapped.module.expert.weight
    weight.grad.mul_(1 + ctx.rank)
    weight.grad = weight.grad.detach()
    before = weight.grad.clone()
    wrapped(ctx.data(3, 6, step=1, rank=ctx.rank)).sum().backward()
    assert torch.equal(weight.grad, before)


class _Table(nn.Module):
    """A plain parameter with sparse gradients: the reducer cannot know of them beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 6))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, looks_up: bool) -> Any:
        if looks_up:
            x = x * nn.functional.embedding(torch.arange(3, device=x.device), self.table, sparse=True)
        return self.last(self.first(x))


@own_plan
def a_sparse_gradient_of_a_dense_bucket_may_come_late(ctx: Context) -> None:
    model = ctx.build(_Table)
    plan = _plan(["last.weight", "last.bias", "table"], ["first.weight", "first.bias"])
    wrapped, oracle = DistributedDataParallel(copy.deepcopy(model), plan=plan), Oracle(ctx, model)
    for step in range(3):
        for one in _all(wrapped, oracle):
            one.zero_grad()

        def body(model: Any, rank: int, step: int = step) -> None:
            model(ctx.data(3, 6, step=step, rank=rank), looks_up=step == 2 and rank == 0).sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


@own_plan
def a_frozen_copy_runs_forward(ctx: Context) -> None:
    wrapped, _ = _experts(ctx)
    teacher = copy.deepcopy(wrapped)
    teacher.requires_grad_(False)
    x = ctx.data(3, 6, step=0, rank=ctx.rank)
    assert torch.equal(teacher(x), wrapped(x))
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@own_plan
def what_was_not_sent_is_not_lost_to_another_process_group(ctx: Context) -> None:
    wrapped, _ = _compressed(ctx, density=0.5)
    raises(InputError, lambda: wrapped._update_process_group(torch.distributed.group.WORLD), "save_residuals")


@own_plan
def a_communication_hook_that_raises_leaves_no_gradient(ctx: Context) -> None:
    """In the buckets that had not left, nor in those that other ranks still sum."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped, oracle = DistributedDataParallel(model, plan=small_plan(model)), Oracle(ctx, model)
    calls: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
        calls.append(bucket.index())
        if len(calls) == 2:
            _raise(bucket.buffer())
        work = torch.distributed.all_reduce(bucket.buffer().div_(ctx.size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, hook)
    body = _plain(ctx)
    raises(ValueError, wrapped(ctx.data(3, 6, step=0, rank=ctx.rank)).sum().backward, "on purpose")
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    both(ctx, wrapped, oracle, lambda model, rank: body(model, rank, 1), "the step after, without zero_grad")
