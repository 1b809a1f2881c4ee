"""Checks of the reducer itself that need several ranks: order, overlap, equality with stock DDP, agreement."""

from __future__ import annotations

import copy
import gc
import json
import threading
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace
from rank_asserts import raises
from scenario_rig import Context, Oracle, both, mlp, registry, small_plan, start, train
from scenarios_graphs import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.model import Bucket, Plan, PlanPrediction
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.ddp import settings
from backbeat.runtime.reduce import failures

CHECKS, check = registry()


@check
def buckets_leave_during_backward(ctx: Context) -> str:
    """In plan order on every rank, and all but the last bucket before the last gradient is ready."""
    model = ctx.build(lambda: mlp(width=64, depth=6))
    wrapped = DistributedDataParallel(model, plan=small_plan(model, communicators=2))
    for step in range(4):
        wrapped.zero_grad()
        wrapped(ctx.data(32, 64, step=step, rank=ctx.rank)).square().sum().backward()
    timed = wrapped.reducer.recorder.steps()
    buckets = len(wrapped.reducer.buckets)
    assert len(timed) == 4
    for number, step in enumerate(timed):
        assert list(step.launched_s) == list(range(buckets)), f"step {number} left in order {list(step.launched_s)}"
    for number, step in enumerate(timed[1:], start=1):
        times = list(step.launched_s.values())
        assert times == sorted(times)
        early = [bucket for bucket in range(buckets) if times[bucket] < step.computed_s]
        assert early[: buckets - 1] == list(range(buckets - 1)), f"step {number}: only {early} left before the end"
    return json.dumps(timed[-1].launched_s)


@check
def profiler_shows_buckets(ctx: Context) -> str:
    """The same from a torch.profiler trace: a span for each bucket, among the backward's own nodes."""
    model = ctx.build(lambda: mlp(width=64, depth=6))
    wrapped = DistributedDataParallel(model, plan=small_plan(model))
    for step in range(3):
        wrapped(ctx.data(32, 64, step=step, rank=ctx.rank)).square().sum().backward()
    with torch.profiler.profile() as profiler:
        wrapped(ctx.data(32, 64, step=9, rank=ctx.rank)).square().sum().backward()
    on_host = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    events = sorted(on_host, key=lambda event: event.time_range.start)
    buckets = [event for event in events if event.name.startswith("backbeat::bucket ")]
    assert [int(event.name.split()[1]) for event in buckets] == list(range(len(wrapped.reducer.buckets)))
    nodes = [event for event in events if event.name.startswith("autograd::engine::evaluate_function")]
    last = max(event.time_range.start for event in nodes)
    during = [event for event in buckets if event.time_range.start < last]
    assert len(during) >= len(buckets) - 1, f"{len(during)} of {len(buckets)} buckets left during backward"
    return f"{len(during)} of {len(buckets)}"


@check
def bit_equal_to_stock(ctx: Context) -> None:
    """Same partition, same bits, on two ranks."""
    for options in ({}, {"bucket_cap_mb": 0.002}, {"find_unused_parameters": True, "bucket_cap_mb": 0.002}):
        model = ctx.build(lambda: mlp(width=20, depth=5))
        ours = DistributedDataParallel(copy.deepcopy(model), **options)
        theirs = TorchDDP(copy.deepcopy(model), **options)
        step_both = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, theirs)]
        for step in range(6):
            x = ctx.data(8, 20, step=step, rank=ctx.rank)
            for wrapped, optimizer in zip((ours, theirs), step_both, strict=True):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
            for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad), f"{options} step {step} {name}: not bit-equal"
                assert torch.equal(mine, other)
        said = [wrapped._get_ddp_logging_data() for wrapped in (ours, theirs)]
        mine_sizes, their_sizes = (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"] for data in said)
        assert mine_sizes == their_sizes, f"{options}: {mine_sizes} against {their_sizes}"


@check
def bit_equal_through_ddp_backend(ctx: Context) -> None:
    """The same plan on our reducer and through stock DDP's gives the same bits on two ranks."""
    model = ctx.build(lambda: mlp(width=20, depth=5))
    plan = small_plan(model, communicators=2, size=3)
    ours = DistributedDataParallel(copy.deepcopy(model), plan=plan)
    theirs = DistributedDataParallel(copy.deepcopy(model), plan=plan, reducer="ddp")
    copied = copy.deepcopy(theirs)
    if ctx.rank == 0:
        with torch.no_grad():
            copied(ctx.data(8, 20, step=0, rank=0))  # one rank alone evaluates a copy
    for step in range(5):
        x = ctx.data(8, 20, step=step, rank=ctx.rank)
        for wrapped in (ours, theirs, copied):
            wrapped.zero_grad()
            wrapped(x).square().mean().backward()
        for (name, mine), *others in zip(
            ours.named_parameters(), theirs.parameters(), copied.parameters(), strict=True
        ):
            for other in others:
                assert torch.equal(mine.grad, other.grad), f"step {step} {name}: not bit-equal"
    for wrapped in (theirs, copied):
        sizes = wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes")
        assert sizes == ours._get_ddp_logging_data()["bucket_sizes"], sizes


@check
def a_real_model_gives_the_same_losses(ctx: Context) -> None:
    """A small transformer, 100 steps with Adam, beside stock DDP: equal losses, bit for bit on two ranks."""
    torch.manual_seed(3)

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(17, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 17)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(x)))

    model = ctx.build(Language)
    # One bucket: the order of a sum over more than two ranks depends on where buckets end.
    ours = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=25)
    theirs = TorchDDP(copy.deepcopy(model), bucket_cap_mb=25)
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-3) for m in (ours, theirs)]
    losses: list[list[float]] = [[], []]
    for step in range(100):
        generator = torch.Generator().manual_seed(step * ctx.size + ctx.rank)
        start_at = torch.randint(0, 17, (4, 1), generator=generator)
        tokens = ((start_at + torch.arange(13) * 3) % 17).to(ctx.device)
        for which, (wrapped, optimizer) in enumerate(zip((ours, theirs), optimizers, strict=True)):
            optimizer.zero_grad()
            logits = wrapped(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses[which].append(loss.item())
    if ctx.size <= 2:
        assert losses[0] == losses[1], "losses differ"
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-3)
    assert losses[0][-1] < 0.5 * losses[0][0], f"it did not learn: {losses[0][0]} to {losses[0][-1]}"


