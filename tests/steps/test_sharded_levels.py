"""Memory over a sharded step: every level in time, and none above the peak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model import Memory, Profile
from backbeat.planners import propose
from backbeat.planners.planned import predicted
from backbeat.steps.sharded_memory import memory_levels, sharded_memory
from tests.chains import chains
from tests.problems import affine, make_profile
from tests.sharded_problems import sharded_plans


@settings(deadline=None, max_examples=60)
@given(data=st.data(), micro_batches=st.integers(1, 3))
def test_the_highest_level_is_the_peak_and_time_only_goes_on(data: st.DataObject, micro_batches: int) -> None:
    profile = data.draw(chains())
    plan = data.draw(sharded_plans(profile))
    network = affine(1e-5, 1e-10).at(workers=8)
    held = sharded_memory(profile, plan, micro_batches=micro_batches)
    assert held is not None
    levels = memory_levels(profile, network, plan, micro_batches=micro_batches)
    assert max(level.total_bytes for level in levels) == held.peak_bytes
    now = 0.0
    for level in levels:
        assert level.start_s == pytest.approx(now, abs=1e-12)
        assert level.end_s >= level.start_s
        now = level.end_s


def test_the_step_ends_when_it_is_predicted_to() -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=16)
    plan = propose(profile, network, "hsdp:8")
    result = predicted(profile, network, plan)
    levels = memory_levels(profile, network, plan)
    assert levels[-1].end_s == pytest.approx(result.iteration_s - result.breakdown.stragglers_s)


def test_without_blocks_activations_are_there_all_the_time_and_without_memory_nothing_is_known() -> None:
    profile = make_profile([4000] * 4, [1.0, 2.0, 3.0, 4.0], forward=2.0)
    network = affine(1e-5, 1e-10).at(workers=8)
    plan = propose(profile, network, "fsdp")
    assert memory_levels(profile, network, plan) == ()
    known = Memory(parameter_bytes=16000, gradient_bytes=16000, optimizer_bytes=0, activation_bytes=700)
    levels = memory_levels(Profile(**{**_fields(profile), "memory": known}), network, plan)
    assert {level.held["activations"] for level in levels if level.where != "copies"} == {700}


def _fields(profile: Profile) -> dict[str, object]:
    return {name: getattr(profile, name) for name in profile.__struct_fields__}
