"""Training with decoupled plans, step by step against stock DDP with the same optimizer.

The weights before each forward must be the same. They are compared through the loss, which reads them as training does:
looking at the weights themselves would make the wrapper apply its updates early and hide what is to be tested.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_asserts import raises
from scenario_rig import Context, Scenario, in_halves, mlp, small_plan
from scenarios_graphs import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.pending import PendingParameter

CHECKS: dict[str, Scenario] = {}


def check(run: Callable[[Context], Any]) -> Callable[[Context], Any]:
    CHECKS["decoupled_" + run.__name__] = Scenario(run, run.__name__)
    return run


class Pair:
    """One model under a decoupled plan and under stock DDP."""

    def __init__(
        self,
        ctx: Context,
        make: Callable[[Any], torch.optim.Optimizer],
        factory: Callable[[], nn.Module] = mlp,
        *,
        find_unused_parameters: bool = False,
        attach: bool = True,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.exact = ctx.size <= 2
        """Both sides must give the same bits; sums of more ranks' numbers depend on their order."""
        model = ctx.build(factory)
        plan = in_halves(small_plan(model))
        self.ours: Any = DistributedDataParallel(copy.deepcopy(model), plan=plan, **options)
        self.theirs: Any = TorchDDP(copy.deepcopy(model), find_unused_parameters=find_unused_parameters)
        self.optimizer, self.other = make(self.ours.parameters()), make(self.theirs.parameters())
        if attach:
            self.ours.attach(self.optimizer)

    @property
    def both(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        return [(self.ours, self.optimizer), (self.theirs, self.other)]

    @property
    def due(self) -> int:
        """Parameters that wait for an update."""
        return sum(type(parameter) is PendingParameter for parameter in self.ours.parameters())

    def each(self, body: Callable[[Any, torch.optim.Optimizer], Any], what: str = "") -> None:
        """Run on both and compare what comes out."""
        found, expected = (body(model, optimizer) for model, optimizer in self.both)
        self.same(found, expected, what)

    def same(self, found: Any, expected: Any, what: str) -> None:
        if found is None:
            return
        found, expected = torch.as_tensor(found), torch.as_tensor(expected)
        if self.exact:
            assert torch.equal(found, expected), f"{what}: {found} is not {expected}"
        torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")

    def step(self, number: int, **arguments: Any) -> None:
        def body(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
            loss = model(self.ctx.data(3, 6, step=number, rank=self.ctx.rank), **arguments).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.each(body, f"loss of step {number}")

    def finally_equal(self) -> None:
        for (name, found), expected in zip(self.ours.module.named_parameters(), self.theirs.parameters(), strict=True):
            self.same(found.detach(), expected.detach(), name)
        states = [optimizer.state_dict()["state"] for optimizer in (self.optimizer, self.other)]
        assert states[0].keys() == states[1].keys(), "optimizer states of other parameters"
        for place, state in states[1].items():
            for key, value in state.items():
                self.same(states[0][place][key], value, f"{key} of {place}")


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": momentum,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "single_tensor": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@check
def optimizers(ctx: Context) -> None:
    """Every optimizer of torch that is taken, and updates really wait for the forward that needs them."""
    for name, make in OPTIMIZERS.items():
        pair = Pair(ctx, make)
        for step in range(5):
            pair.step(step)
            assert pair.due == 8, f"{name}: {pair.due} parameters wait after step {step}, expected all 8"
        pair.finally_equal()
        assert pair.due == 0


@check
def updates_follow_the_layers(ctx: Context) -> None:
    """While the first layer runs, later ones still wait; a gather is waited for when its layer is reached."""
    pair = Pair(ctx, momentum)
    pair.step(0)
    waiting = []
    for layer in pair.ours.module:
        layer.register_forward_pre_hook(lambda module, inputs: waiting.append(pair.due))
    pair.ours(ctx.data(3, 6, step=1, rank=ctx.rank))
    # Two parameters a layer, three a gather; the activation behind each layer sees what that layer waited for.
    assert waiting == [8, 5, 5, 2, 2, 2, 2, 0], waiting


@check
def schedulers(ctx: Context) -> None:
    """The learning rate in force at `step()` counts, whenever the scheduler was made and whatever follows."""
    for early in (False, True):
        pair = Pair(ctx, momentum, attach=not early)
        kinds = (
            lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.3),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
        )
        for kind in kinds:
            schedulers = [kind(optimizer) for _, optimizer in pair.both]
            if early:
                pair.ours.attach(pair.optimizer)
            for step in range(4):
                pair.step(step)
                for scheduler in schedulers:
                    scheduler.step()
        pair.finally_equal()
    tensor = Pair(ctx, lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False))
    for step in range(3):
        tensor.step(step)
        for _, optimizer in tensor.both:
            optimizer.param_groups[0]["lr"].mul_(0.5)
    tensor.finally_equal()


