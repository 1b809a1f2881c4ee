"""The candidates: the best plan of each kind, by prediction."""

from __future__ import annotations

import msgspec
import pytest

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import Bucket, Mesh, Plan, PlanPrediction, Sharding, ShardUnit
from backbeat.model.files import decode, encode
from backbeat.planners.planned import planned
from backbeat.runtime.parallel.candidates import KINDS, Candidate, predicted_candidates

SHARDING = Sharding(
    mesh=Mesh(replicate=1, shard=2),
    param_dtype="fp32",
    reduce_dtype="fp32",
    reduce_scatter_buffers=1,
    separate_reduce_scatter=False,
    units=(ShardUnit(modules=("a",), reshard=True, prefetch=0),),
)


def candidate(kind: str, seconds: float = 1.0, bound_s: float = 0.5, exposed_s: float = 0.0) -> Candidate:
    predicted = PlanPrediction(iteration_s=seconds, bound_s=bound_s, exposed_s=exposed_s)
    if kind in ("units", "copies"):
        mesh = Mesh(replicate=1 if kind == "units" else 2, shard=2)
        sharding = msgspec.structs.replace(SHARDING, mesh=mesh)
        return Candidate(kind=kind, plan=Plan(strategy="fsdp", model="m", sharding=sharding, predicted=predicted))
    bucket = Bucket(gradients=("a",), communicator=0)
    plan = Plan(strategy=kind, model="m", communicators=1, buckets=(bucket,), predicted=predicted)
    return Candidate(kind=kind, plan=plan)


def test_stock_ddp_has_no_memory_plan() -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("25gbe").at(workers=4)
    stock = predicted_candidates(profile, network, memory_bytes=10**12, compression=False, communicators=1)[0]
    assert stock.kind == "stock"
    assert stock.plan.memory is None


@pytest.mark.parametrize("memory_bytes", [None, 7 * 10**9])
def test_the_best_of_each_kind(memory_bytes: int | None) -> None:
    profile = bb.Profile.load("gpt2-b8-bf16-h200")
    network = bb.Network.load("10gbe").at(workers=8)
    found = predicted_candidates(profile, network, memory_bytes=memory_bytes, compression=True, communicators=None)
    kinds = [one.kind for one in found]
    assert kinds == [kind for kind in KINDS if kind in kinds]
    assert "units" in kinds
    assert ("stock" in kinds) == (memory_bytes is None)
    assert all(decode(encode(one.plan), Plan, where="rank 0's plan") == one.plan for one in found)
    if memory_bytes is not None:
        assert all((one.plan.predicted.peak_bytes or 0) <= memory_bytes for one in found if one.plan.predicted)


def test_planned_units_that_stay_gathered_are_among_the_candidates() -> None:
    """Reduce-scatters behind backward, all-gathers behind the next forward: the fastest on a slow network."""
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("25gbe").at(workers=8)
    found = predicted_candidates(profile, network, memory_bytes=None, compression=False, communicators=None)
    (units,) = [one.plan for one in found if one.kind == "units"]
    assert units.strategy == "sharded"
    assert units.sharding is not None
    assert not any(unit.reshard for unit in units.sharding.units)


def test_units_are_left_out_where_fsdp2_cannot_run_them() -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("10gbe").at(workers=8)
    found = predicted_candidates(
        profile, network, memory_bytes=None, compression=False, communicators=None, units=False
    )
    assert {one.kind for one in found} <= {"stock", "buckets"}
    with pytest.raises(InputError, match="ranks use different parameters"):
        predicted_candidates(profile, network, memory_bytes=10**9, compression=False, communicators=None, units=False)


def test_one_sharded_copy_and_several_are_both_tried() -> None:
    """Their collectives differ, and so do the errors of their predictions."""
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("dgx-h100").at(workers=16)
    found = predicted_candidates(profile, network, memory_bytes=None, compression=False, communicators=None)
    copies = {one.kind: one.plan.sharding.mesh.replicate for one in found if one.plan.sharding is not None}
    assert copies == {"units": 1, "copies": 2}


def test_units_that_gather_in_another_dtype_say_so() -> None:
    units = candidate("units")
    assert units.plan.sharding is not None
    low = msgspec.structs.replace(units.plan.sharding, param_dtype="bf16")
    named = Candidate(kind="units", plan=msgspec.structs.replace(units.plan, sharding=low)).name
    assert named == f"{units.name}, parameters in bf16"


@pytest.mark.parametrize("launch_bound", [False, True])
def test_stock_ddp_is_predicted_without_the_wrappers_status(launch_bound: bool) -> None:
    """The wrapper waits for the status of a step when the next backward opens: torch's DDP has none. It costs
    nothing where gradients are still on their way when the host has caught up."""
    profile = bb.Profile.load("gpt2-b8-bf16-h200")
    if launch_bound:
        blocks = tuple(
            msgspec.structs.replace(block, host_forward_s=block.forward_s, host_backward_s=block.backward_s)
            for block in profile.blocks
        )
        computing_s = (profile.forward_s + profile.backward_s) / 4
        profile = msgspec.structs.replace(profile, host_s=profile.single_s, device_s=computing_s, blocks=blocks)
    network = bb.Network.load("100gbe").at(workers=4)
    stock = predicted_candidates(profile, network, memory_bytes=None, compression=False, communicators=1)[0]
    wrapped = planned(profile, network, "ddp").predicted
    assert stock.kind == "stock"
    assert wrapped is not None
    assert wrapped.iteration_s is not None
    assert (stock.predicted_s < wrapped.iteration_s * 0.99) == launch_bound
    assert stock.predicted_s == pytest.approx(wrapped.iteration_s) or launch_bound
    assert stock.predicted_s >= profile.single_s
