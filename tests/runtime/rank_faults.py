"""Ranks that die, hang, or run other backwards than the rest: who is named, and that no wrong sum is used."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_asserts import raises
from scenario_rig import Context, Oracle, Scenario, mlp, registry, small_plan, start, train
from scenarios_graphs import Branches, Breakable, Twice
from torch import nn

from backbeat.comm.communicators import Communicator, Communicators
from backbeat.errors import BrokenStepError
from backbeat.runtime import CommunicationError, DistributedDataParallel, StepMismatchError
from backbeat.runtime.reduce import lost_collectives

CHECKS, check = registry()


class Stops(torch.autograd.Function):
    """Calls something in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None] | None) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.call is not None:
            ctx.call()
        return gradient, None


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.call: Callable[[], None] | None = None
        self.at = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = Stops.apply(layer(x), self.call if index == self.at else None)
        return x


def _step(ctx: Context, wrapped: Any, step: int) -> None:
    wrapped.zero_grad()
    wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).square().sum().backward()


def _dies(ctx: Context, moment: str) -> str:
    wrapped, oracle = start(ctx, Interrupted)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    if ctx.rank == ctx.size - 1:
        if moment == "forward":
            os._exit(1)
        if moment == "after":
            _step(ctx, wrapped, 5)
            os._exit(1)
        wrapped.module.at = {"early": 3, "middle": 1, "late": 0}[moment]
        wrapped.module.call = lambda: os._exit(1)
    if moment == "after":
        # A rank may still be told of the end in the very step the dying one completed.
        message = raises(CommunicationError, lambda: [_step(ctx, wrapped, step) for step in (5, 6)])
    else:
        message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
    assert "bucket " in message, message
    assert "layers." in message, message
    # On more than two ranks another one may have given up before, and be gone as well.
    assert re.search(rf"ranks? [\d, ]*\b{ctx.size - 1} do(es)? not answer", message), message
    return message


for _moment in ("forward", "early", "middle", "late", "after"):
    CHECKS[f"rank_dies_{_moment}"] = Scenario(lambda ctx, moment=_moment: _dies(ctx, moment), _moment)


@check
def rank_hangs(ctx: Context) -> str:
    """The last rank stops in mid-backward until the others have given up."""
    wrapped, oracle = start(ctx, Interrupted)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    store = dist.distributed_c10d._get_default_store()
    others = [f"gave-up-{rank}" for rank in range(ctx.size - 1)]
    if ctx.rank == ctx.size - 1:
        wrapped.module.call = lambda: store.wait(others, timedelta(seconds=60))
        raises((CommunicationError, RuntimeError), lambda: _step(ctx, wrapped, 5))
        return "hung"
    message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
    store.set(f"gave-up-{ctx.rank}", "1")
    assert f"rank {ctx.size - 1} is in step 4 with " in message, message
    assert "waiting for " in message, message
    assert "layers." in message, message
    assert "bucket " in message, message
    return message


@check
def rank_lost_in_silence(ctx: Context) -> str:
    """As on NCCL, where waiting does not raise: the monitor's thread reads that a bucket was lost, and says so."""
    given_up = threading.Event()
    sent: list[Any] = []
    lost: list[Any] = []
    all_reduce = Communicator.all_reduce

    def noted(communicator: Communicator, message: torch.Tensor) -> Any:
        sent.append(all_reduce(communicator, message))
        return sent[-1]

    def judged(work: Any) -> str:
        return "COMM_ERROR" if work in lost else lost_collectives.DONE

    with (
        mock.patch.object(Communicators, "wait_raises", False),
        mock.patch.object(Communicator, "all_reduce", noted),
        mock.patch.object(lost_collectives, "abort", side_effect=lambda backends, in_one_call: given_up.set()),
        mock.patch.object(lost_collectives, "work_result", judged),
        redirect_stderr(io.StringIO()) as said,
    ):
        wrapped, oracle = start(ctx, Interrupted)
        train(ctx, wrapped.module, wrapped, oracle, steps=3)
        if ctx.rank == ctx.size - 1:
            os._exit(1)
        assert not given_up.is_set()
        # The second of the last step's four buckets.
        lost.append(sent[-3])
        assert given_up.wait(30), "nobody noticed"
    message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
    assert f"backbeat: {message}" in said.getvalue(), said.getvalue()
    assert f"rank {ctx.rank}: bucket 1 of 4 (gradients layers.2.bias … layers.2.weight (2)" in message, message
    assert "was not reduced in step 3" in message, message
    assert f"rank {ctx.size - 1} does not answer" in message, message
    return message


@check
def rank_counts_one_backward_more(ctx: Context) -> str:
    """One rank has counted one backward more than the others: nobody gets a sum of different steps."""
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    last = ctx.rank == ctx.size - 1
    if last:
        # A rank that leaves out a backward does not get here: `rank_skips_a_backward` below.
        wrapped.reducer.runner.step.number += 1
    message = raises(StepMismatchError, lambda: _step(ctx, wrapped, 5))
    others = "rank 0 is 1 behind" if ctx.size == 2 else "is 1 behind"
    assert (others if last else f"rank {ctx.size - 1} is 1 ahead") in message, message
    assert all(parameter.grad is None for parameter in wrapped.parameters()), "a mixed sum was handed out"
    return message


