"""`plan="auto"` and strategies by name: what is measured while training runs, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from scenario_rig import Context, Oracle, mlp, registry, train
from torch import nn
from torch.distributed.algorithms.join import Join

from backbeat.model import CollectiveTimes, Network
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.ddp import tuner as tuner_module
from backbeat.runtime.reduce.timing import TimedStep

CHECKS, check = registry()


def _trains_while_tuning(ctx: Context, plan: str, steps: int, **options: Any) -> DistributedDataParallel:
    model = ctx.build(lambda: mlp(depth=6))
    oracle = Oracle(ctx, model)
    wrapped = DistributedDataParallel(model, plan=plan, bucket_cap_mb=0.0004, **options)
    train(ctx, model, wrapped, oracle, steps=steps, lr=0.01)
    return wrapped


NETWORK = Network(
    name="slow", workers=2, all_reduce=CollectiveTimes(alpha_s=50e-3, beta_s_per_byte=1e-9), backend="gloo"
)


@check
def auto_measures_plans_and_switches(ctx: Context) -> str:
    wrapped = _trains_while_tuning(ctx, "auto", 40, network=NETWORK)
    report = wrapped.report()
    assert report.state == "settled", report.state
    assert report.history, "nothing happened"
    if "the plan runs" in report.history[-1]:
        assert report.strategy != "ddp"
        assert report.predicted_iteration_s is not None
    return str(report)


def _timed_as(wrapped: DistributedDataParallel, **seconds: tuple[float, float]) -> None:
    """Steps seem to take so long while the tuner is in each state: an iteration, and what is exposed of it."""
    tuner, recorder = wrapped.reducer.tuner, wrapped.reducer.recorder
    steps = recorder.steps

    def told() -> list[TimedStep]:
        iteration_s, exposed_s = seconds.get(tuner.state.value, (None, None))
        if iteration_s is None or exposed_s is None:
            return steps()
        return [replace(one, iteration_s=iteration_s, ended_s=one.computed_s + exposed_s) for one in steps()]

    recorder.steps = told


def _until(ctx: Context, wrapped: DistributedDataParallel, states: set[str], most: int = 60) -> dict[str, Any]:
    """Train until the tuner is in one of these states; returns the report and the buckets of the last step in each."""
    oracle = Oracle(ctx, wrapped.module)
    seen: dict[str, Any] = {}
    for _ in range(most):
        train(ctx, wrapped.module, wrapped, oracle, steps=1, lr=0.01)
        state = wrapped.report().state
        seen[state] = (wrapped.report(), wrapped.reducer.partition.buckets)
        if state in states:
            return seen
    raise AssertionError(f"{wrapped.report().history}")


@check
def auto_calibrates_beneath_training(ctx: Context) -> str:
    """Not before that is 1 % of training: with steps of 0.53 s, and 0.2 s of calibration, after 38 of them."""
    model = ctx.build(lambda: mlp(depth=6))
    networks = []

    def measured(**options: Any) -> Network:
        networks.append(tuner_calibrate(**options))
        return networks[-1]

    tuner_calibrate = tuner_module.calibrate
    with (
        mock.patch.object(tuner_module, "FIRST_STEPS", 0),
        mock.patch.object(tuner_module, "CALIBRATE_S", (0.2, 0.2)),
        mock.patch.object(tuner_module, "CONNECT_S", 0.0),
        mock.patch.object(tuner_module, "calibrate", measured),
    ):
        wrapped = DistributedDataParallel(model, plan="auto", bucket_cap_mb=0.0004)
        _timed_as(wrapped, measuring=(0.53, 0.01), waiting=(0.53, 0.01))
        _until(ctx, wrapped, {"waiting"})
        assert "planning in 25 steps" in wrapped.report().history[-1]
        assert not networks
        train(ctx, model, wrapped, Oracle(ctx, model), steps=7, lr=0.01)
        assert not wrapped.reducer.recorder.steps(), "steps are timed long before anything is decided by them"
        _until(ctx, wrapped, {"trying", "settled"})
    assert wrapped.reducer.steps == 38
    assert [network.workers for network in networks] == [ctx.size]
    return str(wrapped.report())


@check
def auto_goes_back_if_worse(ctx: Context) -> None:
    """The plan seems slow on every rank: DDP's buckets return, and the report says so."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped = DistributedDataParallel(model, plan="auto", network=NETWORK, bucket_cap_mb=0.0004)
    _timed_as(wrapped, measuring=(0.25, 0.01), trying=(1.0, 0.01))
    seen = _until(ctx, wrapped, {"settled"})
    (_, before), (report, after) = seen["measuring"], seen["settled"]
    assert seen["trying"][1] != before, "no plan was tried"
    assert after == before
    assert "going back to DDP's buckets" in report.history[-1]
    assert report.iteration_s == 0.25
    assert report.exposed_s is not None
    assert report.predicted_iteration_s is not None
    assert report.predicted_exposed_s is not None
    for bucket in report.buckets:
        assert bucket.launched_s is not None, bucket
        assert bucket.predicted_launch_s is not None, bucket
        assert bucket.predicted_done_s is not None, bucket


