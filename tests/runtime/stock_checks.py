"""What people's tools read of stock DDP, and an option of it: logging data, profiler events, unused buckets skipped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_asserts import raises
from scenario_rig import Context, SkipScenarioError, all_sent, both, mlp, registry, small_plan, start
from scenarios_graphs import Branches
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from backbeat.errors import BrokenStepError, InputError
from backbeat.model import Bucket, Plan
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.reduce.step import StepState

CHECKS, check = registry()
TIMES = ("_time", "_time_start", "_time_end")
"""How names of times end; all else must be stock DDP's to the letter."""
SKIP = {"skip_all_reduce_unused_params": True}
UNTIL_REBUILT = ("has_rebuilt_buckets", "num_buckets_reduced")
"""Stock DDP forms its buckets anew a forward or two later."""
OPTIONS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (mlp, {}),
    (mlp, {"bucket_cap_mb": 0.0002, "gradient_as_bucket_view": True}),
    (mlp, {"static_graph": True, "find_unused_parameters": True}),
    (Branches, {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}),
    (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6)).double(), {}),
]


@check
def logging_data_is_torchs(ctx: Context) -> None:
    """Every key that stock DDP has, with its value where that is no time, before each step."""
    for number, (factory, options) in enumerate(OPTIONS):
        model = ctx.build(factory)
        sides = [wrapper(copy.deepcopy(model), **options) for wrapper in (TorchDDP, DistributedDataParallel)]
        for side in sides:
            side._set_ddp_runtime_logging_sample_rate(4)
        for step in range(17):
            theirs, ours = (side._get_ddp_logging_data() for side in sides)
            for name, value in theirs.items():
                # Stock DDP's first buckets are of any size where it forms them anew.
                other = (step in (2, 3) and name in UNTIL_REBUILT) or (
                    name == "bucket_sizes" and "bucket_cap_mb" in options and "find_unused_parameters" not in options
                )
                same = type(ours.get(name)) is type(value) if other or name.endswith(TIMES) else ours.get(name) == value
                assert same, (
                    f"case {number} before step {step + 1}: {name} is {ours.get(name)!r}, stock DDP's {value!r}"
                )
            _check_times(ours)
            for side in sides:
                side.zero_grad()
                x = ctx.data(8, 6, step=step, rank=ctx.rank)
                side(x.to(next(side.parameters()).dtype)).square().mean().backward()


def _check_times(data: dict[str, Any]) -> None:
    if not data["iteration"]:
        assert "backward_comm_time" not in data
        return
    assert data["forward_compute_time"] > 0
    overlap = data["backward_compute_comm_overlap_time"]
    assert 0 <= overlap <= min(data["backward_compute_time"], data["backward_comm_time"])
    begun = [data[f"{name}_time_start"] for name in ("forward_compute", "backward_compute", "backward_comm")]
    assert begun == sorted(begun)
    for name in ("backward_compute", "backward_comm"):
        # Each is rounded on its own.
        assert abs(data[f"{name}_time_end"] - data[f"{name}_time_start"] - data[f"{name}_time"]) <= 2
    if data["iteration"] == 1:
        assert data["avg_backward_comm_time"] == data["backward_comm_time"]


@check
def logging_data_says_what_was_told(ctx: Context) -> None:
    """The communication hook, uneven inputs, errors of torch's checks and of a step; a copy knows as much."""
    model = ctx.build(mlp)
    plain = DistributedDataParallel(copy.deepcopy(model))
    assert not {"comm_hook", "has_error", "error", "join_uneven_inputs"} & plain._get_ddp_logging_data().keys()
    with plain.join():
        plain(ctx.data(3, 6, step=0, rank=ctx.rank)).sum().backward()
    assert plain._get_ddp_logging_data()["join_uneven_inputs"] == 1
    raises(ValueError, lambda: plain._set_ddp_runtime_logging_sample_rate(0), "greater than 1")
    assert "greater than 1" in plain._get_ddp_logging_data()["error"]
    built_in = DistributedDataParallel(copy.deepcopy(model))
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert built_in._get_ddp_logging_data()["comm_hook"] == str(dist.BuiltinCommHookType.FP16_COMPRESS)

    hooked = DistributedDataParallel(model)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    copied = copy.deepcopy(hooked)
    for one in (hooked, copied):
        found = one._get_ddp_logging_data()
        assert (found["comm_hook"], found["rank"], found["iteration"]) == ("allreduce_hook", ctx.rank, 0)
    assert "bucket_sizes" not in found, "the copy was built"
    if ctx.size > 1:
        loss = hooked(ctx.data(3, 6, step=0, rank=ctx.rank)).sum()
        if ctx.rank == 0:
            handle = hooked.module[0].weight.register_hook(_broken)
            raises(ZeroDivisionError, loss.backward)
            handle.remove()
            hooked(ctx.data(3, 6, step=1, rank=ctx.rank))
        else:
            raises(BrokenStepError, loss.backward)
            assert hooked._get_ddp_logging_data()["error"].startswith("BrokenStepError: rank 0 broke off")
        assert hooked._get_ddp_logging_data().get("has_error", 0) == (ctx.rank > 0)


