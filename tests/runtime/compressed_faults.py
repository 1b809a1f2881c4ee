"""Compressed buckets where something goes wrong: failed steps, gradients that are not finite or come late, lost
ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from compressed_checks import (
    checkpoints,
    momentum_correction,
    nothing_is_lost,
    plans_change_and_residuals_stay,
    sixteen_bit_parameters,
    unused_and_frozen,
)
from compressed_rig import SOME, backward, compressed, local_gradients, owed, same_everywhere, wrap
from msgspec.structs import replace
from rank_asserts import raises
from scenario_rig import Context, mlp, registry
from scenarios_graphs import Breakable, Twice
from torch import nn
from torch.utils.checkpoint import checkpoint

from backbeat.errors import BrokenStepError, CommunicationError, NonFiniteError
from backbeat.model.blocks import MemoryPlan
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.reduce import backward as backward_module

CHECKS, check = registry("compressed_")


@check
def a_failed_step(ctx: Context) -> None:
    """An exception on one rank: all hear of it, replicas stay alike, and nothing that was accumulated is lost."""
    for attached in (False, True):
        wrapped = wrap(ctx, SOME, Breakable, strict=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        if attached:
            wrapped.attach(optimizer, max_grad_norm=None)
        for step in range(3):
            backward(ctx, wrapped, step)
            optimizer.step()
            optimizer.zero_grad()
        before = owed(ctx, wrapped)
        if ctx.rank == 0:
            wrapped.module.fail_at = 1
        raises(
            (FloatingPointError, BrokenStepError),
            lambda w=wrapped: backward(ctx, w, 3),
            "planted" if ctx.rank == 0 else "rank 0 broke off",
        )
        wrapped.module.fail_at = None
        weights = [parameter.detach().clone() for parameter in wrapped.parameters()]
        for step in range(4, 7):
            backward(ctx, wrapped, step)
            optimizer.step()
            optimizer.zero_grad()
            same_everywhere(ctx, wrapped.module, f"attached {attached}, step {step}")
        assert all(bool(value.isfinite().all()) for value in owed(ctx, wrapped).values())
        assert before.keys() == owed(ctx, wrapped).keys()
        assert len(weights) == 8


@check
def a_failed_step_that_autograd_lets_go_of_late(ctx: Context) -> None:
    """As a thread of autograd's own may, on a GPU: what is left to do of the step is done before the next forward, not
    between that and its backward, where updates would change what it has to be computed with."""
    wrapped = wrap(ctx, SOME, Breakable, strict=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    wrapped.attach(optimizer, max_grad_norm=None)
    for step in range(2):
        backward(ctx, wrapped, step)
        optimizer.step()
    if ctx.rank == 0:
        wrapped.module.fail_at = 1
    held: list[Any] = []
    queue = backward_module.queue_callback

    def queue_and_hold(callback: Any) -> None:
        held.extend([callback] * 4)
        queue(callback)

    with mock.patch.object(backward_module, "queue_callback", queue_and_hold):
        raises((FloatingPointError, BrokenStepError), lambda: backward(ctx, wrapped, 2))
    wrapped.module.fail_at = None
    # Each time that the forward waits, one of those who hold on to the backward lets go.
    waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: held.pop())
    foreign = mock.patch.object(backward_module, "_started_by_python", return_value=False)
    with foreign, mock.patch.object(backward_module, "time", waiting):
        backward(ctx, wrapped, 3)
    assert not held or ctx.rank != 0, "the forward did not wait for the backward before it"
    optimizer.step()
    same_everywhere(ctx, wrapped.module, "step 3")
    backward(ctx, wrapped, 4)
    optimizer.step()
    same_everywhere(ctx, wrapped.module, "step 4")


@check
def what_a_failed_step_sent_is_taken_back(ctx: Context) -> None:
    """Not attached: gradients delivered and residuals add up, with what the failing step had accumulated."""
    wrapped = wrap(ctx, SOME, strict=True)
    backward(ctx, wrapped, 0)
    wrapped.zero_grad()
    before = owed(ctx, wrapped)
    poisoned = wrapped.module[0].weight
    handle = poisoned.register_hook(lambda g: g * float("nan") if ctx.rank == ctx.size - 1 else g)
    expected = local_gradients(ctx, wrapped.module, 1)
    raises(
        NonFiniteError,
        lambda: backward(ctx, wrapped, 1),
        f"the gradient of '0.weight' is not finite on rank {ctx.size - 1} in step 2",
    )
    handle.remove()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    after = owed(ctx, wrapped)
    for name, value in expected.items():
        if name != "0.weight":
            torch.testing.assert_close(after[name], before[name] + value, rtol=1e-4, atol=1e-5)
    assert bool(after["0.weight"].isfinite().all()), "NaN entered a residual"
    backward(ctx, wrapped, 2)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in wrapped.parameters())


@check
def infinite_gradients_are_named(ctx: Context) -> None:
    """With updates handed over too; the next step works, and the weights are finite and alike."""
    # A GPU that is not asked would tell with the next backward, as `read_late` has it.
    wrapped = wrap(ctx, SOME, strict=True)
    wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=0.1), max_grad_norm=None)
    backward(ctx, wrapped, 0)
    handle = wrapped.module[2].bias.register_hook(lambda g: g + float("inf") if ctx.rank == 0 else g)
    raises(NonFiniteError, lambda: backward(ctx, wrapped, 1), "the gradient of '2.bias' is not finite on rank 0")
    handle.remove()
    for step in range(2, 5):
        backward(ctx, wrapped, step)
    same_everywhere(ctx, wrapped.module, "after a fault")
    assert all(bool(parameter.isfinite().all()) for parameter in wrapped.parameters())


@check
def clipped_updates_of_a_failed_step_are_left_out(ctx: Context) -> None:
    """On every rank, also where the status is read one step late otherwise; what it sent is taken back."""
    from backbeat.runtime.reduce import status

    for kinds in ({"cuda"}, {"cuda", "cpu"}):
        status.DEFER_ON = kinds
        try:
            wrapped = wrap(ctx, SOME, every=2)
            wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), max_grad_norm=0.01)
            for step in range(4):
                backward(ctx, wrapped, step)
            weights = [parameter.detach().clone() for parameter in wrapped.parameters()]
            handle = wrapped.module[2].weight.register_hook(lambda g: g * float("nan") if ctx.rank == 0 else g)
            raises(NonFiniteError, lambda w=wrapped: backward(ctx, w, 4), "'2.weight' is not finite on rank 0")
            handle.remove()
            for old, parameter in zip(weights, wrapped.parameters(), strict=True):
                assert torch.equal(old, parameter), "a failed step was applied"
            for step in range(5, 8):
                wrapped.zero_grad()
                backward(ctx, wrapped, step)
            same_everywhere(ctx, wrapped.module, "after a failed step")
            assert all(bool(value.isfinite().all()) for value in owed(ctx, wrapped).values())
        finally:
            status.DEFER_ON = {"cuda"}


@check
def read_late(ctx: Context) -> None:
    """Where the status is read one step late, a gradient that is not finite is named at the next step."""
    from backbeat.runtime.reduce import status

    status.DEFER_ON = {"cuda", "cpu"}
    try:
        for attached in (False, True):
            wrapped = wrap(ctx, SOME)
            if attached:
                wrapped.attach(torch.optim.SGD(wrapped.parameters(), lr=0.1), max_grad_norm=None)
            for step in range(4):
                wrapped.zero_grad()
                backward(ctx, wrapped, step)
            handle = wrapped.module[4].weight.register_hook(lambda g: g * float("nan") if ctx.rank == 0 else g)
            wrapped.zero_grad()
            backward(ctx, wrapped, 4)
            handle.remove()
            if not attached:
                assert bool(wrapped.module[0].weight.grad.isnan().all()), "the failed step's gradients look good"
            wrapped.zero_grad()
            raises(NonFiniteError, lambda w=wrapped: backward(ctx, w, 5), "'4.weight' is not finite on rank 0")
            for step in range(6, 9):
                wrapped.zero_grad()
                try:
                    backward(ctx, wrapped, step)
                except BrokenStepError:
                    assert step == 6, "the step after the failed one is told once"
            assert all(bool(value.isfinite().all()) for value in owed(ctx, wrapped).values())
            assert all(bool(parameter.isfinite().all()) for parameter in wrapped.parameters())
    finally:
        status.DEFER_ON = {"cuda"}


@check
def a_failed_step_is_told_to_a_rank_without_data(ctx: Context) -> None:
    """One that has run out of data since takes back what it sent, as the others do."""
    from backbeat.runtime.reduce import status

    status.DEFER_ON = {"cuda", "cpu"}
    try:
        wrapped = wrap(ctx, SOME)
        total: dict[str, Any] = {}
        sent: dict[str, Any] = {}
        for step in range(5):
            failing = step == 4
            for key, value in local_gradients(ctx, wrapped.module, step).items():
                total[key] = total.get(key, 0) + value
            wrapped.zero_grad()
            if failing and ctx.rank == 0:
                wrapped.module[4].weight.register_hook(lambda g: g * float("nan"))
            backward(ctx, wrapped, step)
            for key, parameter in wrapped.module.named_parameters():
                if not failing:
                    sent[key] = sent.get(key, 0) + parameter.grad
        wrapped.zero_grad()
        out_of_data = ctx.rank == ctx.size - 1
        follow = wrapped.reducer.runner.run_absent if out_of_data else lambda: backward(ctx, wrapped, 5)
        raises(NonFiniteError, follow, "'4.weight' is not finite on rank 0")
        left = owed(ctx, wrapped)
        for key in ("0.weight", "0.bias"):
            torch.testing.assert_close(sent[key] + left[key], total[key], rtol=1e-4, atol=1e-5)
    finally:
        status.DEFER_ON = {"cuda"}


@check
def a_failed_step_is_told_before_parameters_thaw(ctx: Context) -> None:
    """The word on it comes when buckets are made anew; they are made at the next forward instead."""
    from backbeat.runtime.reduce import status

    def half_frozen() -> nn.Sequential:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    status.DEFER_ON = {"cuda", "cpu"}
    try:
        wrapped = wrap(ctx, SOME, half_frozen)
        total: Any = 0
        sent: Any = 0
        for step in range(5):
            total = total + local_gradients(ctx, wrapped.module, step)["2.weight"]
            wrapped.zero_grad()
            if step == 4 and ctx.rank == 0:
                handle = wrapped.module[4].weight.register_hook(lambda g: g * float("nan"))
            backward(ctx, wrapped, step)
            if step < 4:
                sent = sent + wrapped.module[2].weight.grad
        if ctx.rank == 0:
            handle.remove()
        wrapped.zero_grad()
        wrapped.module[0].requires_grad_(True)
        raises(NonFiniteError, lambda: backward(ctx, wrapped, 5), "'4.weight' is not finite on rank 0")
        torch.testing.assert_close(sent + owed(ctx, wrapped)["2.weight"], total, rtol=1e-4, atol=1e-5)
        for step in range(6, 8):
            wrapped.zero_grad()
            expected = local_gradients(ctx, wrapped.module, step)["0.weight"]
            backward(ctx, wrapped, step)
            torch.testing.assert_close(wrapped.module[0].weight.grad, expected)
    finally:
        status.DEFER_ON = {"cuda"}


@check
def late_gradients_wait_in_the_residual(ctx: Context) -> None:
    """A gradient that comes after its bucket has left goes with the next step."""
    _gradients_come_late(ctx, wrap(ctx, SOME, Twice))


@check
def late_gradients_of_several_groups_reach_the_host(ctx: Context) -> None:
    """Buckets that get late gradients come to the device out of turn, while the last bucket is there."""
    model = ctx.build(lambda: Again(blocks=3))
    plan = replace(compressed(model, SOME), memory=MemoryPlan(residuals="host"))
    _gradients_come_late(ctx, DistributedDataParallel(model, plan=plan))


def _gradients_come_late(ctx: Context, wrapped: Any) -> None:
    total: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(7):
        wrapped.zero_grad()
        wrapped.module.nested = step > 3
        for key, value in local_gradients(ctx, wrapped.module, step).items():
            total[key] = total.get(key, 0) + value
        backward(ctx, wrapped, step)
        for key, parameter in wrapped.module.named_parameters():
            if parameter.grad is not None:
                sent[key] = sent.get(key, 0) + parameter.grad
    left = owed(ctx, wrapped)
    for key, value in total.items():
        torch.testing.assert_close(sent[key] + left[key], value, rtol=1e-4, atol=1e-5, msg=lambda t, k=key: f"{k}: {t}")


class Again(nn.Module):
    """A block used plainly and, where the caller says so, once more before that under a reentrant checkpoint."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)
        self.block = nn.Sequential(*(nn.Linear(6, 6) for _ in range(blocks)))
        self.nested = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y = checkpoint(self.block, x, use_reentrant=True) if self.nested else x
        return self.block(torch.tanh(self.last(y)))


