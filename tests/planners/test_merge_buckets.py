"""Fewer buckets: nothing ends later, on the link as predicted or on a slower one, and none becomes too large."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost import Curve, LinkCost
from backbeat.model import Network, Profile
from backbeat.model.framework import DDP_BUCKET_BYTES
from backbeat.planners.draft import Draft
from backbeat.planners.merge_buckets import SLOWER, Conditions, iteration_s, merged, possible_costs, simplified
from backbeat.planners.optimal import best_ends, merged_ends, plenty_ends
from backbeat.planners.planned import planned, predicted
from tests.problems import affine, curve, make_profile, networks, profiles


@given(profiles(most=30), networks(), st.randoms(use_true_random=False))
def test_no_bucket_that_ends_the_plan_ends_later(profile: Profile, network: Network, random) -> None:
    count = len(profile.gradients)
    for ends in (best_ends(profile, network.cost), [*sorted(random.sample(range(1, count), count // 2)), count]):
        found = merged_ends(profile, network.cost, ends)
        assert set(found) <= set(ends)
        for cost in possible_costs(network.cost):
            assert Draft(found).end_s(profile, cost) <= Draft(ends).end_s(profile, cost) * (1 + 1e-9)


@given(profiles(most=30), networks())
def test_a_bucket_outgrows_the_stock_one_only_where_one_did(profile: Profile, network: Network) -> None:
    ends = best_ends(profile, network.cost)
    sizes = [float(profile.sizes[first:last].sum()) for first, last in pairwise([0, *ends])]
    found = merged_ends(profile, network.cost, ends)
    assert max(float(profile.sizes[first:last].sum()) for first, last in pairwise([0, *found])) <= max(
        DDP_BUCKET_BYTES, *sizes
    )


@given(profiles(most=20), networks())
def test_merging_again_changes_nothing(profile: Profile, network: Network) -> None:
    once = merged_ends(profile, network.cost, best_ends(profile, network.cost))
    assert merged_ends(profile, network.cost, once) == once


def test_what_hides_behind_backward_goes_in_few_buckets() -> None:
    ready = [index * 1e-3 for index in range(100)]
    profile = make_profile([100_000] * 100, ready)
    network = affine(1e-5, 1e-10)
    plan = planned(profile, network, "optimal")
    assert len(best_ends(profile, network.cost)) > 50
    # One that the last does not wait for, 1 ms being too little for it on a slower link; the one before; the last.
    assert [len(bucket.gradients) for bucket in plan.buckets] == [98, 1, 1]
    assert plan.predicted is not None
    alone = predicted(profile, network, Draft(best_ends(profile, network.cost)).named(profile, "optimal", 8))
    assert plan.predicted.iteration_s == pytest.approx(alone.iteration_s, rel=1e-12)


def test_a_plan_keeps_slack_for_a_slower_link() -> None:
    # Two of 1 ms each may wait for one another if messages take just as long as predicted, and no longer.
    cost = LinkCost(Curve.affine(0.0, 1e-9))
    conditions = Conditions(sums=np.array([0.0, 1e6, 2e6, 3e6]), cost=cost, ready=np.array([0.0, 2e-3, 4e-3]))
    slower = Conditions(sums=conditions.sums, cost=cost.slower(SLOWER), ready=conditions.ready)
    assert merged([1, 2, 3], [conditions]) == [2, 3]
    assert merged([1, 2, 3], [conditions, slower]) == [1, 2, 3]


def test_a_latency_that_is_saved_makes_up_for_no_idle_link() -> None:
    # Each message takes 3 ms of latency and 1 ms of the link; one by one they end at 12 ms, as one at 8.
    cost = LinkCost(Curve.affine(3e-3, 1e-9))
    shared = {"sums": np.array([0.0, 1e6, 2e6, 3e6]), "ready": np.array([0.0, 1e-3, 2e-3])}
    assert merged([1, 2, 3], [Conditions(cost=cost, **shared)]) == [3]
    # Were latencies hidden, the link would have begun at 0 and been done at 3 ms.
    assert merged([1, 2, 3], [Conditions(cost=one, **shared) for one in possible_costs(cost)]) == [1, 2, 3]


def test_a_bucket_does_not_outgrow_what_was_measured() -> None:
    points = [(1000, 1e-5), (1_000_000, 1e-4)]
    profile = make_profile([400_000] * 10, [index * 1e-2 for index in range(10)])
    assert [len(bucket.gradients) for bucket in planned(profile, curve(points), "optimal").buckets] == [2] * 4 + [1] * 2
    assert len(planned(profile, affine(1e-5, 1e-10), "optimal").buckets) == 2


def longest(ends: list[int], profile: Profile) -> float:
    return max(float(profile.sizes[first:last].sum()) for first, last in pairwise([0, *ends]))


@given(profiles(most=40), networks(), st.randoms(use_true_random=False))
def test_buckets_on_several_communicators_are_merged_by_the_same_rules(
    profile: Profile, network: Network, random
) -> None:
    count = len(profile.gradients)
    draft = Draft([*sorted(random.sample(range(1, count), count - 1 - count // 4)), count], 2)
    found = simplified(draft, profile, network.cost)
    assert set(found.ends) <= set(draft.ends)
    assert longest(found.ends, profile) <= max(DDP_BUCKET_BYTES, longest(draft.ends, profile))
    for cost in possible_costs(network.cost):
        least = max(draft.end_s(profile, cost), profile.backward_s)
        assert max(found.end_s(profile, cost), profile.backward_s) <= least * (1 + 1e-9)


@pytest.mark.parametrize(("gradients", "size"), [(300, 2_000_000), (1500, 500_000)])
def test_many_buckets_on_two_communicators_become_few(gradients: int, size: int) -> None:
    profile = make_profile([size] * gradients, [1e-3 * index for index in range(gradients)])
    cost = affine(1e-3, 1e-10).cost
    found = simplified(Draft(plenty_ends(profile, cost), 2), profile, cost)
    # The last few are small; all others are as large as a bucket may be.
    assert len(found.ends) <= gradients * size / DDP_BUCKET_BYTES + 4


@given(profiles(most=30), networks(), st.sampled_from([0.0, 0.01, 0.1]))
def test_slack_is_a_share_of_the_iteration(profile: Profile, network: Network, slack: float) -> None:
    ends = best_ends(profile, network.cost)
    for found, before in (
        (Draft(merged_ends(profile, network.cost, ends, slack)), Draft(ends)),
        (simplified(Draft(ends, 2), profile, network.cost, slack=slack), Draft(ends, 2)),
    ):
        for cost in possible_costs(network.cost):
            least = iteration_s(profile, before.end_s(profile, cost))
            assert iteration_s(profile, found.end_s(profile, cost)) <= least * (1 + slack + 1e-9)


def test_one_message_costs_what_many_do() -> None:
    found = curve([(256, 1e-5), (2048, 2e-5), (10**6, 1e-4), (10**7, 1e-3)]).cost.isolated
    sizes = [0.0, 1.0, 256.0, 300.0, 2048.0, 1e6, 3.7e7, 1e10]
    assert [found.at(size) for size in sizes] == pytest.approx(found.time(sizes).tolist(), rel=1e-12)
    assert found.slower(2.0).time(sizes).tolist() == pytest.approx((2 * found.time(sizes)).tolist(), rel=1e-12)