@check
def auto_keeps_a_plan_that_is_no_slower(ctx: Context) -> None:
    """By figures of its own, not of DDP's buckets before it."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped = DistributedDataParallel(model, plan="auto", network=NETWORK, bucket_cap_mb=0.0004)
    _timed_as(wrapped, measuring=(2.0, 0.01), trying=(2.0, 0.02))
    seen = _until(ctx, wrapped, {"settled"})
    (_, before), (_, tried), (report, after) = (seen[one] for one in ("measuring", "trying", "settled"))
    assert tried == after != before
    assert "the plan runs: 2000.00 ms an iteration, DDP's buckets took 2000.00 ms" in report.history[-1]
    assert report.strategy != "ddp"
    assert report.iteration_s == 2.0
    assert report.exposed_s == 0.02
    assert report.predicted_iteration_s is not None
    for bucket in report.buckets:
        assert bucket.launched_s is not None, bucket
        assert bucket.predicted_launch_s is not None, bucket


class LastFirst(nn.Module):
    """Holds its layers in another order than gradients become ready in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


@check
def a_report_is_of_the_buckets_that_run(ctx: Context) -> None:
    """Not of those that ran until the ready order was known, or until a parameter became trainable."""
    model: Any = ctx.build(LastFirst)
    model.first.bias.requires_grad_(False)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for thawed, steps, timed in ((False, 1, 0), (False, 2, 2), (True, 1, 1)):
        model.first.bias.requires_grad_(thawed)
        train(ctx, model, wrapped, Oracle(ctx, model), steps=steps, lr=0.01)
        assert len(wrapped.reducer.recorder.steps()) == timed
        assert (wrapped.report().buckets[0].launched_s is None) == (timed == 0)


@check
def a_strategy_by_name(ctx: Context) -> None:
    wrapped = _trains_while_tuning(ctx, "single", 32, network=NETWORK)
    assert wrapped.report().strategy == "single"
    assert len(wrapped.reducer.buckets) == 1
    wrapped = _trains_while_tuning(ctx, "wfbp", 32, network=NETWORK)
    assert len(wrapped.reducer.buckets) == len(list(wrapped.parameters()))


@check
def ranks_without_data_put_planning_off(ctx: Context) -> None:
    """They take part (`join`) and time nothing: nobody plans from nothing, and nobody waits for them."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped = DistributedDataParallel(model, plan="single", network=NETWORK, bucket_cap_mb=0.0004)
    with Join([wrapped]):
        for step in range(3 if ctx.rank else 30):
            wrapped.zero_grad()
            wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum().backward()
    if ctx.size > 1:
        assert wrapped.report().history == ("waiting for steps in which every rank has data",), wrapped.report().history


@check
def a_plan_is_not_judged_by_ranks_without_data(ctx: Context) -> None:
    """They run out while the plan is timed: it is neither kept nor dropped by means of which some are of nothing."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped = DistributedDataParallel(model, plan="auto", network=NETWORK, bucket_cap_mb=0.0004)
    with Join([wrapped]):
        for step in range(16 if ctx.rank else 60):
            wrapped.zero_grad()
            wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum().backward()
    if ctx.size > 1:
        report = wrapped.report()
        assert report.state == "trying", report.history
        assert "switching to" in report.history[-2], report.history
        assert report.history[-1] == "waiting for steps in which every rank has data", report.history


@check
def backwards_that_begin_under_no_sync_are_timed(ctx: Context) -> None:
    """The forward under `no_sync` comes later, so that backward reaches its output first."""
    model = ctx.build(lambda: mlp(depth=6))
    wrapped = DistributedDataParallel(model, plan="single", network=NETWORK, bucket_cap_mb=0.0004)
    for step in range(32):
        wrapped.zero_grad()
        loss = wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum()
        with wrapped.no_sync():
            loss = loss + wrapped(ctx.data(3, 6, step=step, rank=ctx.rank)).sum()
        loss.backward()
    if ctx.size > 1:
        assert wrapped.report().strategy == "single", wrapped.report().history
