"""The model that a lab trains under FSDP2: real parameters, computation that only takes its time."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the lab's workers need torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from backbeat.lab.jobs import ShardedJob, lab_job  # noqa: E402
from backbeat.lab.spun_steps import ShardedStep, SpunModel  # noqa: E402
from backbeat.model import Gradient, MemoryPlan, Mesh, Plan, Profile, Segment, Sharding, ShardUnit  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


def chain(root: bool = False) -> Profile:
    names = [f"layers.{block}.weight" for block in (2, 1, 0)] + (["scale"] if root else [])
    ready = [0.3, 0.5, 0.6, 0.6]
    return Profile(
        name="chain", model="chain", batch_size=1, precision="bf16", device="cpu", forward_s=0.3, backward_s=0.6,
        update_s=0.1,
        gradients=tuple(
            Gradient(name=name, bytes=400, ready_s=ready[index], forward_s=0.1 if "layers" in name else 0.0)
            for index, name in enumerate(names)
        ),
    )  # fmt: skip


def job(profile: Profile, memory: MemoryPlan | None = None) -> ShardedJob:
    units = tuple(ShardUnit(modules=(f"layers.{k}",), reshard=True, prefetch=0) for k in range(3))
    plan = Plan(
        strategy="fsdp",
        model="chain",
        memory=memory,
        sharding=Sharding(
            mesh=Mesh(replicate=1, shard=1), units=units, param_dtype="bf16", reduce_dtype="fp32",
            reduce_scatter_buffers=1, separate_reduce_scatter=False,
        ),
    )  # fmt: skip
    found = lab_job(profile, plan)
    assert isinstance(found, ShardedJob)
    return found


def test_modules_have_the_profiles_names_and_sizes() -> None:
    model = SpunModel(job(chain(root=True)), CPU)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sizes == {"layers.0.p0": 100, "layers.1.p0": 100, "layers.2.p0": 100, "scale.p0": 100}


@pytest.mark.parametrize("root", [False, True])
def test_a_step_takes_the_profiles_times_in_order(root: bool) -> None:
    step = ShardedStep(job(chain(root)), CPU, init_device_mesh("cpu", (1,)))
    taken: list[float] = []
    step.run(taken.append)
    layers = [seconds for seconds in taken if seconds > 0]
    assert layers == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.2, 0.1, 0.1])
    again: list[float] = []
    step.run(again.append)
    assert again == taken


def test_what_a_plan_recomputes_takes_its_forward_twice() -> None:
    memory = MemoryPlan(segments=(Segment(blocks=("layers.1",), action="recompute"),))
    step = ShardedStep(job(chain(), memory), CPU, init_device_mesh("cpu", (1,)))
    taken: list[float] = []
    step.run(taken.append)
    assert taken == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.1, 0.2, 0.1, 0.1])
