"""Buckets beside backward: the recursion, the engine, and where they must agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.cost import Curve, LinkCost
from backbeat.engine import SharedLink, run
from backbeat.model import Network, Profile
from backbeat.steps.bucket_graph import BucketStep, BucketTravel, bucket_graph
from backbeat.steps.schedule import Flow, Schedule, one_by_one
from tests.problems import affine, networks, profiles

PLAIN = LinkCost(Curve.affine(1e-3, 1e-9))


def schedule(ready: list[float], sizes: list[float], communicators: list[int]) -> Schedule:
    return Schedule(np.array(ready), np.array(sizes, dtype=float), communicators)


def recursion(buckets: Schedule, cost: LinkCost) -> Flow:
    return one_by_one(buckets.ready, cost.times(buckets.sizes))


def by_engine(buckets: Schedule, cost: LinkCost) -> Flow:
    """On one communicator, too."""
    step = BucketStep(
        schedule=buckets, times=cost.times(buckets.sizes), link=SharedLink.of(cost), forward_s=0.0, backward_s=0.0,
        update_s=0.0,
    )  # fmt: skip
    made = bucket_graph(step)
    return made.flow(run(made.graph))[0]


@st.composite
def schedules(draw: st.DrawFn, most_communicators: int = 1) -> Schedule:
    profile = draw(profiles(most=12))
    count = len(profile.gradients)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count - 1))) if count > 1 else []
    ends = [*cuts, count]
    communicators = draw(st.lists(st.integers(0, most_communicators - 1), min_size=len(ends), max_size=len(ends)))
    return Schedule.of_ends(profile, ends, communicators)


@settings(max_examples=300)
@given(schedules(), networks())
def test_with_one_communicator_the_engine_is_the_recursion(buckets: Schedule, network: Network) -> None:
    expected, found = recursion(buckets, network.cost), by_engine(buckets, network.cost)
    for field in ("starts", "on_link", "finishes"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-9, abs=1e-12)


@given(schedules(), networks(busy=False))
def test_without_back_to_back_times_the_recursion_is_the_plain_one(buckets: Schedule, network: Network) -> None:
    free = 0.0
    for ready, size, finish in zip(
        buckets.ready, buckets.sizes, recursion(buckets, network.cost).finishes, strict=True
    ):
        free = max(ready, free) + float(network.cost.time(size))
        assert finish == pytest.approx(free)


def test_back_to_back_messages_take_their_own_time() -> None:
    cost = LinkCost(Curve.affine(1e-3, 1e-9), Curve.affine(5e-4, 1e-9), {})
    flow = recursion(schedule([0, 0, 10e-3], [1e6, 1e6, 1e6], [0, 0, 0]), cost)
    assert flow.finishes == pytest.approx([2e-3, 3.5e-3, 12e-3])


def test_two_communicators_hide_latency_and_share_the_link() -> None:
    flow = by_engine(schedule([0, 0], [1e6, 2e6], [0, 1]), PLAIN)
    # Both start up until 1 ms; half the link each until the small one is done at 3 ms; then the rest at full speed.
    assert flow.finishes == pytest.approx([3e-3, 4e-3])


def test_contention_and_idle_capacity() -> None:
    buckets = schedule([0, 0], [1e6, 1e6], [0, 1])
    for efficiency in (0.5, 1.0, 1.6):
        cost = LinkCost(Curve.affine(1e-3, 1e-9), None, {2: efficiency})
        assert by_engine(buckets, cost).end_s == pytest.approx(1e-3 + 2e-3 / efficiency)


@pytest.mark.parametrize("stretch", [1.0, 1.5, 2.0])
def test_the_engine_gives_back_the_batches_it_was_fitted_to(stretch: float) -> None:
    cost = LinkCost(Curve.affine(1e-3, 1e-9), None, {2: 0.8}, {2: stretch})
    for messages in (2, 4, 8):
        buckets = schedule([0.0] * messages, [1e6] * messages, [index % 2 for index in range(messages)])
        assert by_engine(buckets, cost).end_s == pytest.approx(cost.batch_s(1e6, messages, 2))


def test_launches_keep_the_plans_order_across_communicators() -> None:
    # The second bucket is ready first but may not overtake the first.
    flow = by_engine(schedule([5e-3, 0], [1e6, 1e6], [0, 1]), PLAIN)
    assert flow.starts.tolist() == [5e-3, 5e-3]


def test_a_bucket_waits_for_its_communicator_and_holds_those_behind_it() -> None:
    flow = by_engine(schedule([0, 0, 0], [1e6, 1e6, 1e6], [0, 0, 1]), PLAIN)
    assert flow.starts.tolist() == pytest.approx([0, 2e-3, 2e-3])


@given(schedules(most_communicators=3), networks())
def test_the_link_is_never_overdrawn_and_nothing_is_early(buckets: Schedule, network: Network) -> None:
    cost = network.cost
    flow = by_engine(buckets, cost)
    assert (flow.starts >= buckets.ready - 1e-12).all()
    assert (np.diff(flow.starts) >= -1e-12).all()
    assert (flow.finishes >= flow.on_link - 1e-12).all()
    most = cost.best_efficiency(3)
    span = flow.end_s - flow.on_link.min()
    least = np.minimum(cost.times(buckets.sizes).transfer, cost.time(buckets.sizes)).sum()
    assert least / most <= span * (1 + 1e-9) + 1e-12
    for communicator in set(buckets.communicators):
        mine = [index for index, other in enumerate(buckets.communicators) if other == communicator]
        for before, after in itertools.pairwise(mine):
            assert flow.on_link[after] >= flow.finishes[before] - 1e-12


@given(profiles(), networks())
def test_more_bytes_never_end_earlier(profile: Profile, network: Network) -> None:
    buckets = Schedule.of_ends(profile, list(range(1, len(profile.gradients) + 1)))
    larger = Schedule(buckets.ready, buckets.sizes * 2, buckets.communicators)
    assert recursion(larger, network.cost).end_s >= recursion(buckets, network.cost).end_s - 1e-12


def test_communicator_numbers_may_be_large() -> None:
    far = Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 10**12])
    near = Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1])
    cost = affine(1e-3, 1e-9).cost
    assert by_engine(far, cost).finishes.tolist() == by_engine(near, cost).finishes.tolist()


@given(schedules(most_communicators=3), networks(), st.sampled_from([1.0, 1.5]), st.data())
def test_a_second_network_is_as_if_it_were_the_first(
    buckets: Schedule, network: Network, slowdown: float, data: st.DataObject
) -> None:
    other, slower = data.draw(networks()), data.draw(st.sampled_from([1.0, 1.2]))
    backward_s = float(buckets.ready.max()) + 1e-3
    compress_s = data.draw(st.sampled_from([None, [1e-4] * len(buckets.communicators)]))
    used = BucketTravel(buckets, backward_s, compress_s)
    used.at(network.cost, slowdown)
    found, expected = used.at(other.cost, slower), BucketTravel(buckets, backward_s, compress_s).at(other.cost, slower)
    assert found[1] == pytest.approx(expected[1], rel=1e-12, abs=1e-15)
    for one, same in zip(found[0], expected[0], strict=True):
        assert one == pytest.approx(same, rel=1e-12, abs=1e-15)


@settings(max_examples=200)
@given(schedules(most_communicators=3), networks())
def test_nothing_ends_before_it_can_at_the_earliest(buckets: Schedule, network: Network) -> None:
    travel = BucketTravel(buckets, float(buckets.ready.max()))
    assert travel.least_s(network.cost) <= travel.at(network.cost)[0].end_s * (1 + 1e-9) + 1e-12


@given(schedules(most_communicators=3), networks(), st.sampled_from([1.0, 1.5]))
def test_buckets_in_ready_order_share_a_graph(buckets: Schedule, network: Network, slowdown: float) -> None:
    """Whatever they hold: what was built for other times gives what is built for these."""
    travel = BucketTravel(buckets, float(buckets.ready.max()) + 1e-3)
    flow, backward_end_s = travel.at(network.cost, slowdown)
    step = BucketStep(
        schedule=buckets, times=network.cost.times(buckets.sizes), link=SharedLink.of(network.cost), forward_s=0.0,
        backward_s=travel.backward_s, update_s=0.0, slowdowns={"network": slowdown},
    )  # fmt: skip
    made = bucket_graph(step)
    expected, expected_end_s = made.flow(run(made.graph))
    assert flow.finishes == pytest.approx(expected.finishes, rel=1e-9, abs=1e-15)
    assert backward_end_s == pytest.approx(expected_end_s, rel=1e-9, abs=1e-15)
