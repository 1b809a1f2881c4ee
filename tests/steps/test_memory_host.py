"""The host's time under a memory plan: it issues recomputed blocks twice."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Bucket, MemoryPlan, Network, Plan, Profile, Segment
from backbeat.model.batches import at_batch
from backbeat.planners.memory_moves import uniform
from backbeat.show.words.notes import worded
from backbeat.steps.memory_timeline import BlockChain, memory_timeline
from backbeat.steps.predict import predict
from tests.chains import chains, check_against_uniform, resnet152
from tests.steps.test_memory_timeline import four, range_lists, segment

EVERY = MemoryPlan(segments=tuple(segment(index) for index in range(4)))


def hosted(profile: Profile, host_s: float | None, recompute_s: float | None) -> Profile:
    return replace(profile, host_s=host_s, host_recompute_s=recompute_s)


def alone_s(profile: Profile, memory: MemoryPlan) -> float:
    """One iteration on one worker."""
    bucket = Bucket(gradients=tuple(gradient.name for gradient in profile.gradients), communicator=0)
    plan = Plan(strategy="custom", model="four", workers=1, communicators=1, buckets=(bucket,), memory=memory)
    return predict(profile, Network.load("10gbe").at(workers=1), plan).iteration_s


def test_a_host_that_sets_the_pace_by_hand() -> None:
    # Forward and backward take 12, all of it the host's; every forward again takes the device 4 and the host 8.
    profile = four(host_s=12.0, host_recompute_s=8.0)
    result = memory_timeline(profile, EVERY)
    assert result.host_more_s == pytest.approx(8.0)
    # Times and gradients are the device's own; the iteration is at the host's pace.
    assert (result.forward_s, result.backward_s) == (4.0, 12.0)
    assert [gradient.ready_s for gradient in result.profile.gradients] == [3.0, 6.0, 9.0, 12.0]
    assert result.profile.host_s is None
    assert alone_s(profile, EVERY) == pytest.approx(12.0 + 8.0)


def test_half_of_the_blocks_cost_half_as_much() -> None:
    half = MemoryPlan(segments=(segment(0, 1),))
    assert alone_s(four(host_s=12.0, host_recompute_s=8.0), half) == pytest.approx(12.0 + 4.0)


def test_blocks_cost_by_what_the_host_takes_to_issue_them() -> None:
    profile = four(host_s=12.0, host_recompute_s=8.0)
    issued = tuple(
        replace(block, host_forward_s=seconds, host_backward_s=seconds)
        for block, seconds in zip(profile.blocks, (1.0, 0.5, 2.0, 0.5), strict=True)
    )
    known = replace(profile, blocks=issued)
    assert memory_timeline(known, MemoryPlan(segments=(segment(0, 1),))).host_more_s == pytest.approx(8.0 * 1.5 / 4)


def test_what_is_fetched_or_offloaded_costs_as_fetching_was_measured_or_as_much_as_recomputing() -> None:
    for fields in ({"action": "offload"}, {"input": "offload"}):
        plan = MemoryPlan(segments=(segment(1, **fields),))
        for fetch_s, more in ((None, 1000.0), (3000.0, 3000.0)):
            profile = four(host_s=12.0, host_recompute_s=1000.0, host_fetch_s=fetch_s)
            assert alone_s(profile, plan) == pytest.approx(12.0 + more / 4)


def test_a_host_that_is_ahead_may_fall_back_that_far() -> None:
    plain = alone_s(four(), EVERY)
    for host_s in (0.0, 6.0, 8.0):
        assert alone_s(four(host_s=host_s, host_recompute_s=8.0), EVERY) == plain
    assert alone_s(four(host_s=9.0, host_recompute_s=8.0), EVERY) == pytest.approx(4.0 + 13.0)


def test_what_the_host_takes_is_shared_by_micro_batches() -> None:
    # Two micro-batches of 12; the host is 6 ahead in all, 3 in each.
    profile = four(accumulation=2, host_s=18.0, host_recompute_s=8.0)
    assert alone_s(profile, EVERY) == pytest.approx(2 * (12.0 - 3.0 + 8.0))


@given(st.data(), chains(), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_never_below_the_device_and_the_same_where_the_host_is_unknown_or_free(
    data: st.DataObject, profile: Profile, host: float, again: float
) -> None:
    alone = BlockChain(profile)
    units = data.draw(range_lists(alone))
    expected = alone.run(units)

    def run(host_s: float | None, recompute_s: float | None) -> BlockChain:
        known = hosted(profile, host_s, recompute_s)
        return BlockChain(known)

    for chain in (run(None, None), run(host, None), run(None, again), run(0.0, 0.0), run(host, 0.0)):
        found = chain.run(units)
        assert found.time_s == expected.time_s
        assert dataclasses.replace(found, host_s=0.0) == expected
    chain = run(host * profile.single_s, again * profile.single_s)
    found = chain.run(units)
    assert found.time_s >= expected.time_s
    assert found.time_s >= found.host_s * (1 - 1e-9)
    # The device's own times, and the profile made of them, are as ever.
    assert dataclasses.replace(found, host_s=0.0) == expected
    assert chain.changed(profile, found).gradients == alone.changed(profile, expected).gradients
    keep = uniform(chain)["keep"]
    assert chain.run(keep).time_s == alone.run(keep).time_s


@settings(max_examples=15)
@given(chains(most=8), st.floats(0.0, 1.0))
def test_plans_fit_and_are_never_slower_than_a_uniform_policy_that_fits(profile: Profile, share: float) -> None:
    check_against_uniform(hosted(profile, profile.single_s, 2 * profile.forward_s), share)


def test_larger_batches_take_the_host_no_longer() -> None:
    profile = resnet152(64)
    known = hosted(profile, profile.single_s, profile.forward_s)
    larger = at_batch(known, 256)
    assert (larger.host_s, larger.host_recompute_s) == (known.host_s, known.host_recompute_s)
    every = MemoryPlan(
        segments=tuple(
            Segment(blocks=(block.name,), action="recompute") for block in profile.blocks if not block.changes_input
        )
    )
    # At four times the batch the device has so much to do that the host is ahead.
    assert alone_s(larger, every) == alone_s(at_batch(profile, 256), every)
    assert alone_s(known, every) >= alone_s(profile, every)


@pytest.mark.parametrize("field", ["host_s", "host_recompute_s"])
def test_times_below_zero_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        four(**{field: -1.0})


def test_a_launch_bound_profile_without_it_is_told_to_be_made_again() -> None:
    old = four(notes=("launch-bound: the host submits an iteration in 12 s",))
    assert any("profile again" in note for note in worded(memory_timeline(old, EVERY).notes))
    assert memory_timeline(old, MemoryPlan()).notes == ()
    assert memory_timeline(four(), EVERY).notes == ()
    assert memory_timeline(hosted(old, 12.0, 8.0), EVERY).notes == ()
    bucket = Bucket(gradients=tuple(gradient.name for gradient in old.gradients), communicator=0)
    plan = Plan(strategy="custom", model="four", workers=1, communicators=1, buckets=(bucket,), memory=EVERY)
    alone = Network.load("10gbe").at(workers=1)
    assert any("profile again" in note for note in worded(predict(old, alone, plan).notes))