@check
def late_gradients_are_sent_after(ctx: Context) -> None:
    """A parameter learned to be unused comes alive on one rank after its bucket has left."""
    wrapped, oracle = start(ctx, Branches, plan=Plan(
        strategy="t", model="t", communicators=1,
        buckets=(
            Bucket(gradients=("right.weight", "right.bias", "left.weight", "left.bias"), communicator=0),
            Bucket(gradients=("spare.weight", "spare.bias"), communicator=0),
            Bucket(gradients=("stem.weight", "stem.bias"), communicator=0),
        ),
    ))  # fmt: skip
    for step in range(8):
        use = lambda r, step=step: "lrs" if step == 6 and r == 0 else "rs"  # noqa: E731
        wrapped.zero_grad()
        oracle.each(lambda m, r: m.zero_grad())
        wrapped(ctx.data(3, 6, step=step, rank=ctx.rank), use=use(ctx.rank)).square().sum().backward()
        oracle.each(
            lambda m, r, step=step, use=use: m(ctx.data(3, 6, step=step, rank=r), use=use(r)).square().sum().backward()
        )
        oracle.reduce()
        oracle.check(wrapped, f"step {step}")
    assert wrapped.reducer.runner.late_buckets == 1, "nothing came late"


@check
def regular_graphs_come_and_go(ctx: Context) -> None:
    """Steps in which every rank uses every parameter, then one rank does not, or none, or all again."""
    wrapped, oracle = start(ctx, Branches)
    for step, (first, others) in enumerate([("lrs", "lrs")] * 3 + [("l", "lrs"), ("lr", "lr")] + [("lrs", "lrs")] * 3):

        def body(m: Any, r: int, step: int = step, first: str = first, others: str = others) -> None:
            m.zero_grad()
            m(ctx.data(3, 6, step=step, rank=r), use=others if r else first).square().sum().backward()

        both(ctx, wrapped, oracle, body, f"step {step}")


@check
def different_plans_are_refused(ctx: Context) -> None:
    model = ctx.build(mlp)
    plan = small_plan(model, size=2 if ctx.rank == 0 else 3)
    message = raises(InputError, lambda: DistributedDataParallel(model, plan=plan))
    assert "the plan differs between ranks: line 2 is 'communicator 0: 6.bias" in message, message
    assert "on rank 0" in message, message
    assert "Every rank must" in message, message


@check
def different_models_are_refused(ctx: Context) -> None:
    model = ctx.build(lambda: mlp(depth=3 if ctx.rank == 0 else 4))
    raises((InputError, RuntimeError), lambda: DistributedDataParallel(model))


@check
def attributes_frameworks_read(ctx: Context) -> None:
    """Every attribute that stock DDP's constructor sets is set here too, and means the same."""
    model = ctx.build(mlp)
    ours, theirs = DistributedDataParallel(copy.deepcopy(model)), TorchDDP(copy.deepcopy(model))
    assert set(vars(ours)) == set(vars(theirs))
    for name in (
        "device_ids", "output_device", "dim", "device", "device_type", "broadcast_buffers", "find_unused_parameters",
        "require_backward_grad_sync", "require_forward_param_sync", "static_graph", "mixed_precision",
        "bucket_bytes_cap", "broadcast_bucket_size", "parameters_to_ignore", "is_multi_device_module",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert isinstance(ours, TorchDDP)
    assert ours.module is not model
    assert list(ours.state_dict()) == list(theirs.state_dict())


@check
def report_and_counters(ctx: Context) -> None:
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=3)
    report = wrapped.report()
    assert report.buckets
    assert report.strategy == "test"
    assert report.predicted_iteration_s is None
    assert report.iteration_s is not None
    assert report.iteration_s > 0
    heading, *rows = str(report).splitlines()[3:]
    assert heading.startswith("bucket  communicator")
    assert len(rows) == len(report.buckets)
    assert all(row.index(" / ") == heading.index(" / ") for row in rows)


