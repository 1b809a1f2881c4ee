"""Checks of the reducer itself that need several ranks: order, overlap, equality with stock DDP, faults."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from rank_asserts import raises
from scenario_rig import Context, Oracle, Scenario, both, mlp, small_plan, start, train
from scenarios_graphs import Branches, Breakable, Twice
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.comm.communicators import Communicator, Communicators
from backbeat.errors import InputError
from backbeat.model import Bucket, CollectiveTimes, Network, Plan, PlanPrediction
from backbeat.runtime import CommunicationError, DistributedDataParallel, StepMismatchError
from backbeat.runtime.reduce import failures, settings
from backbeat.runtime.reduce.failures import BrokenStepError

CHECKS: dict[str, Scenario] = {}


def check(run: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
    CHECKS[run.__name__] = Scenario(run, run.__name__)
    return run


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
        mine_sizes = ours._get_ddp_logging_data()["bucket_sizes"]
        data = theirs._get_ddp_logging_data()
        their_sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        assert mine_sizes == their_sizes, f"{options}: {mine_sizes} against {their_sizes}"


@check
def bit_equal_through_ddp_backend(ctx: Context) -> None:
    """The same plan on our reducer and through stock DDP's gives the same bits on two ranks."""
    model = ctx.build(lambda: mlp(width=20, depth=5))
    plan = small_plan(model, communicators=2, size=3)
    ours = DistributedDataParallel(copy.deepcopy(model), plan=plan)
    theirs = DistributedDataParallel(copy.deepcopy(model), plan=plan, reducer="ddp")
    for step in range(5):
        x = ctx.data(8, 20, step=step, rank=ctx.rank)
        for wrapped in (ours, theirs):
            wrapped.zero_grad()
            wrapped(x).square().mean().backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), f"step {step} {name}: not bit-equal"
    sizes = theirs._get_ddp_logging_data().get("rebuilt_bucket_sizes")
    assert sizes == ours._get_ddp_logging_data()["bucket_sizes"], sizes


@check
def a_real_model_gives_the_same_losses(ctx: Context) -> None:
    """A small transformer, 200 steps with Adam, beside stock DDP: equal losses, bit for bit on two ranks."""
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
    for step in range(200):
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
    assert wrapped.counters()["backbeat/late_buckets"] == 1, "nothing came late"


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
    assert all(isinstance(value, (int, float)) for value in wrapped.counters().values())
    assert all(name.startswith("backbeat/") for name in wrapped.counters())


@check
def a_plan_for_other_ranks_says_so_and_keeps_its_predictions(ctx: Context) -> None:
    plan = small_plan(mlp())
    launch, done = (tuple(i + more for i in range(len(plan.buckets))) for more in (1.0, 1.5))
    predicted = PlanPrediction(network="lan", iteration_s=20.0, exposed_s=2.0, launch_s=launch, done_s=done)
    for made_for, told in ((64, ctx.rank == 0), (ctx.size, False), (None, False)):
        model = ctx.build(mlp)
        oracle = Oracle(ctx, model)
        with mock.patch.object(settings.logger, "warning") as warned:
            wrapped = DistributedDataParallel(
                model, plan=msgspec.structs.replace(plan, workers=made_for, predicted=predicted)
            )
        assert warned.called == told
        if told:
            said = warned.call_args.args[0] % warned.call_args.args[1:]
            assert f"made for 64 ranks, this job has {ctx.size}" in said
            assert f"backbeat plan … --workers {ctx.size}`" in said
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

    with (
        mock.patch.object(Communicators, "wait_raises", False),
        mock.patch.object(Communicator, "all_reduce", noted),
        mock.patch.object(failures, "abort", side_effect=lambda communicators: given_up.set()),
        mock.patch.object(failures, "work_result", lambda work: "COMM_ERROR" if work in lost else failures.DONE),
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
    assert f"rank {ctx.rank}: bucket 1 of 4 (2 gradients, layers.2.bias … layers.2.weight" in message, message
    assert "was not reduced in step 3" in message, message
    assert f"rank {ctx.size - 1} does not answer" in message, message
    return message


@check
def a_dropped_wrapper_is_silent(ctx: Context) -> None:
    """Its model may be wrapped again at once, and trained without any wrapper."""
    model = ctx.build(mlp)
    first = DistributedDataParallel(model)
    message = raises(InputError, lambda: DistributedDataParallel(model))
    assert "already belongs to another" in message, message
    _step(ctx, first, 0)
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
    assert "bucket 0 of 4 (2 gradients, 6.bias … 6.weight" in message, message
    assert f"rank {ctx.size - 1} is at step 5, outside backward" in message, message
    return message


@check
def rank_runs_two_models_in_another_order(ctx: Context) -> str:
    """Two wrapped models whose backwards the last rank runs the other way round: each names the other's backward."""

    class Second(nn.Linear):
        pass

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
