"""No plan beats the bound: every bucketing of small problems, any order, any communicators, any measured curve."""

from __future__ import annotations

import random as randomness

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost import Curve, LinkCost
from backbeat.cost.bound import communication_bound
from backbeat.model import Network, Profile
from backbeat.planners.planned import predicted
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import Schedule
from tests.problems import affine, every_partition, make_profile, networks, profiles

ROUNDING = 1 + 1e-9


def bound_of(profile: Profile, cost: LinkCost, communicators: int) -> float:
    return communication_bound(profile.ready, profile.sizes, cost, communicators)


@st.composite
def measured_costs(draw: st.DrawFn) -> LinkCost:
    """Curves that bend anywhere, with times in a row above and below the isolated ones, and any e(n) and u(n)."""
    sizes = [2**power for power in range(8, 26, 3)]

    def times() -> list[float]:
        steps = draw(st.lists(st.sampled_from([0.0, 1e-6, 1e-4, 2e-3, 3e-2]), min_size=6, max_size=6))
        return np.cumsum(steps).tolist()

    slope = draw(st.sampled_from([0.0, 1e-10, 1e-9, 1e-8]))
    busy = Curve(sizes, times(), slope) if draw(st.booleans()) else None
    counts = st.sampled_from([2, 3, 4])
    efficiencies = draw(st.dictionaries(counts, st.sampled_from([0.4, 0.9, 1.0, 1.3, 2.0]), max_size=2))
    stretches = draw(st.dictionaries(counts, st.sampled_from([1.0, 1.4, 2.0]), max_size=2))
    return LinkCost(Curve(sizes, times(), slope), busy, efficiencies, stretches)


costs = measured_costs() | networks().map(lambda network: network.cost)


@given(profiles(most=9), costs)
def test_no_bucketing_beats_the_bound_on_one_communicator(profile: Profile, cost: LinkCost) -> None:
    bound = bound_of(profile, cost, 1)
    for ends in every_partition(len(profile.gradients)):
        assert bound <= BucketTravel(Schedule.of_ends(profile, ends), profile.backward_s).at(cost)[0].end_s * ROUNDING


@given(profiles(most=9), costs, st.integers(2, 5), st.randoms(use_true_random=False))
def test_no_bucketing_beats_the_bound_on_several(
    profile: Profile, cost: LinkCost, communicators: int, random: randomness.Random
) -> None:
    bound = bound_of(profile, cost, communicators)
    for ends in every_partition(len(profile.gradients)):
        in_turn = [index % communicators for index in range(len(ends))]
        anywhere = [random.randrange(communicators) for _ in ends]
        for assignment in (in_turn, anywhere):
            schedule = Schedule.of_ends(profile, ends, assignment)
            assert bound <= BucketTravel(schedule, profile.backward_s).at(cost)[0].end_s * ROUNDING


@given(profiles(most=12), costs, st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_other_order_beats_the_bound(
    profile: Profile, cost: LinkCost, communicators: int, random: randomness.Random
) -> None:
    """Buckets of gradients that do not follow each other, launched in any order."""
    bound = bound_of(profile, cost, communicators)
    count = len(profile.gradients)
    for _ in range(10):
        order = random.sample(range(count), count)
        buckets = [
            order[first:last]
            for ends in [[*sorted(random.sample(range(1, count), random.randrange(count))), count]]
            for first, last in zip([0, *ends], ends, strict=False)
        ]
        schedule = Schedule(
            np.array([profile.ready[max(members)] for members in buckets]),
            np.array([profile.sizes[members].sum() for members in buckets]),
            [random.randrange(communicators) for _ in buckets],
        )
        assert bound <= BucketTravel(schedule, profile.backward_s).at(cost)[0].end_s * ROUNDING


@given(profiles(most=5), costs)
def test_more_communicators_than_gradients_are_of_no_use(profile: Profile, cost: LinkCost) -> None:
    assert bound_of(profile, cost, 10**12) == communication_bound(
        profile.ready, profile.sizes, cost, len(profile.gradients)
    )


@given(profiles(most=20), networks(busy=False), st.integers(1, 3))
def test_bytes_and_latency_are_never_counted_for_less(profile: Profile, network: Network, communicators: int) -> None:
    """Gradients after the i-th take the least latency and the least link time per byte."""
    cost = network.cost
    latency, per_byte = cost.cheapest(float(profile.sizes.min()), float(profile.sizes.sum()))
    remaining = np.cumsum(profile.sizes[::-1])[::-1]
    plain = (profile.ready + latency + per_byte / cost.best_efficiency(communicators) * remaining).max()
    assert bound_of(profile, cost, communicators) >= plain * (1 - 1e-9)


def test_a_message_that_finds_the_link_idle_is_faster_only_once() -> None:
    """A shaped link lets 1 MB through at once; in a row each takes 10 ms."""
    cost = LinkCost(Curve([10**6], [1e-3], 1e-8), Curve([10**6], [1e-2], 1e-8), {})
    profile = make_profile([10**6] * 5, [0.0] * 5)
    assert bound_of(profile, cost, 1) == pytest.approx(1e-3 + 4e-2)


def test_a_gradient_larger_than_the_rest_has_the_link_to_itself_in_the_end() -> None:
    """Two at once do twice the work, but 4 MB are one message: 4 ms, however fast the other."""
    cost = LinkCost(Curve.affine(0.0, 1e-9), None, {2: 2.0})
    profile = make_profile([4 * 10**6, 10**6], [0.0, 0.0])
    assert bound_of(profile, cost, 2) == pytest.approx(4e-3)
    assert predicted(profile, affine(0.0, 1e-9), "best").gap == pytest.approx(0, abs=1e-9)


def test_communicators_carry_latencies_too() -> None:
    """Ten messages of 1 ms of latency that cannot be merged cheaply: two communicators carry five each."""
    cost = LinkCost(Curve([1000, 2000], [1e-3, 1.0], 0.0))
    profile = make_profile([1000] * 10, [0.0] * 10)
    assert bound_of(profile, cost, 2) == pytest.approx(5e-3)


def test_gradients_without_bytes() -> None:
    profile = make_profile([0, 0], [0.0, 1e-3])
    assert bound_of(profile, LinkCost(Curve.affine(1e-3, 1e-9)), 2) == pytest.approx(2e-3)
