"""Other batch sizes of a profile with blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Plan, Profile
from backbeat.model.batches import at_batch, join
from backbeat.model.resident import ResidentMemory
from backbeat.planners.max_batch import largest_batch, largest_looked_at
from backbeat.planners.memory_plan import usable
from backbeat.planners.planned import planned as plan
from backbeat.steps.memory_timeline import memory_timeline
from tests.chains import resnet152
from tests.problems import affine, make_profile
from validation.memory.growth import _planned, batches, growth

GB = 10**9


def test_in_proportion_and_through_two_profiles_agree_where_all_is_proportional() -> None:
    one, two, wanted = resnet152(64), resnet152(128), resnet152(96)
    by_proportion, through = at_batch(one, 96), at_batch(join(one, two), 96)
    for there in (by_proportion, through):
        assert there.batch_size == 96
        assert memory_timeline(there, MemoryPlan()).peak_bytes == pytest.approx(
            memory_timeline(wanted, MemoryPlan()).peak_bytes, rel=1e-6
        )
        assert there.forward_s == pytest.approx(wanted.forward_s)
        assert there.gradients[-1].ready_s == pytest.approx(wanted.gradients[-1].ready_s)
    assert any("extrapolated" in note for note in by_proportion.notes)


def test_what_is_fixed_does_not_grow_with_two_profiles() -> None:
    def with_fixed_part(batch: int) -> Profile:
        profile = resnet152(batch)
        blocks = tuple(replace(block, saved_bytes=block.saved_bytes + GB // 100) for block in profile.blocks)
        return replace(profile, blocks=blocks)

    one, two, wanted = (with_fixed_part(batch) for batch in (64, 128, 256))
    there = at_batch(join(one, two), 256)
    assert [block.saved_bytes for block in there.blocks] == [block.saved_bytes for block in wanted.blocks]
    assert at_batch(one, 256).blocks[0].saved_bytes > there.blocks[0].saved_bytes


def test_weights_do_not_grow() -> None:
    small, large = (ResidentMemory.of(at_batch(resnet152(64), batch)) for batch in (64, 640))
    same = {kind: small.by_kind[kind] == large.by_kind[kind] for kind in ("parameters", "optimizer", "gradients")}
    assert all(same.values()), same
    batch, buffers = small.by_kind["other"] - 600_000, 600_000
    assert large.by_kind["other"] == pytest.approx(10 * batch + buffers)


def test_a_plan_lets_the_batch_grow_several_times() -> None:
    whole, planned = batches(resnet152(64), 8 * GB)
    profile = resnet152(64)
    assert memory_timeline(at_batch(profile, whole), MemoryPlan()).peak_bytes <= usable(8 * GB)
    assert memory_timeline(at_batch(profile, whole + 8), MemoryPlan()).peak_bytes > usable(8 * GB)
    assert planned > 4 * whole


def test_the_search_ends_at_a_batch_that_can_be_asked_for() -> None:
    profile = resnet152(64)
    assert batches(profile, 10**18) == (largest_looked_at(profile),) * 2


def test_a_batch_measured_without_these_blocks_does_not_count() -> None:
    one = resnet152(64)
    pair = join(one, replace(resnet152(128), blocks=one.blocks[:-1]))
    assert batches(pair, 8 * GB) == batches(one, 8 * GB)


def test_no_samples_are_refused() -> None:
    one = resnet152(64)
    with pytest.raises(InputError, match="at least one sample"):
        at_batch(one, 0)
    with pytest.raises(InputError, match="not even a batch of one"):
        batches(one, GB // 2)


@pytest.mark.parametrize("profiled", [64, 2])
def test_compressed_buckets_leave_less_to_a_batch_kept_whole(profiled: int) -> None:
    """The largest batch whose gradients fit is too large for residuals and scratch; the next that fits is found, not
    the profile's own."""
    profile, network = Profile.load("resnet50-b64-bf16-h200"), affine(1e-3, 1e-8, workers=4)
    profile = at_batch(profile, profiled) if profiled != 64 else profile

    def schedule(there: Profile) -> Plan:
        return plan(there, network, "compressed", density=0.01, memory_bytes=3 * GB)

    whole, _ = batches(profile, 3 * GB, workers=4)
    kept = [point.batch_size for point in growth(profile, network, 3 * GB, schedule) if point.kept]
    assert kept
    assert whole / 2 < kept[-1] < whole


def test_where_no_batch_can_be_planned_the_reason_of_the_smallest_is_told() -> None:
    def refused(profile: Profile) -> Plan:
        raise InputError(f"nothing fits a batch of {profile.batch_size}")

    with pytest.raises(InputError, match=r"batch of 1$"):
        _planned(Profile.load("gpt2-b8-bf16-h200"), 8, refused)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1, max_size=5),
    st.integers(0, 10**12),
    st.integers(1, 100),
)
def test_the_largest_batch_is_found_whatever_takes_most(
    moments: list[tuple[int, int]], room: int, profiled: int
) -> None:
    """What each moment holds is a fixed part and one that grows with the batch."""
    profile = replace(make_profile([4], [1e-3]), batch_size=profiled)

    def peak(there: Profile) -> int:
        return max(fixed + there.batch_size * each for fixed, each in moments)

    found = largest_batch(profile, room, peak)
    assert found == 0 or peak(at_batch(profile, found)) <= room
    if found < largest_looked_at(profile):
        assert peak(at_batch(profile, found + (1 if found < 32 else 8))) > room
    if peak(profile) <= room:
        assert found >= profiled
