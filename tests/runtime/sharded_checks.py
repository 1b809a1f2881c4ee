"""Sharded plans on several ranks: the same training as with torch's `fully_shard` written by hand, bit for bit."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_asserts import raises
from scenario_rig import Context, Scenario, SkipScenarioError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Mesh, Plan, Segment, Sharding, ShardUnit
from backbeat.runtime import full_state_dict, fully_shard, load_full_state_dict
from backbeat.runtime.sharded.torch_fsdp import NEWER_SETTINGS

CHECKS: dict[str, Scenario] = {}
WIDTH = 6


def check(run: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
    CHECKS[run.__name__] = Scenario(run, run.__name__)
    return run


class Block(nn.Module):
    """Its sizes divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """An embedding, blocks, and a head that may share the embedding's weight."""

    def __init__(self, blocks: int = 4, *, tied: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


LAYERS = (("layers.0",), ("layers.1",), ("layers.2",), ("layers.3",))
PAIRS = (("layers.0", "layers.1"), ("layers.2", "layers.3"))


def plan_of(
    ctx: Context,
    units: Sequence[Sequence[str]] = LAYERS,
    *,
    reshard: bool = True,
    prefetch: int = 0,
    replicate: int = 1,
    memory: MemoryPlan | None = None,
    **more: Any,
) -> Plan:
    return Plan(
        strategy="test",
        model="chain",
        memory=memory,
        sharding=sharding_of(
            Mesh(replicate=replicate, shard=ctx.size // replicate),
            [ShardUnit(modules=tuple(names), reshard=reshard, prefetch=prefetch) for names in units],
            **more,
        ),
    )


def sharding_of(mesh: Mesh, units: Sequence[ShardUnit], **more: Any) -> Sharding:
    plain = {"param_dtype": "fp32", "reduce_dtype": "fp32", "reduce_scatter_buffers": 1}
    return Sharding(mesh=mesh, units=tuple(units), **{**plain, "separate_reduce_scatter": False, **more})


def mesh_of(ctx: Context, replicate: int = 1) -> DeviceMesh:
    kind = ctx.device.type
    if replicate == 1:
        return init_device_mesh(kind, (ctx.size,), mesh_dim_names=("shard",))
    shape = (replicate, ctx.size // replicate)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def tokens(ctx: Context, step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (ctx.rank if rank is None else rank))
    return torch.randint(11, (5,), generator=generator).to(ctx.device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).float(), batch)


def train(
    ctx: Context,
    model: Any,
    steps: int = 3,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
    accumulate: int = 1,
    clip: float | None = None,
) -> list[float]:
    """Stock code: nothing here knows of a plan."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(model, tokens(ctx, step * accumulate + micro))
            (loss / accumulate).backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_hand(
    model: Any,
    mesh: DeviceMesh,
    units: Sequence[Sequence[str]] = LAYERS,
    reshard: bool | Sequence[bool] = True,
    policy: MixedPrecisionPolicy | None = None,
) -> Any:
    modules = dict(model.named_modules())
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    freed = [reshard] * len(units) if isinstance(reshard, bool) else reshard
    for names, frees in zip(units, freed, strict=True):
        found = [modules[name] for name in names]
        torch_fully_shard(found if len(found) > 1 else found[0], reshard_after_forward=frees, **options)
    torch_fully_shard(model, **options)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's full value, on every rank."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right), f"{list(left)} {list(right)}"
    for name, value in left.items():
        torch.testing.assert_close(
            right[name].cpu(), value.cpu(), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def twice(
    ctx: Context,
    build: Callable[[], nn.Module],
    plan: Plan,
    hand: Callable[[nn.Module, DeviceMesh], Any],
    replicate: int = 1,
    **training: Any,
) -> tuple[Any, Any]:
    """Train a model sharded by hand and one sharded by the plan; losses and weights are the same bits."""
    mesh = mesh_of(ctx, replicate)
    expected = hand(ctx.build(build), mesh)
    ours = fully_shard(ctx.build(build), plan=plan, mesh=mesh)
    assert vars(ours).keys() == vars(expected).keys(), "a user's model carries something of ours"
    assert train(ctx, ours, **training) == train(ctx, expected, **training)
    same(whole(expected), whole(ours))
    return ours, expected


def halves(ctx: Context) -> int:
    """As many replicas as leave two shards each."""
    return max(ctx.size // 2, 1)


@check
def batch_norm_runs_in_bf16_with_its_statistics_in_fp32(ctx: Context) -> None:
    torch.manual_seed(0)
    model = Chain(norm=True).to(ctx.device)
    before = {name: value.dtype for name, value in model.state_dict().items()}
    fully_shard(model, plan_of(ctx, param_dtype="bf16"))
    torch.manual_seed(0)
    plain = Chain(norm=True).to(ctx.device)
    fully_shard(plain, plan_of(ctx))
    low, high = train(ctx, model), train(ctx, plain)
    assert max(abs(a - b) for a, b in zip(low, high, strict=True)) < 0.1, (low, high)
    assert isinstance(model.norm.weight, DTensor)
    assert {name: value.dtype for name, value in model.state_dict().items()} == before
    assert model.norm.running_mean.abs().sum() > 0


@check
def one_unit_a_block(ctx: Context) -> None:
    twice(ctx, Chain, plan_of(ctx), by_hand)


@check
def pairs_of_blocks_kept_whole(ctx: Context) -> None:
    ours, _ = twice(
        ctx, Chain, plan_of(ctx, PAIRS, reshard=False), lambda model, mesh: by_hand(model, mesh, PAIRS, False)
    )
    first, second = ours.layers[0], ours.layers[1]
    assert first._get_fsdp_state() is second._get_fsdp_state(), "two blocks are one unit"
    for model, gathered in ((ours, True), (twice(ctx, Chain, plan_of(ctx), by_hand)[0], False)):
        loss_of(model, tokens(ctx, 0))
        held = [not isinstance(one, DTensor) for layer in model.layers for one in layer.parameters()]
        assert held == [gathered] * len(held), "after forward a unit is whole, unless it is resharded"


@check
def bf16_gathered_and_reduced_in_fp32(ctx: Context) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = plan_of(ctx, param_dtype="bf16", reduce_dtype="fp32")
    ours, _ = twice(ctx, Chain, plan, lambda model, mesh: by_hand(model, mesh, policy=policy))
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters()), "the optimizer's are fp32"


@check
def bf16_all_the_way(ctx: Context) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plan = plan_of(ctx, param_dtype="bf16", reduce_dtype="bf16")
    twice(ctx, Chain, plan, lambda model, mesh: by_hand(model, mesh, policy=policy))


@check
def hybrid_mesh(ctx: Context) -> None:
    """HSDP, on a mesh of two dimensions."""
    replicate = halves(ctx)
    if replicate == 1:
        replicate = ctx.size
    ours, _ = twice(ctx, Chain, plan_of(ctx, replicate=replicate), by_hand, replicate)
    assert ours.embed.weight.device_mesh.shape == (replicate, ctx.size // replicate)


@check
def further_ahead(ctx: Context) -> None:
    """Prefetch lists change when things travel, not what is computed."""
    ours, _ = twice(ctx, Chain, plan_of(ctx, prefetch=2), by_hand)
    states = [layer._get_fsdp_state() for layer in ours.layers]
    assert states[0]._states_to_forward_prefetch == states[1:3]
    assert states[2]._states_to_forward_prefetch == states[3:]
    assert not any(state._states_to_backward_prefetch for state in states), "backward is torch's own"


@check
def more_buffers_and_a_group_of_their_own(ctx: Context) -> None:
    for _, method, _ in NEWER_SETTINGS:
        if not hasattr(FSDPModule, method):
            raise SkipScenarioError(f"torch {torch.__version__} has no {method}")
    ours, _ = twice(ctx, Chain, plan_of(ctx, reduce_scatter_buffers=3, separate_reduce_scatter=True), by_hand)
    states = [module._get_fsdp_state() for module in (*ours.layers, ours)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    assert all(group.reduce_scatter_max_input_buffers == 3 for group in groups)
    separate = {id(group._reduce_scatter_process_group) for group in groups}
    assert len(separate) == 1
    assert separate != {id(groups[0]._all_gather_process_group)}


@check
def torchs_own_prefetch_is_left_alone(ctx: Context) -> None:
    ours = fully_shard(ctx.build(Chain), plan=plan_of(ctx), mesh=mesh_of(ctx))
    for layer in ours.layers:
        assert not layer._get_fsdp_state()._states_to_forward_prefetch
        assert not layer._get_fsdp_state()._states_to_backward_prefetch


@check
def clipping_and_sgd(ctx: Context) -> None:
    mesh = mesh_of(ctx)
    models = [by_hand(ctx.build(Chain), mesh), fully_shard(ctx.build(Chain), plan=plan_of(ctx), mesh=mesh)]
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append(train(ctx, model, optimizer=optimizer, clip=0.5))
    assert losses[0] == losses[1]
    same(whole(models[0]), whole(models[1]))


@check
def accumulation(ctx: Context) -> None:
    twice(ctx, Chain, plan_of(ctx), by_hand, accumulate=3)


@check
def frozen_parameters(ctx: Context) -> None:
    def build() -> nn.Module:
        model = Chain()
        for parameter in (*model.embed.parameters(), *model.layers[1].parameters(), model.layers[2].up.bias):
            parameter.requires_grad_(False)
        return model

    ours, _ = twice(ctx, build, plan_of(ctx), by_hand)
    same(
        {name: value for name, value in ctx.build(build).state_dict().items() if name.startswith("layers.1.")},
        {name: value for name, value in whole(ours).items() if name.startswith("layers.1.")},
    )


@check
def weights_are_rank_0s(ctx: Context) -> None:
    expected = ctx.build(lambda: Chain(norm=True))
    torch.manual_seed(ctx.rank)
    mine = Chain(norm=True).to(ctx.device)
    if ctx.rank == 0:
        mine.load_state_dict(expected.state_dict())
    else:
        mine.norm.running_mean.fill_(ctx.rank)
    same(expected.state_dict(), whole(fully_shard(mine, plan=plan_of(ctx), mesh=mesh_of(ctx))))


@check
def one_training_as_ddp(ctx: Context) -> None:
    """Sharding changes where things are, not what is learned."""
    wrapped = TorchDDP(ctx.build(Chain))
    expected = train(ctx, wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1))
    ours: Any = fully_shard(ctx.build(Chain), plan=plan_of(ctx), mesh=mesh_of(ctx))
    found = train(ctx, ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@check
def running_statistics(ctx: Context) -> None:
    """Each rank has its own; rank 0's are DDP's."""
    build: Callable[[], nn.Module] = lambda: Chain(norm=True)  # noqa: E731
    wrapped = TorchDDP(ctx.build(build))
    train(ctx, wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1))
    ours: Any = fully_shard(ctx.build(build), plan=plan_of(ctx), mesh=mesh_of(ctx))
    train(ctx, ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    state = full_state_dict(ours)
    assert bool(state) == (ctx.rank == 0)
    if ctx.rank == 0:
        # DDP's other ranks are given these before each forward.
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            torch.testing.assert_close(state[name], wrapped.module.state_dict()[name].cpu())
    seen = [torch.zeros(WIDTH, device=ctx.device) for _ in range(ctx.size)]
    dist.all_gather(seen, ours.norm.running_mean)
    assert all(not torch.equal(seen[0], other) for other in seen[1:]), "each rank saw other batches"


@contextmanager
def warnings_of(name: str) -> Any:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield told
    logging.getLogger(name).removeHandler(handler)


@check
def tied_weights_stay_tied(ctx: Context) -> None:
    build: Callable[[], nn.Module] = lambda: Chain(tied=True)  # noqa: E731
    wrapped = TorchDDP(ctx.build(build))
    expected = train(ctx, wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for units in (LAYERS, (("embed",), *LAYERS), (("embed", "layers.0"), *LAYERS[1:], ("norm", "head"))):
        with warnings_of("backbeat.runtime") as told:
            ours: Any = fully_shard(ctx.build(build), plan=plan_of(ctx, units), mesh=mesh_of(ctx))
        assert bool(told) == (units is not LAYERS and ctx.rank == 0), told
        assert all("'embed' and 'head' share a parameter" in one for one in told)
        assert ours.embed.weight is ours.head.weight
        found = train(ctx, ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert ours.embed.weight is ours.head.weight


class Half(nn.Module):
    """Uses one of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.last = Block(), Block(), Block()
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last((self.other if self.which else self.used)(x))
        return found


@check
def unused_parameters_keep_no_gradient(ctx: Context) -> None:
    """Where no rank uses a block; and where ranks differ, by torch's own setting."""
    for units in ((("used",), ("other",), ("last",)), (("used", "other"), ("last",))):
        ours: Any = fully_shard(ctx.build(Half), plan=plan_of(ctx, units), mesh=mesh_of(ctx))
        ours(ctx.data(3, WIDTH, step=0, rank=ctx.rank)).sum().backward()
        assert all(parameter.grad is None for parameter in ours.other.parameters())
        assert all(parameter.grad is not None for parameter in ours.used.parameters())
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    ours.zero_grad()
    ours.set_reduce_scatter_unused_params(True)
    ours.which = ctx.rank % 2
    ours(ctx.data(3, WIDTH, step=0, rank=ctx.rank)).sum().backward()
    expected = ctx.build(Half)
    for rank in range(ctx.size):
        expected.which = rank % 2
        (expected(ctx.data(3, WIDTH, step=0, rank=rank)).sum() / ctx.size).backward()
    for name, parameter in expected.named_parameters():
        found = dict(ours.named_parameters())[name].grad
        torch.testing.assert_close(found.full_tensor(), parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@check
def a_full_state_dict_goes_both_ways(ctx: Context) -> None:
    ours = fully_shard(ctx.build(lambda: Chain(norm=True)), plan=plan_of(ctx), mesh=mesh_of(ctx))
    train(ctx, ours)
    trained, state = whole(ours), full_state_dict(ours)
    if ctx.rank == 0:
        plain = Chain(norm=True)
        plain.load_state_dict(state)
        same({n: v for n, v in trained.items() if "running" not in n},
             {n: v for n, v in plain.state_dict().items() if "running" not in n})  # fmt: skip
    torch.manual_seed(99 + ctx.rank)
    again = fully_shard(Chain(norm=True).to(ctx.device), plan=plan_of(ctx, PAIRS), mesh=mesh_of(ctx))
    load_full_state_dict(again, state)
    loaded = whole(again)
    same({n: v for n, v in trained.items() if not n.startswith("norm.r")},
         {n: v for n, v in loaded.items() if not n.startswith("norm.r")})  # fmt: skip
    if ctx.rank == 0:
        same(trained, loaded)


@check
def weights_from_the_meta_device(ctx: Context) -> None:
    expected = ctx.build(Chain)
    with torch.device("meta"):
        model = Chain()
    ours = fully_shard(model, plan=plan_of(ctx), mesh=mesh_of(ctx))
    ours.to_empty(device=ctx.device)
    load_full_state_dict(ours, expected.state_dict() if ctx.rank == 0 else {})
    same(expected.state_dict(), whole(ours))


def _shared_folder(ctx: Context) -> Path:
    told: list[Any] = [tempfile.mkdtemp() if ctx.rank == 0 else None]
    dist.broadcast_object_list(told)
    return Path(told[0])


def _steps(ctx: Context, model: Any, optimizer: torch.optim.Optimizer, some: Sequence[int]) -> list[float]:
    """Every rank has the same batch, so that the number of ranks does not change the mean."""
    found = []
    for step in some:
        loss = loss_of(model, tokens(ctx, step, rank=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _saved(ctx: Context, folder: Path) -> list[float]:
    """Train three steps, save with torch's distributed checkpoints, and go on: the losses after that."""
    ours: Any = fully_shard(ctx.build(Chain), plan=plan_of(ctx), mesh=mesh_of(ctx))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.05)
    _steps(ctx, ours, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(ours, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return _steps(ctx, ours, optimizer, range(3, 6))


def _resumed(ctx: Context, folder: Path, mesh: DeviceMesh) -> list[float]:
    """The same losses from the checkpoint, in other units on this mesh."""
    units = [ShardUnit(modules=names, reshard=False, prefetch=0) for names in PAIRS]
    plan = Plan(strategy="test", model="chain", sharding=sharding_of(Mesh(replicate=1, shard=mesh.size()), units))
    again: Any = fully_shard(Chain().to(ctx.device), plan=plan, mesh=mesh)
    other = torch.optim.AdamW(again.parameters(), lr=0.05)
    model_state, optimizer_state = get_state_dict(again, other)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return _steps(ctx, again, other, range(3, 6))


@check
def a_checkpoint_goes_on_with_other_ranks(ctx: Context) -> None:
    """Saved by all ranks, loaded by half of them into other units."""
    folder = _shared_folder(ctx)
    expected = _saved(ctx, folder)
    parts = torch.arange(ctx.size).view(2, ctx.size // 2)
    found = _resumed(ctx, folder, DeviceMesh(ctx.device.type, parts, mesh_dim_names=("part", "shard"))["shard"])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def first_job(ctx: Context) -> None:
    """Its route is the folder that it writes to."""
    expected = _saved(ctx, Path(ctx.route) / "checkpoint")
    if ctx.rank == 0:
        (Path(ctx.route) / "losses.json").write_text(json.dumps(expected))


def second_job(ctx: Context) -> None:
    """Goes on with what the first one wrote."""
    expected = json.loads((Path(ctx.route) / "losses.json").read_text())
    found = _resumed(ctx, Path(ctx.route) / "checkpoint", mesh_of(ctx))
    assert found == expected, f"{found}, uninterrupted: {expected}"


JOBS = {run.__name__: Scenario(run, run.__name__) for run in (first_job, second_job)}
"""Run one after the other."""


@check
def recomputed_blocks(ctx: Context) -> None:
    """A plan's memory and its sharding together give the gradients of either; a norm counts each batch once."""
    names = ("layers.0", "layers.1", "layers.3", "norm")
    memory = MemoryPlan(segments=tuple(Segment(blocks=(name,), action="recompute") for name in names))
    units = (("layers.0", "layers.1"), ("layers.2",), ("layers.3",))
    for reshard in (True, False):
        twice(
            ctx,
            lambda reshard=reshard: Chain(norm=reshard),
            plan_of(ctx, units, reshard=reshard, memory=memory),
            lambda model, mesh, reshard=reshard: by_hand(model, mesh, units, reshard),
        )


@check
def other_numbers_of_ranks_are_refused(ctx: Context) -> None:
    size = ctx.size
    unit = ShardUnit(modules=("layers.0",), reshard=True, prefetch=0)
    for_more = Plan(strategy="fsdp", model="m", sharding=sharding_of(Mesh(replicate=1, shard=8 * size), [unit]))
    world = "world"
    for mesh in (None, mesh_of(ctx)):
        _refused(ctx, for_more, mesh, f"replicate(1) * shard({8 * size}) != {world}({size}); make a plan for this job")
        world = "mesh"
    _refused(ctx, plan_of(ctx, replicate=2), mesh_of(ctx), f"mesh is 2 x {size // 2}, the one given is {size} ranks in")
    unnamed = init_device_mesh(ctx.device.type, (2, size // 2))
    _refused(ctx, plan_of(ctx, replicate=2), unnamed, f"the one given is 2 x {size // 2}, without names: give init_dev")


def _refused(ctx: Context, plan: Plan, mesh: DeviceMesh | None, match: str) -> None:
    """Before anything is changed."""
    model = ctx.build(Chain)
    raises(InputError, lambda: fully_shard(model, plan=plan, mesh=mesh), match)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@check
def differing_plans_are_refused(ctx: Context) -> None:
    mine = plan_of(ctx, LAYERS if ctx.rank == 0 else PAIRS)
    _refused(
        ctx,
        mine,
        mesh_of(ctx),
        "the model or its plan differs between ranks: line 8 is \"units[0] of {'modules': ('layers.0',), ",
    )


@check
def a_mesh_that_is_a_part_of_the_world(ctx: Context) -> None:
    """Two jobs side by side, each with its own weights."""
    if ctx.size < 4:
        return
    mesh = init_device_mesh(ctx.device.type, (2, 2, 1), mesh_dim_names=("job", "replicate", "shard"))
    sharding = sharding_of(Mesh(replicate=2, shard=1), [ShardUnit(modules=LAYERS[0], reshard=True, prefetch=0)])
    torch.manual_seed(ctx.rank)
    model = Chain()
    plan = Plan(strategy="test", model="chain", sharding=sharding)
    found = whole(fully_shard(model, plan=plan, mesh=mesh["replicate", "shard"]))
    torch.manual_seed(ctx.rank // 2 * 2)
    same(Chain().state_dict(), found)


@check
def the_plans_own_mesh(ctx: Context) -> None:
    replicate = halves(ctx) if ctx.size > 2 else 2
    ours = fully_shard(ctx.build(Chain), plan=plan_of(ctx, replicate=replicate))
    assert ours.embed.weight.device_mesh.shape == (replicate, ctx.size // replicate)
    train(ctx, ours)