@check
def late_gradients_meet_an_update(ctx: Context) -> None:
    """A gradient that comes after its bucket has arrived, and before it is applied, is not taken for the bucket's."""
    rate = 1e-3
    wrapped = wrap(ctx, SOME, Again)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate)
    wrapped.attach(optimizer, max_grad_norm=None)
    before = {name: parameter.detach().clone() for name, parameter in wrapped.module.named_parameters()}
    total: dict[str, Any] = {}

    def everything_has_come(_: torch.Tensor) -> None:
        for sent in wrapped.reducer.runner.step.in_flight:
            if sent.work is not None:
                sent.work.wait()

    wrapped.module.first[2].weight.register_hook(everything_has_come)
    for step in range(6):
        wrapped.module.nested = step > 2
        for key, value in local_gradients(ctx, wrapped.module, step).items():
            total[key] = total.get(key, 0) + value
        backward(ctx, wrapped, step)
        optimizer.step()
        optimizer.zero_grad()
    left = owed(ctx, wrapped)
    for name, parameter in wrapped.module.named_parameters():
        found = (before[name] - parameter.detach()) / rate + left[name]
        # Updates within backward move the weights that later gradients are computed with.
        torch.testing.assert_close(found, total[name], rtol=0.02, atol=2e-3, msg=lambda t, n=name: f"{n}: {t}")


@check
def a_dead_rank_is_named(ctx: Context) -> None:
    """A rank that stops taking part ends the others with an error, not a hang."""
    wrapped = wrap(ctx, SOME)
    backward(ctx, wrapped, 0)
    if ctx.rank == ctx.size - 1:
        return
    raises(CommunicationError, lambda: backward(ctx, wrapped, 1), "was not reduced in step 2")


@check
def as_on_a_device(ctx: Context) -> None:
    """The path that never asks the device, run on the host: the same sums, faults named one step late."""
    from backbeat.runtime.compressed import topk

    topk.HOSTS = set()
    try:
        nothing_is_lost(ctx)
        momentum_correction(ctx)
        sixteen_bit_parameters(ctx)
        read_late(ctx)
        infinite_gradients_are_named(ctx)
        what_a_failed_step_sent_is_taken_back(ctx)
        unused_and_frozen(ctx)
        checkpoints(ctx)
        plans_change_and_residuals_stay(ctx)
    finally:
        topk.HOSTS = {"cpu"}