@check
def param_groups(ctx: Context) -> None:
    """Groups with their own hyperparameters, and a parameter that no optimizer has."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        return torch.optim.AdamW(
            [{"params": found[0:5:2], "lr": 0.1}, {"params": found[1:6:2], "weight_decay": 0.0}], lr=0.01
        )

    pair = Pair(ctx, make)
    for step in range(4):
        pair.step(step)
    pair.finally_equal()


@check
def two_optimizers(ctx: Context) -> None:
    pair = Pair(ctx, lambda p: torch.optim.SGD(list(p)[:4], lr=0.1))
    seconds = [torch.optim.Adam(list(model.parameters())[4:], lr=0.01) for model, _ in pair.both]
    pair.ours.attach(seconds[0])
    for step in range(4):
        pair.step(step)
        for second in seconds:
            second.step()
            second.zero_grad()
    pair.finally_equal()


@check
def accumulation(ctx: Context) -> None:
    """`no_sync`, synchronised backwards without `zero_grad`, and two forwards before their backwards."""
    pair = Pair(ctx, momentum)

    def loss(model: Any, number: int) -> torch.Tensor:
        return model(ctx.data(3, 6, step=number, rank=ctx.rank)).square().mean()

    for step in range(4):

        def body(model: Any, optimizer: torch.optim.Optimizer, step: int = step) -> torch.Tensor:
            with model.no_sync():
                first = loss(model, 10 * step)
                first.backward()
            second = loss(model, 10 * step + 1)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            return first.detach() + second.detach()

        pair.each(body, f"no_sync {step}")
    pair.finally_equal()
    alone = Pair(ctx, momentum)
    for step in range(3):
        # Stock DDP goes wrong over forward, forward, backward, backward: it gets its backwards one by one.
        first, second = loss(alone.ours, 20 + step), loss(alone.ours, 30 + step)
        first.backward()
        second.backward()
        for number in (20 + step, 30 + step):
            loss(alone.theirs, number).backward()
        for _, optimizer in alone.both:
            optimizer.step()
            optimizer.zero_grad()
    alone.finally_equal()


@check
def gradients_kept_over_steps(ctx: Context) -> None:
    """Without `zero_grad` the gradients of earlier steps stay and add up, as they do elsewhere."""
    pair = Pair(ctx, lambda p: torch.optim.SGD(p, lr=0.01))
    for step in range(3):

        def body(model: Any, optimizer: torch.optim.Optimizer, step: int = step) -> torch.Tensor:
            loss = model(ctx.data(3, 6, step=step, rank=ctx.rank)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        pair.each(body, f"kept {step}")
    pair.each(lambda _, optimizer: optimizer.step(), "a second step of the same gradients")
    pair.each(lambda _, optimizer: optimizer.step(), "a third")
    pair.finally_equal()


@check
def dropped_gradients(ctx: Context) -> None:
    """A step that is skipped: gradients are let go of before `step()`, by each way to do it."""
    pair = Pair(ctx, momentum)

    def directly(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    ways: list[Callable[[Any, Any], Any]] = [
        lambda m, o: o.zero_grad(),
        lambda m, o: m.zero_grad(),
        lambda m, o: m.module.zero_grad(),
        lambda m, o: directly(m),
        lambda m, o: o.zero_grad(set_to_none=False),
    ]
    for number, way in enumerate(ways):
        pair.step(2 * number)

        def body(model: Any, optimizer: torch.optim.Optimizer, number: int = number, way: Any = way) -> None:
            model(ctx.data(3, 6, step=2 * number + 1, rank=ctx.rank)).sum().backward()
            way(model, optimizer)
            optimizer.step()

        pair.each(body)
        for _, optimizer in pair.both:
            optimizer.zero_grad()
    pair.finally_equal()


@check
def unused_and_frozen(ctx: Context) -> None:
    """Never used: no gradient, no weight decay, no state. Used by some ranks: updated on all. Frozen: untouched."""
    pair = Pair(ctx, momentum, Branches, find_unused_parameters=True)
    spare = pair.ours.module.spare.weight.detach().clone()
    for step in range(6):
        pair.step(step, use="l" if ctx.rank == 0 else "lr")
        assert type(pair.ours.module.spare.weight) is nn.Parameter
    assert pair.ours.module.spare.weight.grad is None
    pair.finally_equal()
    assert torch.equal(pair.ours.module.spare.weight.detach(), spare), "weight decay moved an unused parameter"

    def frozen() -> nn.Module:
        model = mlp()
        model[2].weight.requires_grad_(False)
        return model

    pair = Pair(ctx, OPTIMIZERS["adamw"], frozen)
    for step in range(4):
        pair.step(step)
    pair.finally_equal()


@check
def readers_see_what_they_should(ctx: Context) -> None:
    """Between `step()` and the next forward, by one rank alone or all: weights are those after the step."""
    readers: list[Callable[[Any, Any], Any]] = [
        lambda m, o: m.state_dict()["module.4.weight"].sum(),
        lambda m, o: m.module.state_dict()["0.bias"].sum(),
        lambda m, o: next(iter(m.parameters())).detach().sum(),
        lambda m, o: m.module[4].weight.data.sum(),
        lambda m, o: torch._foreach_norm(list(m.parameters()))[3],
        lambda m, o: nn.utils.parameters_to_vector(m.parameters()).sum(),
        lambda m, o: copy.deepcopy(m.module)[2].weight.detach().sum(),
        lambda m, o: copy.deepcopy(m).module[2].weight.detach().sum(),
        lambda m, o: nn.functional.linear(torch.ones(1, 6, device=ctx.device), m.module[6].weight).sum().detach(),
        lambda m, o: sum(one["momentum_buffer"].sum() for one in o.state_dict()["state"].values()),
        lambda m, o: torch.tensor(m.module[6].bias.tolist()).sum(),
        lambda m, o: m.module[0].weight.grad,
        lambda m, o: (m.finish() if hasattr(m, "finish") else None, m.module[0].weight.sum().detach())[1],
    ]
    for alone in (False, True):
        pair = Pair(ctx, momentum)
        for step, reader in enumerate(readers):
            pair.step(step)
            if not alone or ctx.rank == 0:
                pair.each(reader, f"reader {step}, alone: {alone}")
            # A barrier between would hang if waiting needed the other ranks' help.
            dist.barrier()
        pair.finally_equal()


@check
def evaluation(ctx: Context) -> None:
    """Evaluation after each step, in every mode, by rank 0 alone in odd steps."""
    pair = Pair(ctx, OPTIMIZERS["adam"])
    modes = (torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(True))
    for step in range(6):
        pair.step(step)
        if step % 2 and ctx.rank != 0:
            dist.barrier()
            continue

        def evaluate(model: Any, optimizer: Any, step: int = step) -> torch.Tensor:
            model.eval()
            with modes[step // 2]():
                found = model.module(ctx.data(3, 6, step=90 + step, rank=0)).sum()
            model.train()
            return found.detach().clone()

        pair.each(evaluate, f"evaluation {step}")
        if step % 2:
            dist.barrier()
    pair.finally_equal()


@check
def clipping_and_scaling(ctx: Context) -> None:
    """Whatever reads gradients before the step gets the reduced ones, and the step uses what it made of them."""
    pair = Pair(ctx, OPTIMIZERS["adamw"])
    # The norm of gradients that lie elsewhere in memory is summed in another order there, and all follows from it.
    pair.exact = pair.exact and ctx.device.type == "cpu"
    scalers = {id(o): torch.amp.GradScaler(ctx.device.type, init_scale=64.0) for _, o in pair.both}
    for step in range(6):

        def body(model: Any, optimizer: torch.optim.Optimizer, step: int = step) -> torch.Tensor:
            scaler = scalers[id(optimizer)]
            x = ctx.data(3, 6, step=step, rank=ctx.rank)
            if step == 3 and ctx.rank == 0:
                x[0, 0] = float("inf")
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return norm if step != 3 else torch.tensor(scaler.get_scale())

        pair.each(body, f"step {step}")
    pair.finally_equal()


@check
def closures_and_hooks(ctx: Context) -> None:
    pair = Pair(ctx, momentum)
    called: dict[int, list[str]] = {id(optimizer): [] for _, optimizer in pair.both}
    for _, optimizer in pair.both:
        optimizer.register_step_pre_hook(lambda o, a, k: called[id(o)].append("before"))
        optimizer.register_step_post_hook(lambda o, a, k: called[id(o)].append("after"))
    for step in range(3):

        def body(model: Any, optimizer: torch.optim.Optimizer, step: int = step) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(ctx.data(3, 6, step=step, rank=ctx.rank)).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        pair.each(body, f"closure {step}")
    pair.finally_equal()
    ours, theirs = called.values()
    assert ours == theirs == ["before", "after"] * 3, (ours, theirs)
    assert pair.optimizer.step() is None


@check
def checkpoints(ctx: Context) -> None:
    """Saved and loaded in mid-training, weights and optimizer belong together."""
    pair = Pair(ctx, OPTIMIZERS["adam"])
    for step in range(3):
        pair.step(step)
    saved = [(copy.deepcopy(o.state_dict()), copy.deepcopy(m.state_dict())) for m, o in pair.both]
    for step in range(3, 5):
        pair.step(step)
    for (model, optimizer), (state, weights) in zip(pair.both, saved, strict=True):
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
    for step in range(5, 8):
        pair.step(step)
    pair.finally_equal()


@check
def weights_used_without_their_module(ctx: Context) -> None:
    """A parent that reads its child's weight itself, tied weights, and an updated copy kept beside."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(6, 6)
            self.middle = nn.LSTM(6, 6)
            self.out = nn.Linear(6, 6)
            self.out.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(nn.functional.linear(x, self.table.weight))
            y, _ = self.middle(y)
            return self.out(self.table(y))

    pair = Pair(ctx, momentum, Tied)
    averages = [torch.optim.swa_utils.AveragedModel(model.module) for model, _ in pair.both]
    for step in range(4):
        pair.step(step)
        if step % 2:
            for average, (model, _) in zip(averages, pair.both, strict=True):
                average.update_parameters(model.module)
    pair.finally_equal()
    for found, expected in zip(*(average.parameters() for average in averages), strict=True):
        pair.same(found.detach(), expected.detach(), "average")


