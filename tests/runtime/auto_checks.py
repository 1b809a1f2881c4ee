"""`plan="auto"` and strategies by name: what is measured while training runs, and what follows from it."""

from __future__ import annotations

from typing import Any

from scenario_rig import Context, Oracle, mlp, registry, train

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
    name="slow", workers=2, all_reduce=CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-9), backend="gloo"
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
    wrapped = _trains_while_tuning(ctx, "auto", 40)
    assert wrapped.report().history
    assert wrapped.reducer.tuner._network.workers == ctx.size
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
            before = before or wrapped.reducer.tuner._base
            wrapped.reducer.tuner._base_s = 1e-9
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
                tuner._base_s = 2.0
            if tuner.state == "comparing":
                assert wrapped.reducer.partition.buckets == tuner._base.buckets
                tuner.iteration_s = plan_s
            if tuner.state in ("watching", "settled"):
                break
        assert "comparing" in seen, tuner.history
        assert tuner.state == ("watching" if kept else "settled"), tuner.history
        expected = tuner._tried[0] if kept else tuner._base
        assert wrapped.reducer.partition.buckets == expected.buckets
        assert ("the plan runs" if kept else "staying with DDP's buckets") in tuner.history[-1]
        assert (wrapped.report().strategy != "ddp") == kept


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
    tuner.exposed_s = 10.0
    oracle = Oracle(ctx, wrapped.module)
    train(ctx, wrapped.module, wrapped, oracle, steps=4, lr=0.01)
    assert tuner.state == "measuring", tuner.state
    assert "exposed time moved" in tuner.history[-1]