@check
def a_plan_for_other_ranks_says_so_and_keeps_its_predictions(ctx: Context) -> None:
    plan = small_plan(mlp())
    launch, done = (tuple(i + more for i in range(len(plan.buckets))) for more in (1.0, 1.5))
    predicted = PlanPrediction(network="lan", iteration_s=20.0, exposed_s=2.0, launch_s=launch, done_s=done)
    for made_for, told in ((64, ctx.rank == 0), (ctx.size, False), (None, False)):
        model = ctx.build(mlp)
        oracle = Oracle(ctx, model)
        with mock.patch.object(settings.logger, "warning") as warned:
            wrapped = DistributedDataParallel(model, plan=replace(plan, workers=made_for, predicted=predicted))
        assert warned.called == told
        if told:
            said = warned.call_args.args[0] % warned.call_args.args[1:]
            assert f"made for 64 ranks, this job has {ctx.size}" in said
            assert f"backbeat plan … --gpus {ctx.size}`" in said
        train(ctx, model, wrapped, oracle, steps=3)
        report = wrapped.report()
        assert report.predicted_iteration_s == 20.0
        assert report.predicted_exposed_s == 2.0
        assert [one.predicted_launch_s for one in report.buckets] == list(launch)
        assert [one.predicted_done_s for one in report.buckets] == list(done)
        assert all(one.launched_s is not None for one in report.buckets)
        assert bool(report.notes) == (made_for == 64), report.notes
        assert ("for 64 ranks" in str(report)) == (made_for == 64)


@check
def memory_is_the_gradients(ctx: Context) -> None:
    """Between steps the gradients are the buffers: no second copy is kept."""
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in wrapped.parameters()}
    assert storages == {bucket.flat.untyped_storage().data_ptr() for bucket in wrapped.reducer.buckets}


@check
def a_dropped_wrapper_is_silent(ctx: Context) -> None:
    """Its model may be wrapped again at once, and trained without any wrapper."""
    model = ctx.build(mlp)
    first = DistributedDataParallel(model)
    message = raises(InputError, lambda: DistributedDataParallel(model))
    assert "already belongs to another" in message, message
    first(ctx.data(3, 6, step=0, rank=ctx.rank)).square().sum().backward()
    del first
    model.zero_grad()
    model(ctx.data(3, 6, step=1, rank=ctx.rank)).square().sum().backward()
    alone = Oracle(ctx, ctx.build(mlp))
    alone.each(lambda m, r: m(ctx.data(3, 6, step=1, rank=r)).square().sum().backward())
    alone.check(model, "without a wrapper")
    second = DistributedDataParallel(model)
    oracle = Oracle(ctx, model)
    train(ctx, model, second, oracle, steps=3)


@check
def autograd_grad_sends_nothing(ctx: Context) -> None:
    """`torch.autograd.grad` through the outputs leaves no gradients, and no rank communicates."""
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=2)
    before = wrapped.reducer.steps
    if ctx.rank == 0:
        x = ctx.data(3, 6, step=1, rank=0).requires_grad_()
        torch.autograd.grad(wrapped(x).sum(), x)
        torch.autograd.grad(wrapped(x).sum(), list(wrapped.parameters()))
        torch.autograd.grad(wrapped(x).sum(), next(wrapped.parameters()))
    assert wrapped.reducer.steps == before
    train(ctx, wrapped.module, wrapped, oracle, steps=2)


@check
def nothing_grows(ctx: Context) -> None:
    """Objects and memory after many steps are those after few."""
    wrapped, oracle = start(ctx)
    train(ctx, wrapped.module, wrapped, oracle, steps=10)
    x = ctx.data(3, 6, step=0, rank=ctx.rank)

    def run(steps: int) -> int:
        for _ in range(steps):
            wrapped.zero_grad()
            wrapped(x).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    run(50)
    before = run(50)
    assert abs(run(300) - before) < 50, "objects pile up"


@check
def nobody_listens_when_the_process_ends(ctx: Context) -> None:
    """A thread in a call of the store would abort the interpreter's end."""
    wrapped = DistributedDataParallel(ctx.build(mlp))
    failures.end_monitors()
    assert not any(thread.name == "backbeat-monitor" for thread in threading.enumerate())
    wrapped(ctx.data(3, 6, step=0, rank=ctx.rank)).sum().backward()
