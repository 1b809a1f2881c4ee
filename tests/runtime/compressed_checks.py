"""Training with compressed buckets on several ranks: nothing lost, replicas alike, updates in backward, refusals."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compressed_rig import ALL, SOME, backward, compressed, local_gradients, owed, same_everywhere, wrap
from msgspec.structs import replace
from rank_asserts import raises
from scenario_rig import Context, mlp, registry, small_plan
from scenarios_graphs import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_

from backbeat.errors import InputError
from backbeat.model.blocks import MemoryPlan
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed import checkpoint as residual_files
from backbeat.runtime.reduce.partition import plan_partition

CHECKS, check = registry("compressed_")


@check
def nothing_is_lost(ctx: Context) -> None:
    """Gradients delivered and residuals kept add up to all gradients, and ranks get the same."""
    for every in (1, 2):
        wrapped = wrap(ctx, SOME, every=every)
        sent: dict[str, Any] = {}
        total: dict[str, Any] = {}
        for step in range(5):
            wrapped.zero_grad()
            for key, value in local_gradients(ctx, wrapped.module, step).items():
                total[key] = total.get(key, 0) + value
            backward(ctx, wrapped, step)
            for key, parameter in wrapped.module.named_parameters():
                sent[key] = sent.get(key, 0) + parameter.grad
                parameter.data.sub_(parameter.grad, alpha=0.1)
            same_everywhere(ctx, wrapped.module, f"every {every}, step {step}")
        left = owed(ctx, wrapped)
        for key, value in total.items():
            torch.testing.assert_close(
                sent[key] + left[key], value, rtol=1e-4, atol=1e-5, msg=lambda t, k=key, n=every: f"every {n}, {k}: {t}"
            )
        assert any(bool(value.any()) for value in left.values()), "nothing was kept back"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "single_tensor": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@check
def updates_inside_backward(ctx: Context) -> None:
    """With everything sent, an optimizer handed over trains as under stock DDP, and no gradient is left."""
    for name, make in {**OPTIMIZERS, **OTHERS}.items():
        for every in (1, 2) if name in OPTIMIZERS else (2,):
            model = ctx.build(mlp)
            ours: Any = DistributedDataParallel(copy.deepcopy(model), plan=compressed(model, ALL, every=every))
            theirs: Any = TorchDDP(copy.deepcopy(model))
            optimizer, other = make(ours.parameters()), make(theirs.parameters())
            ours.attach(optimizer, max_grad_norm=None)
            schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, other)]
            for step in range(3):
                found, expected = backward(ctx, ours, step), backward(ctx, theirs, step)
                assert all(parameter.grad is None for parameter in ours.parameters()), "a gradient is left"
                for one, schedule in zip((optimizer, other), schedules, strict=True):
                    one.step()
                    schedule.step()
                    one.zero_grad()
                torch.testing.assert_close(found, expected, msg=lambda t, n=name: f"{n}: {t}")
            for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
                if ctx.size <= 2:
                    assert torch.equal(mine, yours), f"{name}, every {every}: weights differ from stock DDP's"
                torch.testing.assert_close(mine, yours)
            states = [one.state_dict()["state"] for one in (optimizer, other)]
            assert states[0].keys() == states[1].keys()


@check
def clipped_updates(ctx: Context) -> None:
    """With everything sent, as stock DDP with `clip_grad_norm_`, also accumulating; updates wait for all gradients."""
    for every in (1, 2):
        model = ctx.build(mlp)
        ours: Any = DistributedDataParallel(copy.deepcopy(model), plan=compressed(model, ALL, every=every))
        theirs: Any = TorchDDP(copy.deepcopy(model))
        optimizer, other = OPTIMIZERS["momentum"](ours.parameters()), OPTIMIZERS["momentum"](theirs.parameters())
        ours.attach(optimizer, max_grad_norm=0.02)
        norms = []
        for step in range(6):
            before = [parameter.detach().clone() for parameter in ours.parameters()]
            held = list(ours.parameters())
            handle = held[1].register_hook(
                lambda _, held=held, old=before: assert_equal(held, old, "updated before the last gradient")
            )
            for one in (ours, theirs):
                if step % 2:
                    with one.no_sync():
                        backward(ctx, one, 20 + step)
                backward(ctx, one, step)
            handle.remove()
            assert all(parameter.grad is None for parameter in ours.parameters()), "a gradient is left"
            norms.append(float(clip_grad_norm_(theirs.parameters(), 0.02)))
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
            for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine, yours, msg=lambda t, s=step, e=every: f"every {e}, step {s}: {t}")
        assert max(norms) > 0.02, "nothing had to be clipped"
    lossy = wrap(ctx, SOME, every=2)
    lossy.attach(torch.optim.SGD(lossy.parameters(), lr=1.0), max_grad_norm=0.01)
    for step in range(3):
        before = [parameter.detach().clone() for parameter in lossy.parameters()]
        backward(ctx, lossy, step)
        moved = torch.cat([(p - old).flatten() for p, old in zip(lossy.parameters(), before, strict=True)])
        assert 0 < float(moved.norm()) < 0.0101, float(moved.norm())
    same_everywhere(ctx, lossy.module, "clipped")


def assert_equal(found: Any, expected: list[torch.Tensor], what: str) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), what


@check
def optimizers_in_use(ctx: Context) -> None:
    """Two optimizers with buckets of their own, closures, hooks on `step`, and states that are saved and loaded."""
    model = ctx.build(mlp)
    ours: Any = DistributedDataParallel(copy.deepcopy(model), plan=compressed(model, ALL, every=2))
    theirs: Any = TorchDDP(copy.deepcopy(model))
    sides = []
    for side in (ours, theirs):
        held = list(side.parameters())
        bucketed = [{"params": held[0:4:2], "lr": 0.1}, {"params": held[1:4:2], "weight_decay": 0.0}]
        sides.append((side, torch.optim.AdamW(bucketed, lr=0.01), torch.optim.SGD(held[4:], lr=0.1, momentum=0.9)))
    for optimizer in sides[0][1:]:
        ours.attach(optimizer, max_grad_norm=None)
    called: dict[int, list[str]] = {id(first): [] for _, first, _ in sides}
    for _, first, _ in sides:
        first.register_step_pre_hook(lambda o, a, k: called[id(o)].append("before"))
        first.register_step_post_hook(lambda o, a, k: called[id(o)].append("after"))
    saved: list[Any] = []
    for step in range(6):
        losses = []
        for side, first, second in sides:

            def closure(side: Any = side, step: int = step) -> torch.Tensor:
                loss = side(ctx.data(3, 6, step=step, rank=ctx.rank)).square().mean()
                loss.backward()
                return loss

            losses.append(first.step(closure).detach())
            second.step()
            for one in (first, second):
                one.zero_grad()
        torch.testing.assert_close(*losses)
        if step == 2:
            saved = [[copy.deepcopy(one.state_dict()) for one in side] for side in sides]
        if step == 4:
            for side, states in zip(sides, saved, strict=True):
                for one, state in zip(side, states, strict=True):
                    one.load_state_dict(state)
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)
    assert [*called.values()] == [["before", "after"] * 6] * 2, called


@check
def groups_leave_and_are_applied_during_backward(ctx: Context) -> None:
    """All but the last buckets are sent before the last gradient, and some weights change before backward ends."""
    seen: list[int] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    wrapped = wrap(ctx, SOME, Spy)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.attach(optimizer, max_grad_norm=None)
    last = wrapped.module.layers[5].weight

    def first_layer(_: torch.Tensor) -> None:
        if wrapped.reducer.steps > 2:
            # Wait here for what was sent, so that there is something to collect whatever the machine does meanwhile.
            for sent in wrapped.reducer.runner.step.in_flight:
                if sent.work is not None:
                    sent.work.wait()
            seen.append(last._version)

    wrapped.module.layers[1].bias.register_hook(first_layer)
    versions = []
    for step in range(5):
        versions.append(last._version)
        backward(ctx, wrapped, step)
        if step > 2:
            assert not wrapped.reducer.buckets[0].away
    assert seen, "the hook never ran"
    # The hook of the second layer runs before the buckets of the first leave; by the next launch bucket 0 is applied.
    assert last._version > versions[-1]
    same_everywhere(ctx, wrapped.module, "after training")


@check
def accumulation_and_no_sync(ctx: Context) -> None:
    """Under no_sync nothing is sent and residuals stay; the sum goes with the next synchronised backward."""
    for attached in (False, True):
        model = ctx.build(mlp)
        ours: Any = DistributedDataParallel(copy.deepcopy(model), plan=compressed(model, ALL))
        theirs: Any = TorchDDP(copy.deepcopy(model))
        pairs = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (ours, theirs)]
        if attached:
            ours.attach(pairs[0][1], max_grad_norm=None)
        for step in range(3):
            for wrapped, optimizer in pairs:
                with wrapped.no_sync():
                    backward(ctx, wrapped, 10 * step)
                    backward(ctx, wrapped, 10 * step + 1)
                backward(ctx, wrapped, 10 * step + 2)
                optimizer.step()
                optimizer.zero_grad()
        for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, yours)
        if attached:
            optimizer = pairs[0][1]
            with ours.no_sync():
                backward(ctx, ours, 30)
            raises(InputError, optimizer.step, "step() after a backward under no_sync")
            # The backward that synchronises may be the closure's.
            optimizer.step(partial(backward, ctx, ours, 31))
            with ours.no_sync():
                raises(InputError, partial(optimizer.step, partial(backward, ctx, ours, 32)), "under no_sync")
            optimizer.zero_grad()
            optimizer.step()
            same_everywhere(ctx, ours.module, "after a refused step()")


@check
def unused_and_frozen(ctx: Context) -> None:
    """A parameter nobody ever used keeps None and its weight; a frozen one stays where it is and keeps its residual."""
    for attached in (False, True):
        wrapped = wrap(ctx, SOME, Branches)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, weight_decay=0.5)
        if attached:
            wrapped.attach(optimizer, max_grad_norm=None)
        spare = wrapped.module.spare.weight.detach().clone()
        for step in range(3):
            backward(ctx, wrapped, step, use="l" if ctx.rank == 0 else "lr")
            assert wrapped.module.spare.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(wrapped.module.spare.weight, spare), "weight decay moved a parameter nobody used"
        same_everywhere(ctx, wrapped.module, "one rank used what the other did not")
        before = owed(ctx, wrapped)["left.weight"]
        wrapped.module.left.requires_grad_(False)
        held = wrapped.module.left.weight.detach().clone()
        for step in range(3, 6):
            backward(ctx, wrapped, step)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(wrapped.module.left.weight, held), "a frozen weight moved"
        torch.testing.assert_close(owed(ctx, wrapped)["left.weight"], before)
        wrapped.module.left.requires_grad_(True)
        for step in range(6, 9):
            backward(ctx, wrapped, step)
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(wrapped.module.left.weight, held)
        same_everywhere(ctx, wrapped.module, "unfrozen")


@check
def join_uneven(ctx: Context) -> None:
    """Ranks that have run out of data take part with nothing."""
    wrapped = wrap(ctx, SOME)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    wrapped.attach(optimizer, max_grad_norm=None)
    with wrapped.join():
        for step in range(3 + ctx.rank):
            backward(ctx, wrapped, step)
            optimizer.step()
    same_everywhere(ctx, wrapped.module, "after join")


@check
def copies_and_pickles(ctx: Context) -> None:
    """A copy trains on with residuals of its own, none at first; residuals travel in their own checkpoint."""
    wrapped = wrap(ctx, SOME)
    for step in range(2):
        wrapped.zero_grad()
        backward(ctx, wrapped, step)
    twin = copy.deepcopy(wrapped)
    again = pickle.loads(pickle.dumps(wrapped))
    for other in (twin, again):
        other.zero_grad()
        backward(ctx, other, 2)
        assert all(parameter.grad is not None for parameter in other.parameters())
    twin.load_residual_state_dict(wrapped.residual_state_dict())
    wrapped.zero_grad()
    twin.zero_grad()
    backward(ctx, wrapped, 3)
    backward(ctx, twin, 3)
    for mine, other in zip(wrapped.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@check
def plans_change_and_residuals_stay(ctx: Context) -> None:
    """By name, in other buckets, under another compression, and repaid by a dense bucket."""
    wrapped = wrap(ctx, SOME)
    for step in range(2):
        wrapped.zero_grad()
        backward(ctx, wrapped, step)
    wrapped.zero_grad()
    before = owed(ctx, wrapped)
    model = wrapped.module
    plan = compressed(model, Compression(density=0.3))
    plan = replace(plan, buckets=(plan.buckets[0], *(replace(g, compression=None) for g in plan.buckets[1:])))
    wrapped.reducer.switch(plan_partition(plan, wrapped.reducer.managed))
    for name, value in owed(ctx, wrapped).items():
        torch.testing.assert_close(value, before[name])
    gradients = local_gradients(ctx, model, 2)
    backward(ctx, wrapped, 2)
    after = owed(ctx, wrapped)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad + after[name], before[name] + gradients[name], rtol=1e-4, atol=1e-5)
    assert not bool(after["0.weight"].any()), "a dense bucket did not repay what it owed"


@check
def checkpoints(ctx: Context) -> None:
    """Training goes on from a checkpoint as if it had not stopped; another model's is refused."""
    with tempfile.TemporaryDirectory() as private:
        shared = [private]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0]) / "residuals"
        factories = {"device": None, "host": MemoryPlan(residuals="host")}
        for where, memory in factories.items():
            model = ctx.build(mlp)
            plan = replace(compressed(model, SOME), memory=memory)
            make = lambda m, plan=plan: DistributedDataParallel(  # noqa: E731
                m, plan=plan, compression={"momentum_correction": True, "warmup_steps": 6}
            )
            wrapped = make(model)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            wrapped.attach(optimizer, max_grad_norm=None)
            for step in range(3):
                backward(ctx, wrapped, step)
            weights = copy.deepcopy(wrapped.module.state_dict())
            wrapped.save_residuals(folder)
            saved = wrapped.residual_state_dict()
            dist.barrier()
            for step in range(3, 6):
                backward(ctx, wrapped, step)
            for first, from_files in product(("attach", "load", "halves"), (True, False)):
                fresh = make(ctx.build(mlp))
                held = list(fresh.parameters())
                halves = (held[:4], held[4:]) if first == "halves" else (held,)
                if first == "attach":
                    fresh.attach(torch.optim.SGD(held, lr=0.1, momentum=0.9), max_grad_norm=None)
                fresh.module.load_state_dict(weights)
                if from_files:
                    fresh.load_residuals(folder)
                else:
                    fresh.load_residual_state_dict(saved)
                held_now = fresh.residual_state_dict()
                assert held_now["step"] == saved["step"]
                for kind in ("residuals", "velocities"):
                    torch.testing.assert_close(held_now[kind], saved[kind], rtol=0, atol=0)
                if first != "attach":
                    for half in halves:
                        fresh.attach(torch.optim.SGD(half, lr=0.1, momentum=0.9), max_grad_norm=None)
                for step in range(3, 6):
                    backward(ctx, fresh, step)
                for mine, other in zip(wrapped.parameters(), fresh.parameters(), strict=True):
                    what = f"{where}, {first}, files {from_files}"
                    assert torch.equal(mine, other), f"{what}: training did not go on as it was"
                dist.barrier()
        with warnings_of("backbeat.runtime") as said:
            wrap(ctx, SOME).load_residual_state_dict(saved)
        assert ["begins anew" in one for one in said] == ([True] if ctx.rank == 0 else []), said
        other = wrap(ctx, SOME, lambda: mlp(width=5))
        raises(
            InputError,
            lambda: other.load_residuals(folder),
            "residual of '0.weight' has shape (6, 6), the parameter (5, 5)",
        )
        dist.barrier()


