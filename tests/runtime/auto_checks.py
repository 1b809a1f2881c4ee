"""`plan="auto"` and strategies by name: what is measured while training runs, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from scenario_rig import Context, Oracle, mlp, registry, train
from torch import nn

from backbeat.model import CollectiveTimes, Network
from backbeat.runtime import DistributedDataParallel

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
    assert report.state in ("watching", "settled"), report.state
    assert report.history, "nothing happened"
    if report.state == "watching":
        assert report.strategy != "ddp"
        assert report.predicted_iteration_s is not None
    return str(report)


@check
def auto_calibrates_beneath_training(ctx: Context) -> str:
    """Not before that is 1 % of training: after thousands of steps as short as these. It is made to be due here."""
    model = ctx.build(lambda: mlp(depth=6))
    oracle = Oracle(ctx, model)
    wrapped = DistributedDataParallel(model, plan="auto", bucket_cap_mb=0.0004)
    tuner = wrapped.reducer.tuner
    tuner._too_early = lambda iteration_s: 25
    train(ctx, model, wrapped, oracle, steps=20, lr=0.01)
    assert tuner.state == "waiting", tuner.history
    assert tuner._network is None
    assert "planning in 25 steps" in tuner.history[-1]
    assert not wrapped.reducer.recorder.steps(), "steps are timed long before anything is decided by them"
    train(ctx, model, wrapped, oracle, steps=40, lr=0.01)
    assert tuner._network.workers == ctx.size
    assert tuner.state != "waiting"
    return str(wrapped.report())


@check
def auto_goes_back_if_worse(ctx: Context) -> None:
    """The plan is made to look slow on every rank: DDP's buckets return, and the report says so."""
    model = ctx.build(lambda: mlp(depth=6))
    oracle = Oracle(ctx, model)
    wrapped = DistributedDataParallel(model, plan="auto", network=NETWORK, bucket_cap_mb=0.0004)
    before = None
    for _ in range(60):
        train(ctx, model, wrapped, oracle, steps=1, lr=0.01)
        if wrapped.reducer.tuner.state == "trying":
            before = before or wrapped.reducer.tuner._base.partition
            wrapped.reducer.tuner._base = replace(wrapped.reducer.tuner._base, iteration_s=1e-9)
        if wrapped.reducer.tuner.state == "settled":
            break
    assert before is not None, wrapped.reducer.tuner.history
    assert wrapped.reducer.partition.buckets == before.buckets
    report = wrapped.report()
    assert "going back to DDP's buckets" in report.history[-1]
    assert report.iteration_s == 1e-9
    assert report.exposed_s is not None
    assert report.predicted_iteration_s is not None
    assert report.predicted_exposed_s is not None
    for bucket in report.buckets:
        assert bucket.launched_s is not None, bucket
        assert bucket.predicted_launch_s is not None, bucket
        assert bucket.predicted_done_s is not None, bucket


@check
def auto_compares_with_ddp_before_and_after(ctx: Context) -> None:
    """What gains only over the job's first steps is not kept; what gains over later ones is."""
    for plan_s, kept in ((1.0, False), (1e-9, True)):
        model = ctx.build(lambda: mlp(depth=6))
        oracle = Oracle(ctx, model)
        wrapped = DistributedDataParallel(model, plan="auto", network=NETWORK, bucket_cap_mb=0.0004)
        tuner, seen = wrapped.reducer.tuner, set()
        for _ in range(60):
            train(ctx, model, wrapped, oracle, steps=1, lr=0.01)
            seen.add(tuner.state)
            if tuner.state == "trying":
                tuner._base = replace(tuner._base, iteration_s=2.0)
            if tuner.state == "comparing":
                assert wrapped.reducer.partition.buckets == tuner._base.partition.buckets
                tuner._tried = replace(tuner._tried, iteration_s=plan_s)
                _reports_ddp_alone(wrapped)
            if tuner.state in ("watching", "settled"):
                break
        assert "comparing" in seen, tuner.history
        assert tuner.state == ("watching" if kept else "settled"), tuner.history
        expected = tuner._tried if kept else tuner._base
        assert wrapped.reducer.partition.buckets == expected.partition.buckets
        assert wrapped.report().predicted_iteration_s == expected.plan.predicted.iteration_s
        assert ("the plan runs" if kept else "staying with DDP's buckets") in tuner.history[-1]
        assert (wrapped.report().strategy != "ddp") == kept


def _reports_ddp_alone(wrapped: DistributedDataParallel) -> None:
    """The plan was measured meanwhile, and none of its figures is told as DDP's."""
    report, base = wrapped.report(), wrapped.reducer.tuner._base
    assert report.strategy == "ddp"
    assert report.iteration_s == base.iteration_s == 2.0
    assert report.predicted_iteration_s == base.plan.predicted.iteration_s
    for bucket in report.buckets:
        assert bucket.launched_s is not None, bucket


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
def auto_follows_drift(ctx: Context) -> None:
    """Exposed time that moves far from what it was makes the tuner measure again."""
    wrapped = _trains_while_tuning(ctx, "auto", 30, network=NETWORK)
    tuner = wrapped.reducer.tuner
    tuner._begin("watching", 3)
    tuner.running = replace(tuner.running, exposed_s=10.0)
    oracle = Oracle(ctx, wrapped.module)
    train(ctx, wrapped.module, wrapped, oracle, steps=4, lr=0.01)
    assert tuner.state == "measuring", tuner.state
    assert "exposed time moved" in tuner.history[-1]
