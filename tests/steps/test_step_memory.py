"""What a GPU holds, whatever the way: one accounting."""

from __future__ import annotations

import pytest
from hypothesis import given
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import Bucket, Memory, MemoryPlan, Plan, Profile
from backbeat.model.gpu_memory import KINDS, MemoryByKind
from backbeat.planners.planned import predicted
from backbeat.steps.step_memory import step_memory
from tests.chains import chains
from tests.problems import make_profile
from tests.sharded_problems import sharded_plan
from tests.steps.test_memory_timeline import BASE, four, segment


def bucketed(profile: Profile, strategy: str, memory: MemoryPlan | None = None) -> Plan:
    names = tuple(gradient.name for gradient in profile.gradients)
    buckets = (Bucket(gradients=names, communicator=0),)
    return Plan(strategy=strategy, model=profile.model, communicators=1, buckets=buckets, memory=memory)


def held(profile: Profile, strategy: str, micro_batches: int = 1, memory: MemoryPlan | None = None) -> MemoryByKind:
    found = step_memory(profile, bucketed(profile, strategy, memory), workers=8, micro_batches=micro_batches)
    assert found is not None
    return found


def test_gradients_are_views_of_our_buckets_and_stand_beside_those_of_ddp() -> None:
    """Activations, with what the highest block needs, take 460 bytes when backward begins."""
    ours, stock, summed = held(four(), "optimal"), held(four(), "ddp"), held(four(), "ddp", micro_batches=2)
    assert ours.by_kind == {"parameters": 16, "gradients": 16, "activations": 460}
    # Backward has made no gradient yet; in the second micro-batch all of the first are there.
    assert stock.by_kind == {"parameters": 16, "activations": 460, "buffers": 16}
    assert summed.by_kind == {"parameters": 16, "gradients": 16, "activations": 460, "buffers": 16}
    assert (stock.where, stock.phase, stock.moment) == ("b3", "backward", "in the backward of b3")


def test_gradients_in_fewer_bytes_are_a_copy() -> None:
    sent = held(four().with_reduce_dtype("bf16"), "optimal")
    assert sent.by_kind["gradients"] == 16
    assert sent.by_kind["buffers"] == 8


def test_large_gradients_are_all_there_at_the_update() -> None:
    profile = four()
    large = tuple(replace(gradient, bytes=4000) for gradient in profile.gradients)
    profile = replace(profile, gradients=large, memory=Memory(parameter_bytes=16000, steady_bytes=16000))
    assert held(profile, "ddp").by_kind == {"parameters": 16000, "gradients": 16000, "buffers": 16000}
    assert held(profile, "ddp").moment == "at the update"


def test_a_budget_is_what_its_planner_counted() -> None:
    again = MemoryPlan(segments=tuple(segment(index) for index in range(4)))
    assert held(four(), "optimal", memory=again).peak_bytes == BASE + 30 + 10 + 110 + 10


@pytest.mark.parametrize("way", ["optimal", "fsdp"])
def test_the_peak_of_a_checkpointed_model_has_the_block_that_is_computed_again(way: str) -> None:
    """Without blocks it is known from the profile's own peak alone."""
    memory = Memory(parameter_bytes=100, gradient_bytes=80, steady_bytes=120, activation_bytes=10, peak_bytes=900)
    profile = make_profile([40, 40], [1.0, 2.0], memory=memory)
    plan = bucketed(profile, way) if way == "optimal" else sharded_plan(profile, [])
    found = step_memory(profile, plan, workers=8)
    assert found is not None
    assert found.by_kind["activations"] == 900 - 120 - 80


@given(chains())
def test_ddp_holds_what_is_between_its_own_buckets_and_twice_the_gradients(profile: Profile) -> None:
    gradients = profile.total_bytes
    ours, stock, summed = held(profile, "optimal"), held(profile, "ddp"), held(profile, "ddp", micro_batches=2)
    assert ours.peak_bytes <= stock.peak_bytes <= summed.peak_bytes == ours.peak_bytes + gradients
    for found in (ours, stock, summed):
        assert set(found.by_kind) <= set(KINDS)
        assert min(found.by_kind.values()) >= 0


@pytest.mark.parametrize("way", ["ddp", "optimal", "compressed", "fsdp", "hsdp:8", "zero2"])
def test_every_way_says_what_it_holds_and_whether_that_fits(way: str) -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=16)
    found = predicted(profile, network, way)
    assert found.memory is not None
    assert (
        found.peak_bytes
        == found.memory.peak_bytes
        > sum(found.memory.by_kind[kind] for kind in ("parameters", "other"))
    )
    assert found.fits == "yes"
    assert found.device_bytes is not None
