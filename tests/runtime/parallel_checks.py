"""`parallelize` on several ranks: plans of either kind, what `auto` leaves as it was, and candidates that fail."""

from __future__ import annotations

import copy
import gc
import random
import re
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from rank_asserts import raises
from scenario_rig import Context, registry, small_plan
from sharded_checks import Chain, loss_of, plan_of, tokens
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, Network, Slowdown
from backbeat.runtime import DistributedDataParallel, fully_shard, parallelize
from backbeat.runtime.parallel import candidates, choice, plan_file, step_slowdown, trials
from backbeat.runtime.parallel.apply_plan import apply_plan
from backbeat.runtime.parallel.candidates import Candidate
from backbeat.runtime.parallel.preserve import copy_of
from backbeat.runtime.parallel.request import ParallelRequest
from backbeat.runtime.parallel.search import ParallelSearch, SearchOutcome
from backbeat.runtime.parallel.step_slowdown import measure_step_slowdown
from backbeat.runtime.parallel.trials import ExampleStep, try_plan
from backbeat.runtime.reduce import failures

CHECKS, check = registry("parallelize_")
NO_SLOWDOWN = Slowdown(matmul=1.0, attention=1.0, memory=1.0)


def slow(ctx: Context) -> Network:
    """So slow that every kind of plan is predicted to gain over stock DDP."""
    times = CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-6)
    return Network(name="slow", workers=ctx.size, all_reduce=times, backend="gloo", slowdown=NO_SLOWDOWN)


