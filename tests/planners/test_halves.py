"""Reduce-scatter behind backward, all-gather behind the next forward."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import CollectiveTimes, Network, Profile
from backbeat.model.plan import Bucket, Plan
from backbeat.planners.halves import plan_in_halves
from backbeat.simulate.halves_step import period
from tests.problems import affine, curve, make_profile, networks, profiles


def with_forward(profile: Profile, seconds: list[float]) -> Profile:
    """The profile with these forward times, in ready order, and an update."""
    gradients = tuple(
        replace(gradient, forward_s=time) for gradient, time in zip(profile.gradients, seconds, strict=True)
    )
    return replace(profile, gradients=gradients, forward_s=sum(seconds), update_s=1e-3)


@st.composite
def decoupled_profiles(draw: st.DrawFn, most: int = 12) -> Profile:
    profile = draw(profiles(most=most))
    count = len(profile.gradients)
    return with_forward(
        profile, draw(st.lists(st.sampled_from([0.0, 1e-4, 1e-3, 4e-3]), min_size=count, max_size=count))
    )


def test_a_period_by_hand() -> None:
    # Backward: g1 at 1 ms, g0's layer at 2 ms. Halves take 0.5 ms + 0.5 ns/byte: 1 ms each.
    profile = with_forward(make_profile([10**6, 10**6], [1e-3, 2e-3]), [3e-3, 3e-3])
    plan = plan_in_halves(profile, [1, 2], [1, 2], 8)
    found = period(profile, plan, affine(1e-3, 1e-9))
    assert found.scatters == [pytest.approx((1e-3, 2e-3)), pytest.approx((2e-3, 3e-3))]
    assert found.gathers == [pytest.approx((3e-3, 4e-3)), pytest.approx((4e-3, 5e-3))]
    # Forward may start at 2 ms and waits for its first layer until 4; half the update and 3 ms a layer.
    assert found.stalled_s == pytest.approx(2e-3)
    assert found.forward_end_s == pytest.approx(4e-3 + 2 * 3.5e-3)
    result = bb.predict(profile, affine(1e-3, 1e-9), plan)
    assert result.iteration_s == pytest.approx(11e-3)
    assert result.exposed_s == pytest.approx(2e-3)
    names = [span.name for span in result.timeline if span.lane == "communicator 0"]
    assert names == ["scatter g0", "scatter g1", "gather g1", "gather g0"]


def test_what_backward_cannot_hide_forward_can() -> None:
    sizes = [4 * 10**6] * 10
    profile = with_forward(make_profile(sizes, [k * 1e-3 for k in range(1, 11)]), [3e-3] * 10)
    network = affine(1e-4, 1e-9)
    within, across = bb.predict(profile, network, "best"), bb.predict(profile, network, "halves")
    assert across.iteration_s < within.iteration_s
    assert across.iteration_s >= across.bound_s


@settings(max_examples=60)
@given(decoupled_profiles(most=6), networks())
def test_no_pair_of_groupings_does_better(profile: Profile, network: Network) -> None:
    count = len(profile.gradients)
    partitions = [[*cuts, count] for size in range(count) for cuts in combinations(range(1, count), size)]
    least = min(
        period(profile, plan_in_halves(profile, scatter, gather, 8), network).forward_end_s
        for scatter in partitions
        for gather in partitions
    )
    found = period(profile, bb.plan(profile, network, "halves"), network).forward_end_s
    assert found <= least * (1 + 1e-5)


@given(decoupled_profiles(), networks())
def test_the_bound_holds_and_the_parts_add_up(profile: Profile, network: Network) -> None:
    result = bb.predict(profile, network, "halves")
    assert result.iteration_s >= result.bound_s * (1 - 1e-9)
    parts = result.breakdown
    assert parts.bandwidth_s + parts.waiting_s == pytest.approx(result.exposed_s, abs=1e-9)


def test_measured_halves_are_used() -> None:
    profile = with_forward(make_profile([10**6], [1e-3]), [1e-3])
    slow = affine(
        1e-3,
        1e-9,
        all_gather=CollectiveTimes(alpha_s=0.0, beta_s_per_byte=1e-8),
        reduce_scatter=CollectiveTimes(alpha_s=0.0, beta_s_per_byte=2e-8),
    )
    found = period(profile, bb.plan(profile, slow, "halves"), slow)
    assert np.diff(found.scatters[0]) == pytest.approx(20e-3)
    assert np.diff(found.gathers[0]) == pytest.approx(10e-3)


def test_profiles_without_forward_times_say_that_they_are_guessed() -> None:
    profile = make_profile([10**6, 10**6], [1e-3, 2e-3], forward=3e-3)
    assert any("guessed" in note for note in bb.plan(profile, affine(1e-3, 1e-9), "halves").notes)


def test_halves_that_do_not_match_are_refused() -> None:
    def plan(*buckets: Bucket) -> bb.Plan:
        return bb.Plan(strategy="x", model="x", communicators=1, buckets=buckets)

    scatter = Bucket(gradients=("a",), communicator=0, phase="reduce_scatter")
    gather = Bucket(gradients=("a",), communicator=0, phase="all_gather")
    assert plan(scatter, gather).in_halves
    with pytest.raises(bb.InputError, match="'a' is scattered but never gathered"):
        plan(scatter)
    with pytest.raises(bb.InputError, match="gathers 'a' before it is scattered"):
        plan(gather, scatter)
    with pytest.raises(bb.InputError, match="some buckets have a phase"):
        plan(scatter, gather, Bucket(gradients=("b",), communicator=0))
    profile = make_profile([1, 1], [0.0, 0.0])
    part = bb.Plan(
        strategy="x",
        model="x",
        communicators=1,
        buckets=tuple(
            Bucket(gradients=("g0",), communicator=0, phase=phase) for phase in ("reduce_scatter", "all_gather")
        ),
    )
    with pytest.raises(bb.InputError, match="leaves out 'g1'"):
        bb.predict(profile, affine(1e-3, 1e-9), part)
    with pytest.raises(bb.InputError, match="one communicator"):
        bb.plan(profile, affine(1e-3, 1e-9), "halves", communicators=2)


@given(decoupled_profiles(), networks(), st.integers(1, 3))
def test_the_timeline_is_one_period_without_gaps_in_time(profile: Profile, network: Network, accumulation: int) -> None:
    result = bb.predict(profile, network, "halves", accumulation=accumulation)
    assert all(0 <= span.start_s <= span.end_s + 1e-12 for span in result.timeline)
    assert max(span.end_s for span in result.timeline) == pytest.approx(result.iteration_s)


def test_halves_may_alternate_in_the_file() -> None:
    profile = with_forward(make_profile([10**6, 2 * 10**6], [1e-3, 2e-3]), [3e-3, 3e-3])
    pairs = [("reduce_scatter", "g0"), ("all_gather", "g0"), ("reduce_scatter", "g1"), ("all_gather", "g1")]
    plan = Plan(
        strategy="custom",
        model="test",
        communicators=1,
        buckets=tuple(Bucket(gradients=(name,), communicator=0, phase=phase) for phase, name in pairs),
    )
    spans = [span for span in bb.predict(profile, affine(1e-3, 1e-9), plan).timeline if span.lane != "compute"]
    assert [(span.name, span.bytes) for span in spans] == [
        ("scatter g0", 10**6),
        ("scatter g1", 2 * 10**6),
        ("gather g0", 10**6),
        ("gather g1", 2 * 10**6),
    ]


def test_the_bound_holds_where_small_messages_are_cheaper_per_byte() -> None:
    # Noise has put the middle of the curve above its largest point: many messages need less link time than one.
    network = curve([(1024, 1e-5), (10**6, 1e-3), (2 * 10**7, 2e-1), (4 * 10**7, 2.2e-1)], workers=2)
    profile = with_forward(make_profile([10**6] * 30, [1e-3] * 30), [1e-4] * 30)
    result = bb.predict(profile, network, "halves")
    assert result.iteration_s >= result.bound_s * (1 - 1e-9)