def _broken(_: torch.Tensor) -> None:
    raise ZeroDivisionError


class RunningMean(nn.Module):
    """As of BatchNorm, whose backward on a GPU does not let its buffers be written in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs


@check
def buffer_hooks_may_return_futures(ctx: Context) -> None:
    """Backward waits for what a hook on the buffers has begun."""
    wrapped = DistributedDataParallel(ctx.build(lambda: nn.Sequential(nn.Linear(6, 6), RunningMean(6))))

    def mean(group: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
        found = [one for one in buffers.values() if one.is_floating_point()]
        torch._foreach_div_(found, ctx.size)
        return [dist.all_reduce(one, group=group, async_op=True).get_future() for one in found]

    wrapped._register_buffer_comm_hook(wrapped.process_group, mean, _BufferCommHookLocation.POST_FORWARD)
    expected = torch.zeros(6, device=ctx.device)
    for step in range(3):
        inputs = [ctx.data(5, 6, step=step, rank=rank) for rank in range(ctx.size)]
        seen = torch.stack([wrapped.module[0](one).mean(0) for one in inputs]).mean(0)
        expected = 0.9 * expected + 0.1 * seen.detach()
        wrapped(inputs[ctx.rank]).sum().backward()
        torch.testing.assert_close(wrapped.module[1].running_mean, expected)


@check
def profilers_find_torchs_names(ctx: Context) -> None:
    """As often as stock DDP's: a collective for each bucket, its call, and the forward."""
    if ctx.device.type != "cpu":
        raise SkipScenarioError("the process group itself says so")
    names = ["DistributedDataParallel.forward", "c10d::allreduce_", f"{dist.get_backend()}:all_reduce"]
    for settled in (False, True):
        model = ctx.build(lambda: mlp(width=20, depth=5))
        found = []
        for wrapper in (TorchDDP, DistributedDataParallel):
            wrapped = wrapper(copy.deepcopy(model), bucket_cap_mb=0.002)
            for step in range(12 if settled else 2):
                wrapped(ctx.data(8, 20, step=step, rank=ctx.rank)).sum().backward()
            with torch.profiler.profile(record_shapes=True) as profiler:
                for step in range(3):
                    wrapped(ctx.data(8, 20, step=step, rank=ctx.rank)).sum().backward()
            on_host = [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CPU]
            events = {name: [one for one in on_host if one.name == name] for name in names}
            assert all(one.is_async for one in events[names[2]])
            found.append({name: len(held) for name, held in events.items()})
        assert found[0] == found[1], found


def _in_order(names: Sequence[str]) -> Plan:
    """A bucket for each branch."""
    buckets = tuple(Bucket(gradients=(f"{one}.bias", f"{one}.weight"), communicator=0) for one in names)
    return Plan(strategy="test", model="test", communicators=1, buckets=buckets)


@check
def skipping_unused_buckets_gives_the_mean(ctx: Context) -> None:
    """Buckets in any order; the branches that run stay for some steps, then change, on all ranks or on some."""
    for seed in range(5):
        chance = random.Random(seed)
        names = chance.sample(["stem", "left", "right", "spare"], 4)
        wrapped, oracle = start(ctx, Branches, plan=_in_order(names), **SKIP)
        left, using = 0, [""]
        for step in range(24):
            if left == 0:
                left = chance.randint(1, 8)
                using = ["".join(one for one in "lrs" if chance.random() < 0.4) for _ in range(ctx.size)]
                using = using if chance.random() < 0.3 else using[:1] * ctx.size
            left -= 1
            if chance.random() < 0.6:
                for model in (wrapped, *oracle.replicas):
                    model.zero_grad()

            def body(m: Any, r: int, step: int = step, using: list[str] = using) -> None:
                m(ctx.data(3, 6, step=step, rank=r), use=using[r]).square().sum().mul(0.1).backward()

            both(ctx, wrapped, oracle, body, f"seed {seed} step {step}, {using}")