@check
def rank_skips_a_backward(ctx: Context) -> str:
    """The last rank really leaves out one backward, as after a loss that it did not like, and goes on to its end.

    Its later backwards meet the others' earlier ones: nothing on the wire tells such a skip from a slow rank. What must
    not be is a hang: the others' last backward finds nobody, and says where that rank is.
    """
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    store = dist.distributed_c10d._get_default_store()
    last = ctx.rank == ctx.size - 1
    for step in range(3, 6):
        if last and step == 4:
            wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).square().sum()
            continue
        if step < 5 or last:
            _step(ctx, wrapped, step)
    if last:
        store.wait([f"gave-up-{rank}" for rank in range(ctx.size - 1)], timedelta(seconds=60))
        return "done"
    message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
    store.set(f"gave-up-{ctx.rank}", "1")
    assert "was not reduced in step 6" in message, message
    assert "bucket 0 of 4 (gradients 6.bias … 6.weight (2)" in message, message
    assert f"rank {ctx.size - 1} is at step 5, outside backward" in message, message
    return message


@check
def rank_runs_two_models_in_another_order(ctx: Context) -> str:
    """Two wrapped models whose backwards the last rank runs the other way round: each names the other's backward."""
    first = DistributedDataParallel(ctx.build(lambda: nn.Linear(6, 6)))
    second = DistributedDataParallel(ctx.build(lambda: Second(6, 6)))
    for step in range(2):
        _step(ctx, first, step)
        _step(ctx, second, step)
    last = ctx.rank == ctx.size - 1
    message = raises(CommunicationError, lambda: _step(ctx, second if last else first, 5))
    other, model = (0, "Linear") if last else (ctx.size - 1, "Second")
    assert f"rank {other} is in the backward of another wrapped model ({model})" in message, message
    assert "in the same order on every rank" in message, message
    assert "does not answer" not in message, message
    return message


class First(nn.Linear):
    pass


class Second(nn.Linear):
    pass


class Third(nn.Linear):
    pass


def _forwards_in_order(ctx: Context, order: Sequence[int]) -> str:
    """Three wrapped models and one backward of all; the last rank runs their forwards in this order. Each rank waits in
    the model whose forward came last of those that are not through, and the others say in which."""
    kinds = (First, Second, Third)
    wrapped = [DistributedDataParallel(ctx.build(lambda kind=kind: kind(6, 6))) for kind in kinds]

    def step(order: Sequence[int]) -> None:
        sum(wrapped[index](ctx.data(3, 6, step=0, rank=ctx.rank)).square().sum() for index in order).backward()

    for _ in range(2):
        step(range(3))
    at = max(at for at in range(3) if order[at] != at)
    last = ctx.rank == ctx.size - 1
    message = raises(CommunicationError, lambda: step(order if last else range(3)))
    other, waits_in = (0, at) if last else (ctx.size - 1, order[at])
    assert f"rank {other} is in the backward of another wrapped model ({kinds[waits_in].__name__})" in message, message
    assert "in the same order on every rank" in message, message
    assert "does not answer" not in message, message
    return message


for _order in ((2, 1, 0), (1, 2, 0), (1, 0, 2)):
    CHECKS[f"rank_forwards_in_order_{''.join(map(str, _order))}"] = Scenario(
        lambda ctx, order=_order: _forwards_in_order(ctx, order), "one backward of several models"
    )


@check
def rank_thaws_alone(ctx: Context) -> str:
    """Parameters that become trainable on the last rank only: told on both sides, and no process ends."""
    model = ctx.build(mlp)
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model, plan=small_plan(model))
    _step(ctx, wrapped, 0)
    alone = ctx.rank == ctx.size - 1
    model[0].requires_grad_(alone)
    return raises(CommunicationError, lambda: _step(ctx, wrapped, 1), "became trainable" if alone else "not reduced")


@check
def rank_leaves_early(ctx: Context) -> str:
    """The last rank ends its loop one step before the others."""
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    store = dist.distributed_c10d._get_default_store()
    if ctx.rank == ctx.size - 1:
        store.wait([f"gave-up-{rank}" for rank in range(ctx.size - 1)], timedelta(seconds=60))
        return "left"
    message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
    store.set(f"gave-up-{ctx.rank}", "1")
    assert f"rank {ctx.size - 1} is at step 3, outside backward" in message, message
    return message


@check
def rank_never_starts(ctx: Context) -> str:
    """The last rank does not build the wrapper: construction gives up within the timeout."""
    store = dist.distributed_c10d._get_default_store()
    if ctx.rank == ctx.size - 1:
        store.wait([f"gave-up-{rank}" for rank in range(ctx.size - 1)], timedelta(seconds=60))
        return "left"
    model = ctx.build(mlp)
    message = raises(Exception, lambda: DistributedDataParallel(model))
    store.set(f"gave-up-{ctx.rank}", "1")
    return message