@check
def residuals_beside_a_checkpoint(ctx: Context) -> None:
    """A framework's file has a folder beside it; what is not there is said, and what does not belong is refused."""
    wrapped = wrap(ctx, SOME)
    for step in range(2):
        backward(ctx, wrapped, step)
    holder = nn.ModuleDict({"net": wrapped})
    with tempfile.TemporaryDirectory() as private, mock.patch.object(residual_files.logger, "warning") as said:
        shared = [private]
        dist.broadcast_object_list(shared)
        path, saved = f"{shared[0]}/last.ckpt", {}
        folder = Path(f"{path}.residuals") / "net"
        if ctx.rank == 0:
            folder.mkdir(parents=True)
            (folder / "rank-00000-of-00099.pt").touch()
        dist.barrier()
        residual_files.save_residuals(residual_files.residual_states(holder), saved, path)
        dist.barrier()
        assert saved == {residual_files.KEY: {"net": 2}}
        assert len(list(folder.iterdir())) == ctx.size, "another number of ranks left its files"
        fresh = nn.ModuleDict({"net": wrap(ctx, SOME)})
        if ctx.rank == 0:
            Path(path).touch()
            Path(f"{path}.link").symlink_to(path)
        dist.barrier()
        residual_files.load_residuals(fresh, saved, f"{path}.link")
        torch.testing.assert_close(owed(ctx, fresh["net"]), owed(ctx, wrapped), rtol=0, atol=0)
        other = {residual_files.KEY: {"net": 7}}
        raises(InputError, lambda: residual_files.load_residuals(fresh, other, path), "the checkpoint is of step 7")
        assert not said.called
        for model, checkpoint, where, match in (
            (fresh, {}, path, "training begins without"),
            (fresh, saved, f"{path}2", "is not there"),
            (nn.ModuleDict({"net": DistributedDataParallel(ctx.build(mlp))}), saved, path, "this plan has no such"),
        ):
            residual_files.load_residuals(model, checkpoint, where)
            assert match in said.call_args.args[0] % said.call_args.args[1:]
        residual_files.save_residuals(residual_files.residual_states(holder), {}, "s3://bucket/last.ckpt")
        assert "model.save_residuals(folder)" in said.call_args.args[0]
        dist.barrier()
        residual_files.remove_residuals(path)
        assert not folder.exists()
        dist.barrier()


