"""The host's time as a floor under a memory plan: it submits recomputed blocks twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.model import Bucket, MemoryPlan, Network, Plan, Profile, Segment
from backbeat.planners.memory_plan import uniform
from backbeat.simulate.batch import at_batch
from backbeat.simulate.memory_timeline import Chain, memory_timeline
from backbeat.simulate.predict import predict
from backbeat.simulate.resident_memory import ResidentMemory
from tests.chains import chains, check_against_uniform, resnet152
from tests.simulate.test_memory_course import four, segment, unit_lists

EVERY = MemoryPlan(segments=tuple(segment(place) for place in range(4)))


def hosted(profile: Profile, host_s: float | None, recompute_s: float | None) -> Profile:
    return msgspec.structs.replace(profile, host_s=host_s, host_recompute_s=recompute_s)


def test_a_host_that_sets_the_pace_stretches_backward_by_hand() -> None:
    # Forward and backward take 12, all of it the host's; every forward again takes the device 4 and the host 8.
    result = memory_timeline(four(host_s=12.0, host_recompute_s=8.0), EVERY)
    assert (result.forward_s, result.backward_s) == (4.0, 16.0)
    # On the device alone blocks start at 1, 4, 7 and 10 and their gradients come 2 after that: all a third later.
    ready = [gradient.ready_s for gradient in result.profile.gradients]
    assert ready == pytest.approx([3 * 4 / 3, 6 * 4 / 3, 9 * 4 / 3, 16.0])
    assert (result.profile.host_s, result.profile.host_recompute_s) == (None, None)


def test_half_of_the_blocks_cost_half_as_much() -> None:
    half = MemoryPlan(segments=(segment(0, 1),))
    assert memory_timeline(four(host_s=12.0, host_recompute_s=8.0), half).backward_s == pytest.approx(8.0 + 4.0)


def test_an_offloaded_block_is_taken_to_cost_the_host_as_much() -> None:
    profile = four(host_s=12.0, host_recompute_s=1000.0)
    plan = MemoryPlan(segments=(segment(0, action="offload"),))
    result = memory_timeline(profile, plan)
    assert result.forward_s + result.backward_s == pytest.approx(12.0 + 250.0)


def test_a_host_that_is_ahead_may_fall_back_that_far() -> None:
    plain = memory_timeline(four(), EVERY)
    for host_s in (0.0, 6.0, 8.0):
        assert memory_timeline(four(host_s=host_s, host_recompute_s=8.0), EVERY).backward_s == plain.backward_s
    assert memory_timeline(four(host_s=9.0, host_recompute_s=8.0), EVERY).backward_s == pytest.approx(13.0)


def test_what_the_host_takes_is_shared_by_micro_batches() -> None:
    # Two micro-batches of 12; the host is 6 ahead in all, 3 in each.
    result = memory_timeline(four(accumulation=2, host_s=18.0, host_recompute_s=8.0), EVERY)
    assert result.forward_s + result.backward_s == pytest.approx(12.0 - 3.0 + 8.0)


@given(st.data(), chains(), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_never_below_the_device_and_the_same_where_the_host_is_unknown_or_free(
    data: st.DataObject, profile: Profile, host: float, again: float
) -> None:
    alone = Chain.of(profile, ResidentMemory.of(profile))
    units = data.draw(unit_lists(alone))
    expected = alone.run(units)

    def run(host_s: float | None, recompute_s: float | None) -> Chain:
        known = hosted(profile, host_s, recompute_s)
        return Chain.of(known, ResidentMemory.of(known))

    for chain in (run(None, None), run(host, None), run(None, again), run(0.0, 0.0), run(host, 0.0)):
        assert chain.run(units) == expected
    chain = run(host * profile.single_s, again * profile.single_s)
    found = chain.run(units)
    assert found.time_s >= expected.time_s * (1 - 1e-12)
    assert found.peak_bytes == expected.peak_bytes
    assert found.forward_s == expected.forward_s
    assert all(0.0 <= start <= found.backward_s * (1 + 1e-9) for start in found.starts)
    keep = uniform(chain)["keep"]
    assert chain.run(keep) == alone.run(keep)
    # The changed profile is one: ready times in order, none behind the end of backward, all stretched alike.
    stretch = found.backward_s / expected.backward_s if expected.backward_s > 0 else 1.0
    for slow, fast in zip(
        chain.changed(profile, found).gradients, alone.changed(profile, expected).gradients, strict=True
    ):
        assert slow.ready_s == pytest.approx(fast.ready_s * stretch, rel=1e-9, abs=1e-12)


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
    assert memory_timeline(larger, every).backward_s == memory_timeline(at_batch(profile, 256), every).backward_s
    assert memory_timeline(known, every).backward_s >= memory_timeline(profile, every).backward_s


@pytest.mark.parametrize("field", ["host_s", "host_recompute_s"])
def test_times_below_zero_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        four(**{field: -1.0})


def test_a_launch_bound_profile_without_it_is_told_to_be_made_again() -> None:
    old = four(notes=("launch-bound: the host submits an iteration in 12 s",))
    assert any("profile again" in note for note in memory_timeline(old, EVERY).notes)
    assert memory_timeline(old, MemoryPlan()).notes == ()
    assert memory_timeline(four(), EVERY).notes == ()
    assert memory_timeline(hosted(old, 12.0, 8.0), EVERY).notes == ()
    bucket = Bucket(gradients=tuple(gradient.name for gradient in old.gradients), communicator=0)
    plan = Plan(strategy="custom", model="four", workers=1, communicators=1, buckets=(bucket,), memory=EVERY)
    alone = Network.load("10gbe").at(workers=1)
    assert any("profile again" in note for note in predict(old, alone, plan).notes)