@check
def compiled_later(ctx: Context) -> None:
    """A module compiled after the optimizer was handed over."""
    pair = Pair(ctx, momentum)
    pair.step(0)
    pair.ours.module[2].compile(backend="eager")
    for step in range(1, 4):
        pair.step(step)
    pair.finally_equal()
    torch._dynamo.reset()


@check
def refusals(ctx: Context) -> None:
    model = ctx.build(mlp)
    plan = in_halves(small_plan(model))
    wrapped = DistributedDataParallel(model, plan=plan)
    x = ctx.data(3, 6, step=0, rank=ctx.rank)
    raises(InputError, lambda: wrapped(x).sum().backward(), "call model.attach(optimizer)")

    class Coupled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    raises(InputError, lambda: wrapped.attach(torch.optim.LBFGS(model.parameters())), "LBFGS couples all parameters")
    raises(InputError, lambda: wrapped.attach(Coupled(model.parameters(), lr=0.1)), "Coupled is not known")
    raises(InputError, lambda: wrapped.attach(stranger), "holds no parameter of this model")
    raises(InputError, lambda: wrapped.attach(model), "takes a torch.optim.Optimizer")
    raises(
        InputError,
        lambda: wrapped.attach(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)),
        "differentiable=True",
    )
    raises(InputError, lambda: wrapped.register_comm_hook(None, lambda state, bucket: bucket), "a communication hook")
    wrapped.attach(Coupled(model.parameters(), lr=0.1), per_parameter=True)
    wrapped(x).sum().backward()
    other = ctx.build(mlp)
    raises(InputError, lambda: DistributedDataParallel(other, plan=plan, channels=2), "decoupled plans use one channel")
    raises(InputError, lambda: DistributedDataParallel(other, plan=plan, backend="ddp"), "cannot run a decoupled plan")
    raises(InputError, lambda: DistributedDataParallel(other, plan="decoupled"), "cannot be chosen while training runs")