@check
def residuals_on_the_host(ctx: Context) -> None:
    """Training is the same wherever residuals live."""
    weights = []
    for where in ("device", "host"):
        model = ctx.build(mlp)
        plan = replace(compressed(model, SOME, every=2), memory=MemoryPlan(residuals=where))  # type: ignore
        wrapped = DistributedDataParallel(model, plan=plan)
        wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), max_grad_norm=None)
        for step in range(5):
            backward(ctx, wrapped, step)
        weights.append([parameter.detach().clone() for parameter in wrapped.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other), "residuals on the host train differently"


@check
def momentum_correction(ctx: Context) -> None:
    """With everything sent it is the optimizer's own, with weight decay and where ranks use different parameters; other
    optimizers go without."""
    for seed in range(7):
        draw = random.Random(seed)
        # The last time rank 0 uses a branch that no other ever does: these join in a step late.
        alone = seed == 6
        chosen = {
            "lr": draw.choice([0.1, 0.05, 0.01]),
            "momentum": draw.choice([0.0, 0.5, 0.9]),
            "weight_decay": draw.choice([0.0, 0.01, 0.2]),
        }
        if seed in (0, 6):
            chosen = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2}
        falls = draw.choice([1.0, 0.9, 0.5])
        model = ctx.build(Branches)
        ours: Any = DistributedDataParallel(
            copy.deepcopy(model), plan=compressed(model, ALL), compression={"momentum_correction": True}
        )
        theirs: Any = TorchDDP(copy.deepcopy(model), find_unused_parameters=True)
        optimizer, other = (torch.optim.SGD(one.parameters(), **chosen) for one in (ours, theirs))
        schedules = [torch.optim.lr_scheduler.StepLR(one, 7, falls) for one in (optimizer, other)]
        ours.attach(optimizer, max_grad_norm=None)
        # The spare branch moves on no other rank, in any step.
        for step in range(20):
            use = "lr" if step < 2 or ctx.rank == step % ctx.size else "l"
            use += "s" if alone and ctx.rank == 0 else ""
            for one, its, schedule in zip((ours, theirs), (optimizer, other), schedules, strict=True):
                backward(ctx, one, step, use=use)
                its.step()
                its.zero_grad()
                schedule.step()
        off = {"rtol": 0.05, "atol": 5e-3} if alone else {"rtol": 1e-4, "atol": 1e-5}
        for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, yours, **off, msg=lambda t, c=chosen: f"{c}: {t}")
    unattached = wrap(ctx, SOME, compression={"momentum_correction": True})
    raises(InputError, lambda: backward(ctx, unattached, 0), "momentum_correction keeps the optimizer's momentum")
    nesterov = wrap(ctx, SOME, compression={"momentum_correction": True})
    bad = torch.optim.SGD(nesterov.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    raises(InputError, lambda: nesterov.attach(bad, max_grad_norm=None), "nesterov=True")
    damped = torch.optim.SGD(nesterov.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    raises(InputError, lambda: nesterov.attach(damped, max_grad_norm=None), "dampening=0.1")
    good = torch.optim.SGD(nesterov.parameters(), lr=0.1, momentum=0.9)
    nesterov.attach(good, max_grad_norm=None)
    backward(ctx, nesterov, 0)
    # As a checkpoint of an earlier run may bring it.
    good.load_state_dict(bad.state_dict())
    raises(InputError, lambda: backward(ctx, nesterov, 1), "nesterov=True")
    adam = wrap(ctx, SOME, compression={"momentum_correction": True})
    adam.attach(torch.optim.Adam(adam.parameters(), lr=0.01), max_grad_norm=None)
    for step in range(3):
        backward(ctx, adam, step)
    same_everywhere(ctx, adam.module, "Adam")


@check
def refusals(ctx: Context) -> None:
    """What cannot be right is said, on every rank."""
    model = ctx.build(mlp)
    if ctx.size > 1:
        mine = Compression(density=0.1 if ctx.rank == 0 else 0.2)
        raises(InputError, lambda: DistributedDataParallel(model, plan=compressed(model, mine)), "topk 0.1")
        raises(InputError, lambda: wrap(ctx, SOME, compression={"warmup_steps": 1 + ctx.rank}), "warmup_steps=1")
    raises(
        InputError,
        lambda: DistributedDataParallel(ctx.build(mlp), plan=compressed(model, SOME), reducer="ddp"),
        "torch's reducer cannot run a plan with compressed buckets",
    )
    raises(
        InputError,
        lambda: wrap(ctx, SOME, lambda: nn.Sequential(nn.Embedding(6, 6, sparse=True), nn.Linear(6, 6))),
        "parameter '0.weight' has sparse gradients",
    )
    raises(
        InputError,
        lambda: wrap(ctx, SOME, lambda: nn.ParameterDict({"z": nn.Parameter(torch.ones(3, dtype=torch.cfloat))})),
        "'z' is torch.complex64, and its bucket is compressed",
    )
    for frozen in (False, True):
        table = nn.Embedding(6, 6, sparse=True).requires_grad_(not frozen)
        make = partial(wrap, ctx, SOME, lambda table=table: nn.Sequential(table, nn.Linear(6, 6)), every=2)
        backend = dist.get_backend()
        if backend != "gloo" and not frozen:
            raises(InputError, make, f"parameter '0.weight' has sparse gradients, which {backend} cannot sum")
            continue
        looked_up = make()
        raises(
            InputError,
            lambda model=looked_up: model.attach(torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0),
            "parameter '0.weight' has sparse gradients, which torch cannot clip",
        )
    raises(InputError, lambda: wrap(ctx, SOME, compression={"momentum": 1}), "compression has 'momentum'")
    raises(InputError, lambda: wrap(ctx, SOME, compression={"warmup_steps": -1}), "warmup_steps is -1")
    raises(InputError, lambda: wrap(ctx, SOME, compression={"warmup_steps": None}), "warmup_steps is None: it must be")
    raises(InputError, lambda: wrap(ctx, SOME, compression={"momentum_correction": "no"}), "must be True or False")
    raises(
        InputError, lambda: wrap(ctx, SOME, compression={"factor_masking": True}), "compression has 'factor_masking'"
    )
    plain = DistributedDataParallel(ctx.build(mlp), plan=small_plan(model))
    raises(InputError, plain.residual_state_dict, "there are no residuals")
    attached = wrap(ctx, SOME)
    half = list(attached.parameters())[:3]
    attached.attach(torch.optim.SGD(half, lr=0.1), max_grad_norm=None)
    raises(InputError, lambda: backward(ctx, attached, 0), "no optimizer handed over holds '2.bias'")
    raises(InputError, lambda: wrap(ctx, SOME).attach(torch.optim.LBFGS(half), max_grad_norm=None), "LBFGS")
    loose = wrap(ctx, SOME)
    backward(ctx, loose, 0)
    assert float(clip_grad_norm_(loose.parameters(), 1.0)) > 0


@check
def what_cannot_be_attached(ctx: Context) -> None:
    """Refused before anything changes: afterwards the wrapper trains."""

    class Coupled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    wrapped = wrap(ctx, SOME)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def refused(optimizer: Any, match: str, **arguments: Any) -> None:
        raises(InputError, lambda: wrapped.attach(optimizer, **{"max_grad_norm": None, **arguments}), match)

    refused(torch.optim.LBFGS(wrapped.parameters()), "LBFGS couples all parameters")
    refused(Coupled(wrapped.parameters(), lr=0.1), "Coupled is not known")
    refused(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "holds no parameter of this model")
    refused(wrapped.module, "takes a torch.optim.Optimizer")
    refused(torch.optim.SGD(wrapped.parameters(), lr=0.1, differentiable=True), "differentiable=True")
    refused(sgd, "train in bf16", grad_scaler=torch.amp.GradScaler(ctx.device.type))
    refused(sgd, "max_grad_norm is 0", max_grad_norm=0)
    refused(sgd, "max_grad_norm is nan", max_grad_norm=float("nan"))
    raises(TypeError, lambda: wrapped.attach(sgd), "max_grad_norm")
    corrected = wrap(ctx, SOME, compression={"momentum_correction": True})
    momentum = torch.optim.SGD(corrected.parameters(), lr=0.1, momentum=0.9)
    raises(InputError, lambda: corrected.attach(momentum, max_grad_norm=1.0), "momentum_correction with max_grad_norm")
    some, rest = list(wrapped.parameters())[:3], list(wrapped.parameters())[3:]
    wrapped.attach(torch.optim.SGD(some, lr=0.1), max_grad_norm=1.0)
    refused(torch.optim.SGD(rest, lr=0.1), "max_grad_norm is None, and 1.0 for SGD")
    wrapped.attach(Coupled(rest, lr=0.1), max_grad_norm=1.0, per_parameter=True)
    backward(ctx, wrapped, 0)
    # One made in place of both may do otherwise.
    wrapped.attach(sgd, max_grad_norm=None, grad_scaler=torch.amp.GradScaler(ctx.device.type, enabled=False))
    backward(ctx, wrapped, 1)
    same_everywhere(ctx, wrapped.module, "after refusals")
    dense = DistributedDataParallel(ctx.build(mlp), plan=small_plan(wrapped.module))
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    raises(InputError, lambda: dense.attach(plain, max_grad_norm=1.0), "no bucket of the plan is compressed")
    dense.attach(plain, max_grad_norm=None)


@check
def what_goes_unseen_is_warned_of(ctx: Context) -> None:
    """Once each: clipping that finds no gradients, and fp16, which mostly comes with a gradient scaler."""
    wrapped = wrap(ctx, SOME)
    with warnings_of("backbeat.runtime") as said:
        first, second = list(wrapped.parameters())[:3], list(wrapped.parameters())[3:]
        for half in (first, second):
            wrapped.attach(torch.optim.SGD(half, lr=0.1), max_grad_norm=None)
        assert len(said) == 1, said
        assert "gradients are not clipped" in said[0]
        assert said[0].endswith("the norm to clip")
    with warnings_of("backbeat.runtime") as said:
        corrected = wrap(ctx, SOME, compression={"momentum_correction": True})
        corrected.attach(torch.optim.SGD(corrected.parameters(), lr=0.1, momentum=0.9), max_grad_norm=None)
        assert said[0].endswith("the norm to clip, without momentum_correction"), said
    with warnings_of("backbeat.runtime") as said:
        for _ in range(2):
            with torch.autocast(ctx.device.type, torch.bfloat16):
                backward(ctx, wrapped, 0)
        assert not said, said
        for _ in range(2):
            with torch.autocast(ctx.device.type, torch.float16):
                wrapped(ctx.data(3, 6, step=0, rank=ctx.rank))
        assert len(said) == 1, said
        assert "use no GradScaler" in said[0]


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


@check
def sixteen_bit_parameters(ctx: Context) -> None:
    """Residuals of bf16 parameters are kept in fp32, and both deliveries give bf16."""
    for attached in (False, True):
        wrapped = wrap(ctx, SOME, lambda: mlp().bfloat16())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        if attached:
            wrapped.attach(optimizer, max_grad_norm=None)
        for step in range(3):
            x = ctx.data(3, 6, step=step, rank=ctx.rank).bfloat16()
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        same_everywhere(ctx, wrapped.module, "bf16")
        state = wrapped.residual_state_dict()
        assert all(value.dtype == torch.float32 for value in state["residuals"].values())
        stream = io.BytesIO()
        torch.save(state, stream)


@check
def backward_inside_autocast(ctx: Context) -> None:
    """What is compressed is not rounded by an autocast around backward; the report has a line for each bucket."""
    wrapped = wrap(ctx, SOME, every=2)
    wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=0.1), max_grad_norm=None)
    for step in range(3):
        with torch.autocast(ctx.device.type, torch.bfloat16):
            backward(ctx, wrapped, step)
    same_everywhere(ctx, wrapped.module, "under autocast")
    assert all(value.dtype == torch.float32 for value in wrapped.residual_state_dict()["residuals"].values())
    assert len(str(wrapped.report()).splitlines()) >= len(wrapped.reducer.buckets)