@check
def late_gradients_of_skipped_buckets_are_added(ctx: Context) -> None:
    """A bucket is passed over, then one rank's gradient comes for it, and another rank holds one from before."""
    wrapped, oracle = start(ctx, Branches, plan=_in_order(["left", "right", "stem", "spare"]), **SKIP)

    def body(m: Any, r: int, step: int) -> None:
        x = ctx.data(3, 6, step=step, rank=r)
        first = step == 0 or (step > 8 and r == 0)
        # The graph reaches `right` before `left`.
        y = m(x, use="l").square().sum() if first else 0.0
        (y + m(y + x, use="r").square().sum()).mul(0.1).backward()

    for step in range(11):
        if step > 8:
            for model in (oracle.replicas[0], *([wrapped] if ctx.rank == 0 else [])):
                model.zero_grad()
        both(ctx, wrapped, oracle, lambda m, r, step=step: body(m, r, step), f"step {step}")
    assert ctx.size == 1 or wrapped.reducer.runner.late_buckets


@check
def unused_buckets_are_skipped(ctx: Context) -> None:
    """From the second step on they do not travel, and the others leave during backward."""
    for use, last in [("lr", "stem"), ("r", "spare"), ("", "left")]:
        names = [*(name for name in ("spare", "left", "right", "stem") if name != last), last]
        used = [index for index, name in enumerate(names) if name == "stem" or name[0] in use]
        wrapped = DistributedDataParallel(ctx.build(Branches), plan=_in_order(names), **SKIP)
        sent = _sent_by(wrapped)
        for step in range(14):
            sent.clear()
            wrapped.zero_grad()
            wrapped(ctx.data(3, 6, step=step, rank=ctx.rank), use=use).square().sum().backward()
            assert [index for index, _ in sent] == (used if step else [0, 1, 2, 3]), f"{use} step {step}: {sent}"
            if step >= 10:
                # The stem's gradients are the last to come.
                early = [index for index, state in sent if state is StepState.REDUCING]
                assert set(early) >= set(used) - {names.index("stem")}, f"{use} step {step}: only {early} left early"
        assert wrapped._get_ddp_logging_data()["num_buckets_reduced"] == len(used)
        measured = [bucket.launched_s is not None for bucket in wrapped.report().buckets]
        assert measured == [True] * 4


@check
def other_buckets_are_not_skipped(ctx: Context) -> None:
    """Stock DDP's buckets are formed anew after the first step, which has said which of the old ones were unused."""
    wrapped = DistributedDataParallel(ctx.build(Branches), bucket_cap_mb=0.0001, **SKIP)
    sent = _sent_by(wrapped)
    for step in range(3):
        sent.clear()
        wrapped(ctx.data(3, 6, step=step, rank=ctx.rank), use="l").square().sum().backward()
        buckets = [[wrapped.reducer.managed.names[index] for index in one.members] for one in wrapped.reducer.buckets]
        if step == 1:
            assert [index for index, _ in sent] == list(range(len(buckets))), f"not in order: {sent}"
    unused = [index for index, names in enumerate(buckets) if all(name[:5] in ("right", "spare") for name in names)]
    assert unused
    assert [index for index, _ in sent] == [index for index in range(len(buckets)) if index not in unused]


def _sent_by(wrapped: Any) -> list[tuple[int, StepState]]:
    """A list that gets every bucket that leaves, with the state of the step."""
    runner, sent = wrapped.reducer.runner, []
    send = runner.exchange.send

    def noted(index: int, *rest: Any) -> Any:
        sent.append((index, runner.step.state))
        return send(index, *rest)

    runner.exchange.send = noted
    return sent


@check
def skipping_that_differs_is_refused(ctx: Context) -> None:
    if ctx.size > 1:
        differs = ctx.rank == 0
        wrap = lambda: DistributedDataParallel(ctx.build(mlp), skip_all_reduce_unused_params=differs)  # noqa: E731
        raises(InputError, wrap, "skip_all_reduce_unused_params=")
    model = ctx.build(mlp)
    raises(InputError, lambda: _compressed(model), "compressed buckets")


def _compressed(model: nn.Module) -> Any:
    return DistributedDataParallel(model, plan=all_sent(small_plan(model), model), skip_all_reduce_unused_params=True)
