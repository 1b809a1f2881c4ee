"""Memory as predicted, against torch's own tracker of FSDP2, on a process group that sends nothing.

The tracker hooks module by module, so that units of several modules are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from backbeat.model import Block, Gradient, Memory, Plan, Profile
from backbeat.simulate.sharded_memory import sharded_memory
from tests.sharded_problems import sharded_plan

WIDTH, SAMPLES, SHARDS, BLOCKS = 256, 4, 8, 4
pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker", reason="this torch does not track FSDP2's memory")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value @ self.weight)


class Model(nn.Module):
    def __init__(self, root: bool) -> None:
        super().__init__()
        self.embed = Layer() if root else nn.Identity()
        self.blocks = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.head = Layer() if root else nn.Identity()

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


def _profile(root: bool) -> Profile:
    names = [*(["embed"] if root else []), *(f"blocks.{k}" for k in range(BLOCKS)), *(["head"] if root else [])]
    count, size = len(names), 4 * WIDTH * WIDTH
    saved = 2 * SAMPLES * WIDTH
    return Profile(
        name="chain", model="chain", batch_size=SAMPLES, precision="bf16", device="cpu", forward_s=float(count),
        backward_s=float(count), update_s=0.0,
        gradients=tuple(
            Gradient(name=f"{name}.weight", bytes=size, ready_s=1.0 + k) for k, name in enumerate(reversed(names))
        ),
        blocks=tuple(
            Block(name=name, forward_s=1.0, backward_s=1.0, input_bytes=saved, output_bytes=saved, saved_bytes=0,
                  forward_peak_bytes=saved, backward_peak_bytes=saved, saves_output=True, chained=k > 0)
            for k, name in enumerate(names)
        ),
        memory=Memory(parameter_bytes=count * size, gradient_bytes=count * size, optimizer_bytes=count * size,
                      steady_bytes=2 * count * size),
    )  # fmt: skip


def _tracked(plan: Plan, root: bool, micro_batches: int) -> dict[str, int]:
    """The peak of the second step, by torch's kinds."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sharding = plan.sharding
    assert sharding is not None
    model: Any = Model(root)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=dtypes[sharding.param_dtype], reduce_dtype=dtypes[sharding.reduce_dtype])
    mesh = init_device_mesh("cpu", (SHARDS,))
    for unit in sharding.units:
        fully_shard(
            model.get_submodule(unit.modules[0]), mesh=mesh, mp_policy=policy, reshard_after_forward=unit.reshard
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if sharding.reduce_scatter_buffers > 1:
        if not hasattr(model, "set_reduce_scatter_max_input_buffers"):
            pytest.skip("this torch has no set_reduce_scatter_max_input_buffers")
        model.set_reduce_scatter_max_input_buffers(sharding.reduce_scatter_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tracker = FSDPMemTracker(model, optimizer)
    batch = torch.randn(SAMPLES, WIDTH)
    tracker.track_external(batch)
    with tracker:
        for _ in range(2):
            for number in range(micro_batches):
                last = number == micro_batches - 1
                model.set_requires_gradient_sync(last or sharding.gradient_sync == "every")
                model.set_reshard_after_backward(last or sharding.reshard_after_backward)
                model(batch).float().sum().backward()
                tracker.reset_mod_stats()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "value", kind): size for kind, size in found.items()}


ONE_EACH = [(f"blocks.{k}",) for k in range(BLOCKS)]
ZERO1 = {"reshard": False, "gradient_sync": "last", "reshard_after_backward": False}


@pytest.mark.parametrize(
    ("units", "root", "micro_batches", "knobs"),
    [
        pytest.param(ONE_EACH, True, 1, {}, id="defaults"),
        pytest.param(ONE_EACH, False, 1, {"reduce_dtype": "bf16"}, id="nothing in the root, bf16 sums"),
        pytest.param(ONE_EACH, True, 1, {"reshard": False, "param_dtype": "fp32"}, id="kept after forward, fp32"),
        pytest.param([], True, 1, {}, id="the root alone"),
        pytest.param(ONE_EACH, True, 1, {"buffers": 3}, id="three inputs"),
        pytest.param(ONE_EACH, True, 2, {"gradient_sync": "last"}, id="reduced once"),
        pytest.param(ONE_EACH, True, 2, ZERO1, id="zero1"),
    ],
)
def test_the_peak_is_what_torch_tracks(
    units: list[tuple[str, ...]], root: bool, micro_batches: int, knobs: dict[str, Any], eight_ranks: None
) -> None:
    profile = _profile(root)
    plan = sharded_plan(profile, units, shard=SHARDS, **knobs)
    found = sharded_memory(profile, plan, micro_batches=micro_batches)
    assert found is not None
    tracked = _tracked(plan, root, micro_batches)
    assert found.peak_bytes == pytest.approx(tracked["Total"], rel=0.03), (found, tracked)
    assert found.parameter_bytes == tracked["Sharded Param"]
    assert found.optimizer_bytes == tracked["OptState"]
