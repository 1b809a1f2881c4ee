"""Recipes under every kind of plan that `parallelize` takes, against stock DDP or a `fully_shard` written by hand.

A recipe is a training script: it is given a model that is parallel already, and does not know by which plan.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compressed_rig import ALL, compressed
from msgspec.structs import replace
from rank_asserts import raises
from scenario_rig import Context, registry, small_plan
from sharded_checks import LAYERS, PAIRS, Chain, by_hand, mesh_of, plan_of, same, tokens, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import CheckpointError

from backbeat.cli.watch import watch_table
from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Plan, PlanPrediction, Segment
from backbeat.model.plan import MadeFor
from backbeat.runtime import Watch, full_state_dict, load_full_state_dict, no_sync, parallelize
from backbeat.runtime import watch as watching
from backbeat.runtime.parallel.apply_plan import apply_plan
from backbeat.runtime.sharded.torch_fsdp import sends_gradients
from backbeat.show.drift import StepSample

CHECKS, check = registry("recipe_")
Recipe = Callable[[Context, Any], list[float]]
STEPS = 3
LOWER = "units in bf16"
RECOMPUTED = MemoryPlan(segments=tuple(Segment(blocks=names, action="recompute") for names in LAYERS[1:3]))
OFFLOADED = MemoryPlan(
    segments=(Segment(blocks=LAYERS[1], action="recompute"), Segment(blocks=LAYERS[2], action="offload"))
)


def plans(ctx: Context) -> dict[str, Plan]:
    """One of every kind, for `Chain`."""
    small = small_plan(Chain())
    fsdp = plan_of(ctx)
    return {
        "stock": replace(small, strategy="ddp", made_for=MadeFor()),
        "buckets": small,
        "two communicators": small_plan(Chain(), communicators=2),
        "memory": replace(small, memory=OFFLOADED),
        "compressed": compressed(Chain(), ALL, every=2),
        "zero2": plan_of(ctx, PAIRS, reshard=False, prefetch=1),
        LOWER: lower_units(ctx, "bf16"),
        "fsdp": fsdp,
        "mixed reshard": replace(fsdp, sharding=alternating(fsdp.sharding)),
        "hsdp": plan_of(ctx, replicate=2),
        "units and memory": plan_of(ctx, memory=RECOMPUTED),
    }


def lower_units(ctx: Context, dtype: str) -> Plan:
    """As `auto` has them with `precision=`: kept after forward, gathered in that dtype, gradients reduced in fp32."""
    return plan_of(ctx, PAIRS, reshard=False, prefetch=1, param_dtype=dtype)


def alternating(sharding: Any) -> Any:
    """Every other unit stays whole after forward."""
    units = [replace(unit, reshard=index % 2 == 0) for index, unit in enumerate(sharding.units)]
    return replace(sharding, units=tuple(units))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Under autocast where units are gathered in another dtype, as `auto` tries them."""
    state = getattr(model, "_get_fsdp_state", None)
    dtype = None if state is None else state()._mp_policy.param_dtype
    with torch.autocast(batch.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        found = model(batch)
    return nn.functional.cross_entropy(found.float(), batch)


def counterpart(ctx: Context, plan: Plan, model: nn.Module) -> Any:
    """What people write by hand."""
    sharding = plan.sharding
    if sharding is None:
        return TorchDDP(model)
    policies = {
        "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    }
    units, reshard = zip(*((unit.modules, unit.reshard) for unit in sharding.units), strict=True)
    return by_hand(model, mesh_of(ctx, sharding.mesh.replicate), units, reshard, policies.get(sharding.param_dtype))


def follow(
    ctx: Context,
    recipe: Recipe,
    *,
    build: Callable[[], nn.Module] = Chain,
    leave_out: tuple[str, ...] = (),
    more: dict[str, Plan] | None = None,
) -> None:
    """The recipe's losses and weights are the counterpart's; the same bits, unless buckets are compressed."""
    # Counterparts differ by how they shard alone.
    counterparts: dict[Any, tuple[Any, Any]] = {}
    for kind, plan in (plans(ctx) | (more or {})).items():
        if kind in leave_out:
            continue
        ours: Any = parallelize(ctx.build(build), plan)
        found = recipe(ctx, ours)
        if plan.sharding not in counterparts:
            theirs = counterpart(ctx, plan, ctx.build(Chain))
            counterparts[plan.sharding] = recipe(ctx, theirs), whole(unwrapped(theirs))
        expected, weights = counterparts[plan.sharding]
        if plan.compressed:
            torch.testing.assert_close(found, expected, msg=lambda text, kind=kind: f"{kind}: {text}")
        else:
            assert found == expected, f"{kind}: {found} {expected}"
            same(weights, whole(unwrapped(ours)))


def unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


def adamw(ctx: Context, model: Any, clip: float | None = None, steps: int = STEPS, accumulate: int = 1) -> list[float]:
    """With a schedule and weight decay for some parameters; as one script for every kind."""
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    attached = getattr(model, "compressed", False)
    if attached:
        model.attach(optimizer, max_grad_norm=clip)
    found = []
    for step in range(steps):
        for micro in range(accumulate):
            with nullcontext() if micro == accumulate - 1 else no_sync(model):
                loss = loss_of(model, tokens(ctx, step * accumulate + micro))
                (loss / accumulate).backward()
            found.append(loss.item())
        if clip is not None and not attached:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


@check
def adamw_clipped_and_accumulated(ctx: Context) -> None:
    """By the global norm; an attached optimizer clips inside backward, and hands out no norm."""
    follow(ctx, lambda ctx, model: adamw(ctx, model, clip=0.2, accumulate=2))


@check
def grad_scaler(ctx: Context) -> None:
    """An overflow on one rank skips the step on all, also of units in fp16; compressed buckets refuse a scaler."""

    def scaled(ctx: Context, model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(ctx.device.type, init_scale=16.0)
        found = []
        for step in range(STEPS):
            loss = loss_of(model, tokens(ctx, step))
            overflows = step == 1 and ctx.rank == 1
            scaler.scale(loss * float("inf") if overflows else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.item(), scaler.get_scale()]
        assert found[-1] == 8.0, "the overflow was not seen"
        return found

    follow(ctx, scaled, leave_out=("compressed",), more={"units in fp16": lower_units(ctx, "fp16")})
    model: Any = parallelize(ctx.build(Chain), plans(ctx)["compressed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(ctx.device.type)
    raises(InputError, lambda: model.attach(optimizer, max_grad_norm=None, grad_scaler=scaler), "train in bf16")


@check
def compiled_blocks(ctx: Context) -> None:
    """Compiled in place before the model is made parallel, which also a plan that recomputes them takes."""

    def build() -> nn.Module:
        model = Chain()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    follow(ctx, lambda ctx, model: adamw(ctx, model, steps=2), build=build)
    torch._dynamo.reset()


@check
def compiled_as_one(ctx: Context) -> None:
    """Afterwards; where a plan recomputes units, torch says that it cannot."""
    # Plain buckets are in `scenarios_wrapper`; units kept whole are to the compiler what those here are.
    for kind in ("stock", "memory", "compressed", LOWER, "fsdp", "hsdp"):
        plan = plans(ctx)[kind]
        ours: Any = torch.compile(parallelize(ctx.build(Chain), plan), backend="aot_eager")
        found, expected = adamw(ctx, ours, steps=2), adamw(ctx, counterpart(ctx, plan, ctx.build(Chain)), steps=2)
        if plan.compressed:
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected, f"{kind}: {found} {expected}"
        torch._dynamo.reset()
    # torch's own checkpointing, which sharded plans recompute with, cannot.
    ours = torch.compile(parallelize(ctx.build(Chain), plans(ctx)["units and memory"]), backend="aot_eager")
    raises(CheckpointError, lambda: adamw(ctx, ours, steps=1), "different metadata")
    torch._dynamo.reset()


@check
def resumed_by_other_ranks(ctx: Context) -> None:
    """Trained by all ranks under one kind of plan, gone on with by half of them under the next kind; and back."""
    half = Context(ctx.rank, ctx.size // 2, ctx.device.type, ctx.route)
    part = dist.new_subgroups(half.size)[0]
    known = {ctx.size: plans(ctx), half.size: plans(half)}

    def parallel(size: int, kind: str) -> Any:
        plan, model = known[size][kind], ctx.build(Chain)
        if size == ctx.size:
            return parallelize(model, plan)
        return apply_plan(model, plan, group=part, mesh=sub_mesh(half, plan))

    # What two communicators and recomputed units hold is what the kinds beside them do; bf16 has losses of its own.
    kinds = [kind for kind in known[half.size] if kind not in ("two communicators", "units and memory", LOWER)]
    fewer = [*zip(kinds, kinds[1:] + kinds[:1], strict=True), (LOWER, LOWER)]
    more = [("stock", "mixed reshard"), ("fsdp", "compressed"), ("compressed", "hsdp"), ("hsdp", "memory")]
    for size, other, pairs in ((ctx.size, half.size, fewer), (half.size, ctx.size, [*more, (LOWER, LOWER)])):
        for kind, following in pairs:
            found, expected = resumed(ctx, parallel(size, kind), parallel(other, following))
            words = f"{kind} on {size} ranks to {following} on {other}"
            torch.testing.assert_close(
                found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, words=words: f"{words}: {text}"
            )


def resumed(ctx: Context, model: Any, again: Any) -> tuple[list[float], list[float]]:
    """Losses of a model that goes on from another's state, and of that one itself."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer = optimizer_of(model)
    steps(ctx, model, optimizer, 0)
    # Of wrapped models on a CPU, torch hands out the tensors in use.
    saved = copy.deepcopy((full_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)))
    assert set(saved[0]) == (set(Chain().state_dict()) if ctx.rank == 0 else set())
    expected = steps(ctx, model, optimizer, 2)
    # As read from a file by every rank.
    known = [saved[0]]
    dist.broadcast_object_list(known)
    load_full_state_dict(again, known[0])
    other = optimizer_of(again)
    received = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, other, saved[1], options=received)
    return steps(ctx, again, other, 2), expected


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if getattr(model, "compressed", False):
        model.attach(optimizer, max_grad_norm=None)
    return optimizer


def steps(ctx: Context, model: Any, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Two of them; every rank has the same batch, so that the number of ranks does not change the mean."""
    found = []
    for step in range(first, first + 2):
        loss = loss_of(model, tokens(ctx, step, rank=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def sub_mesh(ctx: Context, plan: Plan) -> DeviceMesh | None:
    """Of the ranks that go on together."""
    if plan.sharding is None:
        return None
    mesh = plan.sharding.mesh
    whole = torch.arange(dist.get_world_size()).view(-1, mesh.replicate, mesh.shard)
    names = ("part", "replicate", "shard")
    found = DeviceMesh(ctx.device.type, whole, mesh_dim_names=names)
    return found["replicate", "shard"] if mesh.replicate > 1 else found["shard"]


@check
def watched(ctx: Context) -> str:
    """Under every kind the rank that takes longer is known by its own time, in forward as in backward."""
    late_s = 0.005

    def late(_: Any) -> None:
        if ctx.rank == 1:
            time.sleep(late_s)

    predicted = PlanPrediction(iteration_s=0.5, exposed_s=0.1)
    shown = []
    for kind, plan in plans(ctx).items():
        model: Any = parallelize(ctx.build(Chain), replace(plan, workers=ctx.size, predicted=predicted))
        optimizer = optimizer_of(model)
        told: list[StepSample] = []
        watch = Watch(model, every=10, to=[told.append])
        for step in range(10):
            loss = loss_of(model, tokens(ctx, step))
            late(None)
            loss.register_hook(late)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [sample.step for sample in told] == ([10] if ctx.rank == 0 else []), kind
        for sample in told:
            # On a GPU, what the host sleeps may pass beside communication.
            least_s = 2 * late_s if ctx.device.type == "cpu" else sample.own_s[0]
            assert sample.own_s[1] >= least_s, f"{kind}: a rank's own time was taken for waiting: {sample}"
            assert 0 < sample.exposed_s <= sample.iteration_s, f"{kind}: {sample}"
            assert sample.predicted_iteration_s == predicted.iteration_s, kind
            assert (sample.overlap is None) == (kind == "stock" or plan.sharding is not None), kind
        shown.append(f"{kind} {watch_table(told).splitlines()[-2]}" if told else kind)
        del watch
        assert not any(module._forward_pre_hooks for module in unwrapped(model).layers) or plan.sharding is not None
    return "; ".join(shown)


@check
def a_state_that_does_not_fit_raises_on_every_rank(ctx: Context) -> None:
    for kind in ("buckets", "fsdp"):
        model = parallelize(ctx.build(Chain), plans(ctx)[kind])
        state = full_state_dict(model)
        first, value = next(iter(Chain().state_dict().items()))
        for given in (
            {name: value for name, value in state.items() if name != first},
            {**state, "more": torch.ones(1)},
            # One that some shards have room for, and one that torch would repeat.
            {**state, first: value[:1]},
            {**state, first: value[:, :1]},
        ):
            raises(InputError, lambda model=model, given=given: load_full_state_dict(model, given), "does not fit")
        other = {first: value[:1]}
        raises(InputError, lambda model=model, given=other: load_full_state_dict(model, given, strict=False), first)
        load_full_state_dict(model, state)


@check
def mixed_units_stay_whole_as_the_plan_says(ctx: Context) -> None:
    model: Any = parallelize(ctx.build(Chain), plans(ctx)["mixed reshard"])
    loss = loss_of(model, tokens(ctx, 0))
    assert [isinstance(layer.up.weight, DTensor) for layer in model.layers] == [True, False, True, False]
    loss.backward()


@check
def no_sync_leaves_what_it_found(ctx: Context) -> None:
    model: Any = parallelize(ctx.build(Chain), plans(ctx)["fsdp"])
    with no_sync(model):
        with no_sync(model):
            loss_of(model, tokens(ctx, 0)).backward()
        loss_of(model, tokens(ctx, 1)).backward()
        # Whole gradients wait in the units; the sharded ones come with the reduction.
        assert all(one.grad is None for one in model.parameters())
    loss_of(model, tokens(ctx, 2)).backward()
    assert all(one.grad is not None for one in model.parameters())
    # Shards that are reduced while their copies are not stay so.
    model.set_requires_all_reduce(False)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with no_sync(model):
        assert {sends_gradients(unit) for unit in units} == {(False, False)}
    assert {sends_gradients(unit) for unit in units} == {(True, False)}


@check
def watching_does_not_wait_for_a_rank_that_steps_less(ctx: Context) -> None:
    shown: list[StepSample] = []
    with mock.patch.object(watching, "WAIT_S", 1.0):
        model: Any = parallelize(ctx.build(Chain), plans(ctx)["stock"])
        watch = Watch(model, every=6, to=[shown.append])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(13):
            loss_of(model, tokens(ctx, step)).backward()
            if ctx.rank == 0 or step != 3:
                optimizer.step()
            # Also in the steps that are timed, by hooks on the model.
            torch.save(model, io.BytesIO())
            optimizer.zero_grad()
        dist.barrier()
    del watch
