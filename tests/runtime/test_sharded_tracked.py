"""Memory as predicted, against torch's own tracker of FSDP2, on a process group that sends nothing.

The tracker hooks module by module, so that the modules of a unit stand in one module here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from backbeat.model import Block, Gradient, Memory, MemoryPlan, Plan, Profile, Segment
from backbeat.steps.sharded_memory import sharded_memory
from tests.sharded_problems import sharded_plan

WIDTH, SAMPLES, SHARDS, BLOCKS = 256, 4, 8, 4
pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker", reason="this torch does not track FSDP2's memory")


class Layer(nn.Module):
    """Saves its input and the result of each activation function."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.depth = depth

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value @ self.weight
        for _ in range(self.depth):
            value = torch.tanh(value)
        return value


class Model(nn.Module):
    def __init__(self, root: bool, together: int, depth: int) -> None:
        super().__init__()
        self.embed = Layer(depth) if root else nn.Identity()
        layers = [Layer(depth) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(
            nn.Sequential(*layers[k : k + together]) if together > 1 else layers[k] for k in range(0, BLOCKS, together)
        )
        self.head = Layer(depth) if root else nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.embed(value)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=SHARDS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _profile(root: bool, samples: int = SAMPLES, depth: int = 1) -> Profile:
    names = [*(["embed"] if root else []), *(f"blocks.{k}" for k in range(BLOCKS)), *(["head"] if root else [])]
    count, size = len(names), 4 * WIDTH * WIDTH
    saved = 2 * samples * WIDTH
    return Profile(
        name="chain", model="chain", batch_size=samples, precision="bf16", device="cpu", forward_s=float(count),
        backward_s=float(count), update_s=0.0,
        gradients=tuple(
            Gradient(name=f"{name}.weight", bytes=size, ready_s=1.0 + k) for k, name in enumerate(reversed(names))
        ),
        blocks=tuple(
            Block(name=name, forward_s=1.0, backward_s=1.0, input_bytes=saved, output_bytes=saved,
                  saved_bytes=(depth - 1) * saved, forward_peak_bytes=depth * saved, backward_peak_bytes=saved,
                  saves_output=True, chained=k > 0)
            for k, name in enumerate(names)
        ),
        memory=Memory(parameter_bytes=count * size, gradient_bytes=count * size, optimizer_bytes=count * size,
                      steady_bytes=2 * count * size),
    )  # fmt: skip


def _tracked(plan: Plan, root: bool, micro_batches: int = 1, samples: int = SAMPLES, depth: int = 1) -> dict[str, int]:
    """The peak of the second step, by torch's kinds."""
    from torch.distributed._composable.checkpoint_activation import checkpoint
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sharding = plan.sharding
    assert sharding is not None
    model: Any = Model(root, max((len(unit.modules) for unit in sharding.units), default=1), depth)
    for segment in plan.memory.segments if plan.memory else ():
        checkpoint(model.get_submodule(segment.blocks[0]))
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=dtypes[sharding.param_dtype], reduce_dtype=dtypes[sharding.reduce_dtype])
    copies, shards = sharding.mesh.replicate, sharding.mesh.shard
    mesh = init_device_mesh("cpu", (shards,))
    if copies > 1:
        mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copies", "shards"))
    units = list(zip(sharding.units, model.blocks, strict=False))
    for unit, module in units:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=unit.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for index, (unit, module) in enumerate(units):
        if ahead := [after for _, after in units[index + 1 : index + 1 + unit.prefetch]]:
            module.set_modules_to_forward_prefetch(ahead)
    if sharding.reduce_scatter_buffers > 1:
        if not hasattr(model, "set_reduce_scatter_max_input_buffers"):
            pytest.skip("this torch has no set_reduce_scatter_max_input_buffers")
        model.set_reduce_scatter_max_input_buffers(sharding.reduce_scatter_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tracker = FSDPMemTracker(model, optimizer)
    batch = torch.randn(samples, WIDTH)
    tracker.track_external(batch)
    with tracker:
        for _ in range(2):
            for number in range(micro_batches):
                last = number == micro_batches - 1
                model.set_requires_gradient_sync(last or sharding.gradient_sync == "every")
                model.set_reshard_after_backward(last or sharding.reshard_after_backward)
                model(batch).sum().backward()
                tracker.reset_mod_stats()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "value", kind): size for kind, size in found.items()}


PAIRS = [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
ONE_EACH = [(f"blocks.{k}",) for k in range(BLOCKS)]
ZERO1 = {"reshard": False, "gradient_sync": "last", "reshard_after_backward": False}


@pytest.mark.parametrize(
    ("units", "root", "micro_batches", "settings"),
    [
        pytest.param(ONE_EACH, True, 1, {}, id="defaults"),
        pytest.param(ONE_EACH, False, 1, {"reduce_dtype": "bf16"}, id="nothing in the root, bf16 sums"),
        pytest.param(ONE_EACH, True, 1, {"reshard": False, "param_dtype": "fp32"}, id="kept after forward, fp32"),
        pytest.param([], True, 1, {}, id="the root alone"),
        pytest.param(ONE_EACH, True, 1, {"buffers": 3}, id="three inputs"),
        pytest.param(ONE_EACH, True, 2, {"gradient_sync": "last"}, id="reduced once"),
        pytest.param(ONE_EACH, True, 2, ZERO1, id="zero1"),
        pytest.param(ONE_EACH, True, 1, {"prefetch": 2}, id="two gathers ahead"),
        pytest.param(ONE_EACH, True, 1, {"prefetch": 2, "reshard": False}, id="two gathers ahead, kept"),
        pytest.param(ONE_EACH, True, 1, {"replicate": 2, "shard": 4}, id="two copies"),
        pytest.param(PAIRS, True, 1, {}, id="two blocks a unit"),
        pytest.param(PAIRS, True, 1, {"reshard": False}, id="two blocks a unit, kept"),
    ],
)
def test_the_peak_is_what_torch_tracks(
    units: list[tuple[str, ...]], root: bool, micro_batches: int, settings: dict[str, Any], eight_ranks: None
) -> None:
    profile = _profile(root)
    plan = sharded_plan(profile, units, **{"shard": SHARDS, **settings})
    found = sharded_memory(profile, plan, micro_batches=micro_batches)
    assert found is not None
    tracked = _tracked(plan, root, micro_batches)
    assert found.peak_bytes == pytest.approx(tracked["Total"], rel=0.03), (found, tracked)
    assert found.by_kind["parameters"] == tracked["Sharded Param"]
    assert found.by_kind["optimizer"] == tracked["OptState"]


def test_what_recomputing_saves_is_what_torch_tracks(eight_ranks: None) -> None:
    """With activations larger than the parameters."""
    sizes, peaks = {"samples": 4 * WIDTH, "depth": 3}, []
    for again in (0, 2, BLOCKS):
        profile = _profile(True, **sizes)
        memory = MemoryPlan(segments=tuple(Segment(blocks=names, action="recompute") for names in ONE_EACH[:again]))
        plan = replace(sharded_plan(profile, ONE_EACH, shard=SHARDS), memory=memory)
        found = sharded_memory(profile, plan)
        assert found is not None
        tracked = _tracked(plan, True, **sizes)["Total"]
        assert found.peak_bytes == pytest.approx(tracked, rel=0.03), (again, found, tracked)
        peaks.append(tracked)
    assert peaks[0] > 1.2 * peaks[1] > 1.4 * peaks[2]
