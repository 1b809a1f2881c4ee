"""Buckets as a graph, against the recursion, the fixed point of contention, and what frameworks do with them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.engine import SharedLink, run
from backbeat.model import Bucket, Compression, Framework, Network, Plan, Profile
from backbeat.model.cluster import Cluster
from backbeat.model.framework import FRAMEWORKS, framework_named
from backbeat.model.slowdown import slowdown_of, together_s
from backbeat.planners.planned import planned
from backbeat.steps.bucket_graph import BucketGraph, BucketStep, BucketTravel, bucket_graph
from backbeat.steps.bucket_step import BucketWay, gather_parts
from backbeat.steps.schedule import CompressedCost, Flow, Schedule, compress_s, one_by_one
from tests.problems import affine, make_profile, networks, profiles
from tests.steps.fixed_point import contended
from tests.steps.stepped import stepped

CLOSE = {"rel": 1e-9, "abs": 1e-12}
ZOO = ("resnet50-b64-bf16-h200", "bert-large-b64-bf16-adamw-h200", "gpt2-b8-bf16-adamw-h200", "vgg16-b64-bf16-h200")
CLUSTERS = (("10gbe", 16), ("100gbe", 64), ("aws-p5en", 64), ("dgx-h100", 8), ("ib400", 256))


@st.composite
def bucketed(draw: st.DrawFn, *, communicators: int = 1, in_order: bool = False) -> tuple[Profile, Schedule]:
    """Random gradients in random buckets, sent in another order than they become ready, unless `in_order`."""
    profile = draw(profiles(most=12))
    count = len(profile.gradients)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count - 1))) if count > 1 else []
    found = Schedule.of_ends(profile, [*cuts, count])
    order = list(range(len(cuts) + 1))
    if not in_order and draw(st.booleans()):
        order = draw(st.permutations(order))
    lanes = draw(st.lists(st.integers(0, communicators - 1), min_size=len(order), max_size=len(order)))
    return profile, Schedule(found.ready[order], found.sizes[order], lanes)


def graph_of(
    profile: Profile, schedule: Schedule, cost: LinkCost, slowdowns: Mapping[str, float] | None = None
) -> BucketGraph:
    return bucket_graph(
        BucketStep(
            schedule=schedule,
            times=cost.times(schedule.sizes),
            link=SharedLink.of(cost),
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            update_s=profile.update_s,
            slowdowns=slowdowns or {},
        )
    )


def assert_same(mine: Flow, theirs: Flow) -> None:
    for field in ("starts", "on_link", "finishes"):
        assert getattr(mine, field) == pytest.approx(getattr(theirs, field), **CLOSE)


def shares_head_start(schedule: Schedule, cost: LinkCost) -> bool:
    """Whether buckets may reach an idle link together. They share its head start here; the events give all of it to the
    first of the plan."""
    starts = np.sort(BucketTravel(schedule, float(schedule.ready.max())).at(cost)[0].starts)
    times = cost.times(schedule.sizes)
    return bool((np.diff(starts) < 1e-9).any()) and bool((times.alone < times.transfer).any())


@settings(max_examples=300)
@given(bucketed(), networks())
def test_one_communicator_is_the_recursion(drawn: tuple[Profile, Schedule], network: Network) -> None:
    profile, schedule = drawn
    made = graph_of(profile, schedule, network.cost)
    assert not made.graph.shares_pace()
    assert_same(made.flow(run(made.graph))[0], one_by_one(schedule.ready, network.cost.times(schedule.sizes)))


@settings(max_examples=200)
@given(bucketed(communicators=3), networks(), st.sampled_from([1.1, 1.5, 2.0]))
def test_contention_is_where_its_fixed_point_is(
    drawn: tuple[Profile, Schedule], network: Network, slowdown: float
) -> None:
    """As the pace of computation it needs no repetition, and is the same."""
    profile, schedule = drawn
    assume(not shares_head_start(schedule, network.cost))

    def travel(ready: NDArray[np.float64]) -> Flow:
        return BucketTravel(dataclasses.replace(schedule, ready=ready), float(ready.max())).at(network.cost)[0]

    flow, clock = contended(travel, schedule.ready, slowdown)
    made = graph_of(profile, schedule, network.cost, {"network": slowdown})
    mine, backward_end_s = made.flow(run(made.graph))
    assert_same(mine, flow)
    assert backward_end_s == pytest.approx(float(clock.when(profile.backward_s)), **CLOSE)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("cluster", "gpus"), CLUSTERS)
def test_bundled_profiles_take_what_they_took(name: str, cluster: str, gpus: int) -> None:
    profile = Profile.load(name)
    network = Network.load(cluster).at(workers=gpus)
    for way in ("wfbp", "ddp", "best"):
        plan = planned(profile, network, way)
        schedule, _ = Schedule.of_plan(profile, plan)
        for slowdown in (1.0, slowdown_of(profile, network).factor):
            made = graph_of(profile, schedule, network.cost, {"network": slowdown})
            times = run(made.graph)
            found = stepped(profile, network, plan, slowdown=slowdown)
            assert times.end_s == pytest.approx(found.end_s, **CLOSE)


def test_a_quieter_network_is_the_same_graph_with_other_times() -> None:
    profile = Profile.load(ZOO[0])
    network = Network.load("aws-p5en").at(workers=64)
    way, plan = BucketWay, planned(profile, network, "ddp")
    used = way(profile, plan)
    used.on(network, 1.2, 1e-3)
    assert network.edges is not None
    for other in network.edges:
        assert used.on(other, 1.3, 2e-3).end_s == way(profile, plan).on(other, 1.3, 2e-3).end_s


CHANGED = [framework_named("megatron", **changed) for changed in ({"zero": 1}, {"overlap": "none"})]


@given(
    bucketed(in_order=True),
    networks(busy=False),
    st.sampled_from([*(one for one in FRAMEWORKS.values() if one.way is None), *CHANGED]),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.5]),
)
def test_frameworks_take_what_they_took(
    drawn: tuple[Profile, Schedule], network: Network, reduction: Framework, micro_batches: int, slowdown: float
) -> None:
    profile, schedule = drawn
    ends = np.cumsum([0, *(int(size) for size in schedule.sizes)])
    sums = np.cumsum([0, *profile.sizes.tolist()])
    bounds = [int(np.searchsorted(sums, end)) for end in ends]
    names = [one.name for one in profile.gradients]
    buckets = tuple(
        Bucket(gradients=tuple(names[first:last]), communicator=0) for first, last in itertools.pairwise(bounds)
    )
    plan = Plan(strategy="custom", model=profile.model, communicators=1, buckets=buckets)
    found = BucketWay(profile, plan, micro_batches, reduction).on(network, slowdown)
    expected = framework_s(profile, network, plan, reduction, micro_batches, slowdown)
    assert found.end_s == pytest.approx(expected, rel=1e-8)


def framework_s(
    profile: Profile, network: Network, plan: Plan, reduction: Framework, micro_batches: int, slowdown: float
) -> float:
    """Gathers, passes and updates one after the other, with buckets beside each backward that they overlap with."""
    schedule, _ = Schedule.of_plan(profile, plan)
    cost, hides = network.cost, reduction.overlapped != "none"
    if reduction.collective == "reduce_scatter":
        cost = LinkCost(Cluster.of(network).curve("reduce_scatter"))
    if not hides:
        schedule = dataclasses.replace(schedule, ready=np.full_like(schedule.ready, profile.backward_s))
    flow, backward_end_s = BucketTravel(schedule, profile.backward_s).at(cost, slowdown if hides else 1.0)
    round_s = max(flow.end_s, backward_end_s)
    rows = [(seconds, forward_s) for seconds, forward_s, _ in gather_parts(profile, network, reduction)]
    first_s = sum(seconds for seconds, _ in rows) + profile.forward_s
    if reduction.hides_gathers and rows:
        # Forward enters a bucket once it is there; the next one is gathered from then on.
        first_s = rows[0][0]
        for index, (_, compute_s) in enumerate(rows):
            ahead_s = rows[index + 1][0] if index + 1 < len(rows) else 0.0
            first_s += together_s(compute_s, min(ahead_s, compute_s * slowdown), slowdown)
            first_s += max(ahead_s - compute_s * slowdown, 0.0)
    rounds = micro_batches if reduction.overlapped == "every" else 1
    before_s = (micro_batches - rounds) * (profile.forward_s + profile.backward_s)
    update_s = reduction.updated_s(profile.update_s, network.workers)
    return first_s + before_s + (rounds - 1) * (profile.forward_s + round_s) + round_s + update_s


@given(bucketed(), networks(busy=False), st.sampled_from([1.0, 1.5]), st.data())
def test_compressed_buckets_take_what_they_took(
    drawn: tuple[Profile, Schedule], network: Network, slowdown: float, data: st.DataObject
) -> None:
    profile, schedule = drawn
    profile = replace(profile, compression_s_per_byte=1e-9, compression_s_per_bucket=1e-4)
    cost = CompressedCost(network, profile)
    compressions = [data.draw(st.sampled_from([None, Compression(density=0.01)])) for _ in schedule.communicators]
    times_of, spent = cost.times(schedule.sizes, compressions), compress_s(profile, schedule.sizes, compressions)
    travel = BucketTravel(schedule, profile.backward_s, spent)
    flow, clock = contended(lambda ready: one_by_one(ready, times_of), travel.ready, slowdown)
    made = bucket_graph(
        BucketStep(
            schedule=schedule,
            times=times_of,
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            update_s=0.0,
            slowdowns={"network": slowdown},
            compress_s=spent,
        )
    )
    mine, backward_end_s = made.flow(run(made.graph))
    assert mine.finishes == pytest.approx(flow.finishes, rel=1e-8)
    assert backward_end_s == pytest.approx(float(clock.when(travel.computed_s)), rel=1e-8)


def test_buffers_go_before_forward() -> None:
    profile = make_profile([10**6], [2e-3], forward=1e-3)
    network = affine(1e-3, 1e-9)
    schedule = Schedule.of_ends(profile, [1])
    step = BucketStep(
        schedule=schedule,
        times=network.cost.times(schedule.sizes),
        forward_s=1e-3,
        backward_s=2e-3,
        update_s=1e-3,
        before_s=5e-4,
    )
    times = run(bucket_graph(step).graph)
    assert times.end_s == pytest.approx(5e-4 + 1e-3 + 2e-3 + 2e-3 + 1e-3)