class Noisy(Chain):
    """Draws from every generator, has buffers, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        scale = 1 + 1e-3 * (random.random() + float(np.random.rand()))
        return nn.functional.dropout(super().forward(x), 0.1) * scale


def searched(ctx: Context, model: nn.Module, loss: Any = loss_of, **options: Any) -> SearchOutcome:
    """Every kind is tried, whatever is predicted."""
    with mock.patch.object(choice, "worth_trying", list):
        return search(ctx, model, loss, **options).run()


def search(
    ctx: Context, model: nn.Module, loss: Any, *, path: str = "", budget_s: float = 20.0, **options: Any
) -> ParallelSearch:
    wanted = {"network": slow(ctx), **options}
    return ParallelSearch(model, path, ParallelRequest(example=example(ctx, loss), budget_s=budget_s, **wanted))


def example(ctx: Context, loss: Any = loss_of) -> ExampleStep:
    batch = tokens(ctx, 0)
    return ExampleStep(batch=batch, loss=loss, optimizer="sgd", precision="fp32", device=ctx.device)


def gathered(ctx: Context, value: Any) -> list[Any]:
    found: list[Any] = [None] * ctx.size
    dist.all_gather_object(found, value)
    return found


def losses(ctx: Context, model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss = loss_of(model, tokens(ctx, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@check
def takes_a_file_of_either_kind(ctx: Context) -> None:
    plain = ctx.build(Chain)
    stock = losses(ctx, TorchDDP(copy.deepcopy(plain)))
    with tempfile.TemporaryDirectory() as folder:
        small_plan(plain).save(Path(folder) / "buckets.json")
        model = parallelize(copy.deepcopy(plain), str(Path(folder) / "buckets.json"))
        assert isinstance(model, DistributedDataParallel)
        assert losses(ctx, model) == stock
        plan_of(ctx).save(Path(folder) / "units.json")
        model = parallelize(copy.deepcopy(plain), Path(folder) / "units.json")
        assert isinstance(model, FSDPModule)
        torch.testing.assert_close(losses(ctx, model), stock)


@check
def auto_leaves_everything_as_it_was(ctx: Context) -> str:
    model: Any = ctx.build(Noisy)
    loss_of(model, tokens(ctx, 9)).backward()
    forwards = model.forwards
    torch.manual_seed(ctx.rank)
    before = copy.deepcopy((model.state_dict(), [one.grad for one in model.parameters()]))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    taken = searched(ctx, model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for now, then in zip(np.random.get_state(), states[2], strict=True):
        assert np.array_equal(now, then)
    after = (model.state_dict(), [one.grad for one in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert model.forwards == forwards
    assert type(model) is Noisy
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(set(gathered(ctx, (taken.plan, taken.words)))) == 1
    return taken.words


@check
def auto_leaves_what_the_loss_reaches_as_it_was(ctx: Context) -> None:
    """As a GAN's discriminator: it neither keeps gradients nor counts batches, whichever plans were tried."""
    model, critic = ctx.build(Chain), ctx.build(Noisy)
    loss_of(critic, tokens(ctx, 9)).backward()
    before = copy.deepcopy((critic.state_dict(), [one.grad for one in critic.parameters()]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        searched(ctx, model, lambda model, batch: loss_of(model, batch) + critic(batch).mean())
    after = (critic.state_dict(), [one.grad for one in critic.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert any("the loss also reaches" in str(one.message) for one in told)


@check
def auto_leaves_no_copy_behind(ctx: Context) -> None:
    """Every kind was tried: neither a copy of the model is left afterwards, nor anything of its size."""
    model = ctx.build(Chain)
    copies: list[weakref.ref[nn.Parameter]] = []

    def remembered(given: nn.Module) -> nn.Module:
        made = copy_of(given)
        copies.extend(weakref.ref(one) for one in made.parameters())
        return made

    searched(ctx, model)
    before = tensors_alive()
    with (
        mock.patch("backbeat.runtime.parallel.search.copy_of", remembered),
        mock.patch.object(step_slowdown, "copy_of", remembered),
        mock.patch.object(trials, "copy_of", remembered),
    ):
        searched(ctx, model, network=msgspec.structs.replace(slow(ctx), slowdown=None))
    assert len(copies) > 3 * len(list(model.parameters()))
    assert not [one for one in copies if one() is not None]
    after = tensors_alive()
    assert after["Parameter"] == before["Parameter"]
    assert after["bytes"] - before["bytes"] < sum(one.nbytes for one in model.parameters())


def tensors_alive() -> Counter[str]:
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            found.update({type(one).__name__: 1, "bytes": one.nbytes})
    return found


@check
def a_slowdown_is_the_same_on_all_ranks(ctx: Context) -> str:
    model = ctx.build(Chain)
    world: Any = dist.group.WORLD
    ranks = RankStore(Communicators(world, ctx.device, 1), "parallelize")
    quick = CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-9).curve.at
    found = measure_step_slowdown(model, example(ctx), ranks, quick, 0.02, 0.5)
    assert not isinstance(found, str), found
    assert found.matmul >= 1
    assert set(gathered(ctx, found)) == {found}

    # A rank that has no room for a copy: there is none on any.
    def no_room(model: nn.Module) -> nn.Module:
        if ctx.rank == 1:
            raise torch.OutOfMemoryError("no room")
        return copy.deepcopy(model)

    with mock.patch.object(step_slowdown, "copy_of", no_room):
        assert "rank 1: OutOfMemoryError" in str(measure_step_slowdown(model, example(ctx), ranks, quick, 0.02, 0.5))
    # Slow steps: not even begun.
    with mock.patch.object(step_slowdown, "copy_of", mock.Mock(side_effect=AssertionError)):
        assert "too slow" in str(measure_step_slowdown(model, example(ctx), ranks, quick, 2.0, 3.0))
    return f"{found.matmul:.2f}"


@check
def of_a_given_network_what_it_does_not_say_is_measured(ctx: Context) -> None:
    """How much communication slows a step down is the model's and the host's, not the network's."""
    model = ctx.build(Chain)
    bare = msgspec.structs.replace(slow(ctx), slowdown=None)
    one = search(ctx, model, loss_of, network=bare)
    profile, *_ = one._profile()
    found = one._network(profile)
    assert found.slowdown is not None or "beside communication" in one._left_out
    assert set(gathered(ctx, found)) == {found}
    # On a GPU also what FSDP2 costs the host.
    assert msgspec.structs.replace(found, slowdown=None, sharded=bare.sharded) == bare
    with mock.patch("backbeat.runtime.parallel.search.measure_step_slowdown", mock.Mock(side_effect=AssertionError)):
        known = search(ctx, model, loss_of)._network(profile)
    assert msgspec.structs.replace(known, sharded=None) == slow(ctx)


@check
def auto_trains_as_stock_ddp(ctx: Context) -> str:
    """With buckets of whatever kind, bit for bit."""
    plain = ctx.build(Chain)
    stock = losses(ctx, TorchDDP(copy.deepcopy(plain)))
    # The network itself, measured.
    model = parallelize(plain, "auto", example=(tokens(ctx, 0), loss_of), optimizer="sgd", budget_s=8.0)
    found = losses(ctx, model)
    if isinstance(model, FSDPModule):
        torch.testing.assert_close(found, stock)
    else:
        assert found == stock
    return type(model).__name__


@check
def auto_keeps_its_plan(ctx: Context) -> None:
    model = ctx.build(Chain)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(gathered(ctx, folder)[0]) / "plans" / "run1.json")
        with mock.patch.object(plan_file, "NETWORK_FACTOR", 1e9), mock.patch.object(trials, "TURNS", 1):
            first = searched(ctx, model, path=path, network=None, budget_s=8.0)
            again = mock.Mock(side_effect=AssertionError("measured again"))
            with mock.patch("backbeat.runtime.parallel.search.measure", again):
                second = searched(ctx, model, path=path, network=None)
                assert second.plan == first.plan
                assert "as " in second.words
                said = raises(InputError, lambda: searched(ctx, ctx.build(lambda: Chain(5)), path=path, network=None))
                assert "measured again" in said
                # A file that cannot be read is made again, one that is somebody's own is not written over.
                dist.barrier()
                Path(path).write_text("{")
                dist.barrier()
                said = raises(InputError, lambda: searched(ctx, model, path=path, network=None))
                assert "measured again" in said
                dist.barrier()
                small_plan(model).save(path)
                dist.barrier()
                raises(InputError, lambda: searched(ctx, model, path=path), "did not make")
        dist.barrier()


@check
def a_candidate_that_fails_on_one_rank_is_dropped_on_all(ctx: Context) -> str:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss_of(model, batch)
        if isinstance(model, FSDPModule) and ctx.rank == 1:
            raise MemoryError("rank 1 is full")
        return found

    with mock.patch.object(trials, "GLOO_TIMEOUT_S", 60.0):
        taken = searched(ctx, ctx.build(Chain), loss)
    ((name, why),) = re.findall(r"; ([^;]*) was dropped, (.*)", taken.words)
    assert "unit" in name
    assert why.startswith("rank ")
    assert any("rank 1 is full" in text for text in gathered(ctx, why))
    assert taken.plan.sharding is None
    assert len(set(gathered(ctx, (taken.plan, taken.words)))) == 1
    return taken.words


@check
def a_backward_that_fails_ends_the_trial(ctx: Context) -> str:
    """In the wrapper, while the other rank waits for buckets; a later trial runs."""
    fail = [True]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss_of(model, batch)
        if fail[0] and ctx.rank == 0:
            found.register_hook(_raise)
        return found

    model = ctx.build(Chain)
    world: Any = dist.group.WORLD
    ranks = RankStore(Communicators(world, ctx.device, 1), "parallelize")
    before = gloo_threads()
    # NCCL has none: there only the trials' answers count.
    seen = ctx.device.type == "cpu" and Path("/proc/self/task").exists()
    assert not seen or before > 0, "gloo's threads have another name: see gloo_threads"
    kinds = (small_plan(model), plan_of(ctx), plan_of(ctx, replicate=ctx.size))
    # The rank whose trial ended does not answer: it is not waited for long.
    with mock.patch.multiple(failures, POLL_S=0.2, ANSWER_S=1.0):
        said = [try_plan(model, plan, example(ctx, loss), ranks, 3) for plan in kinds]
    assert all("rank 0: ValueError: backward broke" in str(one) for one in said), said
    assert closed_again(before), "a trial that failed left its connections open: the others wait for the timeout"
    fail[0] = False
    # Only a hang fails here, however busy the machine is.
    with mock.patch.object(trials, "GLOO_TIMEOUT_S", 100.0):
        for plan in kinds:
            found = try_plan(model, plan, example(ctx, loss), ranks, 3)
            assert isinstance(found, float), found
    assert closed_again(before), "a trial that ran left its connections open"
    return str(said[0])


def gloo_threads() -> int:
    """How many threads of gloo's this process has, where that can be seen."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def closed_again(before: int) -> bool:
    """Whether no more of gloo's threads are left than before, once those have ended that are about to."""
    deadline = time.monotonic() + 30
    while gloo_threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return gloo_threads() <= before


def _raise(_: torch.Tensor) -> None:
    raise ValueError("backward broke")


@check
def without_room_it_goes_by_prediction(ctx: Context) -> str:
    full = "there is no room" if ctx.rank == 1 else None
    with mock.patch("backbeat.runtime.parallel.search.room_for", return_value=full):
        taken = searched(ctx, ctx.build(Chain))
    assert "predicted (rank 1: there is no room)" in taken.words, taken.words
    return taken.words


@check
def within_memory_and_compressed(ctx: Context) -> str:
    model = ctx.build(Chain)
    raises(InputError, lambda: searched(ctx, model, memory_bytes=1000), "too small")
    with mock.patch("backbeat.runtime.parallel.search.room_for", return_value="full"):
        taken = searched(ctx, model, memory_bytes=10**9, compression=True)
    assert "stock DDP" in taken.words
    parallelized: Any = apply_plan(model, taken.plan)
    if taken.plan.sharding is None:
        parallelized.attach(torch.optim.SGD(parallelized.parameters(), lr=0.1), max_grad_norm=None)
    return taken.words


@check
def an_example_that_fails_on_one_rank_raises_on_all(ctx: Context) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if ctx.rank == 1:
            raise ValueError("no such batch")
        return loss_of(model, batch)

    said = raises(InputError, lambda: searched(ctx, ctx.build(Chain), loss), "rank 1: ")
    assert "no such batch" in said


class Halved(Chain):
    """On one rank a part is left out of every step."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.rest = whole, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found + (self.rest.weight.sum() if self.whole else 0.0)


@check
def stock_ddp_is_told_of_parameters_without_gradients(ctx: Context) -> None:
    """Also where another rank than the first leaves them out, and where stock DDP needs no comparison."""
    model = ctx.build(lambda: Halved(ctx.rank == 0))
    with mock.patch.object(choice, "worth_trying", lambda found: found[:1]):
        taken = search(ctx, model, loss_of, budget_s=60.0).run()
    assert taken.words.startswith("stock DDP")
    assert " a step measured" in taken.words
    wrapped = apply_plan(model, taken.plan)
    assert isinstance(wrapped, TorchDDP)
    assert not isinstance(wrapped, DistributedDataParallel)
    losses(ctx, wrapped, 3)


class Skipping(nn.Module):
    """Each rank leaves out a layer of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.rank:
                x = torch.tanh(layer(x))
        return x


@check
def units_are_left_out_where_ranks_use_different_parameters(ctx: Context) -> None:
    """FSDP2 would gather another unit on each rank, and abort or compute with the wrong weights."""
    batch = torch.ones(3, 8, device=ctx.device)
    step = ExampleStep(
        batch=batch, loss=lambda model, x: model(x).square().sum(), optimizer="sgd", precision="fp32", device=ctx.device
    )
    request = ParallelRequest(example=step, budget_s=20.0, network=slow(ctx))
    with mock.patch.object(choice, "worth_trying", list):
        taken = ParallelSearch(ctx.build(lambda: Skipping(ctx.rank)), "", request).run()
    assert taken.plan.sharding is None
    assert "was dropped" not in taken.words, taken.words
    assert "units were left out" in taken.words, taken.words


@check
def what_needs_no_comparison_must_run(ctx: Context) -> str:
    """A wrapper has the model's forward and no other method of it."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(model, TorchDDP) and not isinstance(model, DistributedDataParallel):
            raise AttributeError("no such method")
        return loss_of(model, batch)

    with mock.patch.object(choice, "worth_trying", lambda found: found[:1]), mock.patch.object(trials, "TURNS", 1):
        taken = search(ctx, ctx.build(Chain), loss, budget_s=60.0).run()
    assert "; stock DDP was dropped, " in taken.words
    assert "no such method" in taken.words
    assert taken.plan.strategy != "ddp"
    assert "measured" in taken.words
    return taken.words


@check
def what_is_wrong_on_one_rank_is_raised_on_all(ctx: Context) -> None:
    """Before the others wait for it; what differs is named."""
    here = ctx.rank == 1
    pair = (tokens(ctx, 0), loss_of)
    small = small_plan(Chain())
    for options, match in (
        ({"example": None if here else pair}, "parallelize: rank 1: plan='auto' times steps"),
        ({"example": pair, "budget_s": -1 if here else 5}, "rank 1: budget_s is -1"),
        ({"example": pair, "budget_s": 6 if here else 5}, "budget_s is 5 on rank 0 and 6 on rank 1"),
        ({"example": pair, "network": slow(ctx) if here else None}, "network is None on rank 0"),
        ({"example": pair, "plan": "auto:x.json" if here else "auto"}, "plan is 'auto' on rank 0"),
        ({"plan": "gone.json" if here else small}, "rank 1: gone.json: no such file"),
        ({"plan": small_plan(Chain(), size=1) if here else small}, "plan is "),
    ):
        raises(InputError, lambda options=options: parallelize(ctx.build(Chain), **options), match)
    raises(InputError, lambda: parallelize(ctx.build(lambda: Chain(5 if here else 4)), small), "model is ")


@check
def what_rank_0_alone_does_is_raised_on_all(ctx: Context) -> None:
    model, broken = ctx.build(Chain), mock.Mock(side_effect=ZeroDivisionError("by zero"))
    with mock.patch.object(candidates, "predicted_candidates", broken):
        raises(InputError, lambda: searched(ctx, model), "planning failed: rank 0: ZeroDivisionError: by zero")
    with mock.patch.object(plan_file, "kept_plan", broken):
        raises(InputError, lambda: searched(ctx, model, path="plan.json"), "the plan's file: rank 0: ZeroDivisionError")
    assert broken.call_count == (2 if ctx.rank == 0 else 0)


@check
def refusals(ctx: Context) -> None:
    plain = ctx.build(Chain)
    sharded = fully_shard(ctx.build(Chain), plan_of(ctx))
    locked, taken = ctx.build(Chain), DistributedDataParallel(ctx.build(Chain), reducer="ddp")
    locked.lock = threading.Lock()
    pair = (tokens(ctx, 0), loss_of)
    for given, options, match in (
        (TorchDDP(ctx.build(Chain)), {}, "wrapped in DistributedDataParallel already"),
        (nn.Sequential(TorchDDP(ctx.build(Chain))), {}, "module '0' is wrapped"),
        (sharded, {}, "sharded by FSDP2 already"),
        (ctx.build(Chain).requires_grad_(False), {}, "requires_grad"),
        (plain, {}, "give example=(batch, loss)"),
        (plain, {"example": tokens(ctx, 0)}, "give example=(batch, loss)"),
        (plain, {"plan": "auto:", "example": pair}, "without a file"),
        (plain, {"plan": "fsdp"}, "is a strategy"),
        (plain, {"plan": "outo"}, "did you mean 'auto'"),
        (plain, {"example": pair, "compression": "yes"}, "must be 'allow'"),
        (plain, {"example": pair, "compression": "allow", "precision": "fp16"}, "train in bf16"),
        (plain, {"example": pair, "budget_s": 0}, "above zero"),
        (plain, {"example": pair, "budget_s": float("inf")}, "above zero"),
        (plain, {"example": pair, "memory": -5}, "memory is -5: it must be above zero"),
        (plain, {"example": pair, "budget_s": "5"}, "above zero"),
        (plain, {"example": pair, "network": 3}, "network is a int"),
        (plain, {"example": pair, "optimizer": 3}, "optimizer is a int"),
        (plain, {"example": pair, "optimizer": lambda _: None}, "returned a NoneType"),
        (locked, {"example": pair}, "copy.deepcopy(model) raises TypeError"),
        (taken.module, {"example": pair}, "already belongs to another"),
        (plain, {"plan": "AUTO"}, "did you mean 'auto'"),
        (plain, {"example": pair, "memory": "0GB"}, "above zero"),
    ):
        raises(InputError, lambda given=given, options=options: parallelize(given, **options), match)
    # Before anything is timed.
    with mock.patch("backbeat.runtime.parallel.parallelize.ParallelSearch", mock.Mock(side_effect=AssertionError)):
        for options, match in (
            (
                {"precision": "fp8"},
                "precision is 'fp8': it must be 'bf16' or 'fp16' where training runs under autocast",
            ),
            *([({"precision": "tf32"}, "precision is 'tf32'")] if ctx.device.type == "cpu" else []),
            ({"optimizer": "lion"}, "optimizer is 'lion': it must be sgd, adam or adamw"),
            ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ):
            raises(InputError, lambda options=options: parallelize(plain, example=pair, **options), match)
    assert candidates.KINDS[0] == Candidate(kind="stock", plan=small_plan(plain)).kind
    fully_shard(ctx.build(Chain), plan_of(ctx))