@check
def dropped_wrapper(ctx: Context) -> None:
    """A wrapper that goes away in mid-flight leaves the model with its last update, and no trace."""
    pair = Pair(ctx, momentum)
    for step in range(2):
        pair.step(step)
    model, expected = pair.ours.module, [p.detach().clone() for p in pair.theirs.parameters()]
    del pair.ours
    for found, other in zip(model.parameters(), expected, strict=True):
        pair.same(found.detach(), other, "after the wrapper")
        assert type(found) is nn.Parameter
        assert not vars(found), vars(found)


@check
def report_shows_both_halves(ctx: Context) -> str:
    """Every scatter and every gather with its gradients and bytes, and when each left and was back."""
    pair = Pair(ctx, momentum)
    for step in range(4):
        pair.step(step)
    pair.ours.finish()
    report = pair.ours.report()
    names = [name for name, _ in pair.ours.module.named_parameters()]
    assert [name for gather in report.gathers for name in gather.gradients] == names
    assert sorted(name for group in report.groups for name in group.gradients) == sorted(names)
    launched = [gather.launched_s for gather in report.gathers]
    assert None not in launched
    assert launched == sorted(launched)
    assert launched[0] >= max(group.launched_s for group in report.groups), "a gather left before the scatters had"
    if ctx.device.type == "cpu":
        assert all(gather.done_s > 0 for gather in report.gathers)
    assert all(gather.bytes >= 4 * 6 for gather in report.gathers)
    text = str(report)
    assert "scatter" in text, text
    assert "gather " in text, text
    return text