def _read_late(ctx: Context, factory: Callable[[], nn.Module]) -> tuple[Any, Oracle]:
    """A wrapper after regular steps, whose word is read one step late."""
    wrapped, oracle = start(ctx, factory)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    assert wrapped.reducer.runner.status.defers(), "the status is not read late here"
    return wrapped, oracle


def _all_nan(wrapped: Any) -> bool:
    return all(bool(parameter.grad.isnan().all()) for parameter in wrapped.parameters())


@check
def late_status_of_a_skipped_step(ctx: Context) -> str:
    """The last rank is a step ahead: every element of every gradient is NaN, and the next backward says why."""
    wrapped, _ = _read_late(ctx, mlp)
    last = ctx.rank == ctx.size - 1
    if last:
        wrapped.reducer.runner.step.number += 1
    _step(ctx, wrapped, 5)
    assert _all_nan(wrapped), "a sum of different steps was handed out"
    message = raises(StepMismatchError, lambda: _step(ctx, wrapped, 6))
    assert f"rank {ctx.size - 1} is 1 ahead" in message or last, message
    assert message.startswith(f"rank {ctx.rank} is in its backward number {5 if last else 4}"), message
    return message


@check
def late_status_of_a_broken_step(ctx: Context) -> None:
    """Rank 0's backward raises: NaN for the others, then an error on each, then good steps."""
    wrapped, oracle = _read_late(ctx, Breakable)
    if ctx.rank == 0:
        wrapped.module.fail_at = 1
        raises(FloatingPointError, lambda: _step(ctx, wrapped, 5))
        wrapped.module.fail_at = None
        message = raises(BrokenStepError, lambda: _step(ctx, wrapped, 6))
        assert ", ".join(str(rank) for rank in range(1, ctx.size)) in message, message
    else:
        _step(ctx, wrapped, 5)
        assert _all_nan(wrapped), "a sum without rank 0's part was handed out"
        message = raises(BrokenStepError, lambda: _step(ctx, wrapped, 6))
        assert "rank 0 broke off its backward in step 4" in message, message
    train(ctx, wrapped.module, wrapped, oracle, steps=4)


@check
def late_status_of_unused_parameters(ctx: Context) -> None:
    """One rank stops using some parameters, later some come back: sums are right in that very step."""
    wrapped, oracle = start(ctx, Branches)
    patterns = ["lrs"] * 4 + ["l" if ctx.size > 1 else "lrs"] + ["lrs"] * 3 + ["lr"] * 7 + ["lrs"] * 2
    late = 0
    for step, pattern in enumerate(patterns):
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())

        def body(m: Any, r: int, step: int = step, pattern: str = pattern) -> None:
            use = pattern if r == 0 else "lrs"
            m(ctx.data(3, 6, step=step, rank=r), use=use).square().sum().backward()

        late += wrapped.reducer.runner.status.defers()
        body(wrapped, ctx.rank)
        oracle.each(body)
        oracle.reduce()
        oracle.check(wrapped, f"step {step}")
    assert late >= 3, "the status was not read late"


@check
def late_status_of_late_gradients(ctx: Context) -> None:
    """On rank 0 alone a gradient comes after its bucket has left: it raises, the others get NaN and raise after."""
    wrapped, oracle = _read_late(ctx, Twice)
    wrapped.module.nested = ctx.rank == 0
    if ctx.rank == 0:
        message = raises(CommunicationError, lambda: _step(ctx, wrapped, 5))
        raises(BrokenStepError, lambda: _step(ctx, wrapped, 6))
    else:
        _step(ctx, wrapped, 5)
        assert _all_nan(wrapped), "a sum without what came late was handed out"
        message = raises(CommunicationError, lambda: _step(ctx, wrapped, 6))
    assert "came after its bucket had left in step 4" in message, message
    wrapped.module.nested = False
    train(ctx, wrapped.module, wrapped, oracle, steps=2)


@check
def late_status_leaves_good_sums_alone(ctx: Context) -> None:
    """The guard changes no bit: beside a wrapper that waits, in every dtype, with and without a reduce dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for reduce_dtype in (None, "bf16"):
            waiting, guarded = (
                DistributedDataParallel(model, plan=small_plan(model), strict=strict, reduce_dtype=reduce_dtype)
                for strict in (True, False)
                for model in [ctx.build(lambda dtype=dtype: mlp().to(dtype))]
            )
            for step in range(5):
                for wrapped in (waiting, guarded):
                    wrapped.zero_grad()
                    wrapped(ctx.data(3, 6, step=step, rank=ctx.rank).to(dtype)).square().sum().backward()
                for mine, other in zip(waiting.parameters(), guarded.parameters(), strict=True):
                    assert torch.equal(mine.grad, other.grad), f"{dtype}, reduce_dtype {reduce_dtype}, step {step}"
            assert guarded.reducer.runner.status.defers()
            assert not waiting.reducer.runner.status.defers()
