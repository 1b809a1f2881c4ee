"""Computation beside communication: exact, causal, and nothing changes where nothing slows down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.cost import LinkCost
from backbeat.cost.bound import communication_bound
from backbeat.cost.curve import Curve
from backbeat.engine.explain import busy_periods
from backbeat.model import DynamicFusion, Network, Plan, Profile
from backbeat.planners.planned import planned
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.fusion import fuse
from backbeat.steps.schedule import Flow, Schedule
from tests.cost.test_bound import measured_costs
from tests.problems import affine, make_profile, networks, profiles
from tests.steps.fixed_point import ComputeClock
from tests.steps.stepped import stepped

ROUNDING = 1e-9
slowdowns = st.sampled_from([1.02, 1.15, 1.5, 2.0, 5.0, 100.0])
STRATEGIES = ("ddp", "wfbp", "single", "horovod", "optimal")


def ends_of(profile: Profile, every: int) -> list[int]:
    count = len(profile.gradients)
    return sorted({*range(every, count, every), count})


def by_hand(schedule: Schedule, cost: LinkCost, slowdown: float) -> tuple[list[float], float, float]:
    """One communicator, one message after the other, computation followed as it goes: (finishes, time, done)."""
    finishes: list[float] = []
    corners = [(0.0, 0.0)]

    def moment(done_s: float) -> float:
        for (at, done), (later_at, later) in pairwise(corners):
            if done_s <= later:
                return at + (done_s - done) * ((later_at - at) / (later - done) if later > done else 0.0)
        return corners[-1][0] + (done_s - corners[-1][1])

    free = -np.inf
    for done_s, size in zip(schedule.ready.tolist(), schedule.sizes.tolist(), strict=True):
        ready = moment(done_s)
        start = max(ready, free)
        free = max(ready + float(cost.time(size)), free + float(cost.busy_time(size)))
        at, done = corners[-1]
        # Alone until the message starts, beside it until it is done.
        corners.append((start, done + (start - at)))
        corners.append((free, corners[-1][1] + (free - start) / slowdown))
        finishes.append(free)
    return finishes, *corners[-1]


@settings(max_examples=150)
@given(profiles(), measured_costs() | networks().map(lambda network: network.cost), slowdowns, st.integers(1, 6))
def test_one_communicator_is_the_recursion_followed_by_hand(
    profile: Profile, cost: LinkCost, slowdown: float, every: int
) -> None:
    schedule = Schedule.of_ends(profile, ends_of(profile, every))
    finishes, at, done = by_hand(schedule, cost, slowdown)
    # Backward lasts until the last message is done.
    flow, backward_end_s = BucketTravel(schedule, done).at(cost, slowdown)
    assert flow.finishes.tolist() == pytest.approx(finishes, rel=1e-9, abs=1e-12)
    assert backward_end_s == pytest.approx(at, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=8))
def test_busy_periods_are_when_any_message_is_in_flight(messages: list[tuple[int, int]]) -> None:
    """Whatever the order: on several communicators a later bucket may leave first."""
    starts, lengths = (np.array(one, dtype=np.float64) for one in zip(*messages, strict=True))
    periods = busy_periods(starts, starts + lengths)
    assert all(end < after for (_, end), (after, _) in pairwise(periods))

    def within(spans: Sequence[tuple[float, float]], at: float) -> bool:
        return any(begin < at < end for begin, end in spans)

    moments, alone = np.arange(0, 26, 0.5) + 0.25, [(start, start + length) for start, length in messages]
    assert [within(periods, at) for at in moments] == [within(alone, at) for at in moments]


def test_messages_that_only_cost_time_in_a_row_are_followed_to_the_end() -> None:
    ready, free, queued = np.array([0.0, 0.0, 1e-4, 2e-4, 3e-4, 4e-4]), Curve.affine(0.0, 0.0), Curve.affine(2e-3, 0.0)
    cost = LinkCost(free, queued, {})
    flow, _ = BucketTravel(Schedule(ready, np.full(6, 4.0), [0] * 6), 5e-4).at(cost, 100.0)
    assert flow.finishes.tolist() == pytest.approx([0.0, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2])


@settings(max_examples=60)
@given(profiles(), networks(), st.sampled_from(STRATEGIES), st.integers(1, 3))
def test_nothing_changes_where_nothing_slows_down(
    profile: Profile, network: Network, strategy: str, communicators: int
) -> None:
    plan = _plan(profile, network, strategy, communicators)
    found = stepped(profile, network, plan, slowdown=1.0)
    assert found == stepped(profile, network, plan)
    assert found.breakdown.contention_s == 0


@settings(max_examples=60)
@given(profiles(), measured_costs(), slowdowns, slowdowns, st.integers(1, 6))
def test_a_larger_slowdown_never_ends_earlier_on_one_communicator(
    profile: Profile, cost: LinkCost, one: float, two: float, every: int
) -> None:
    schedule = Schedule.of_ends(profile, ends_of(profile, every))
    travel = BucketTravel(schedule, profile.backward_s)
    ends = []
    for slowdown in sorted((1.0, one, two)):
        flow, backward_end_s = travel.at(cost, slowdown)
        ends.append(max(flow.end_s, backward_end_s))
    assert ends[0] <= ends[1] * (1 + ROUNDING) <= ends[2] * (1 + ROUNDING) ** 2


@settings(max_examples=60)
@given(profiles(most=12), networks(), slowdowns, st.sampled_from(STRATEGIES), st.integers(1, 3))
def test_overlap_never_costs_more_than_it_saves_and_the_bound_holds(
    profile: Profile, network: Network, slowdown: float, strategy: str, communicators: int
) -> None:
    plan = _plan(profile, network, strategy, communicators)
    found = stepped(profile, network, plan, slowdown=slowdown)
    assert found.bound_s <= found.end_s * (1 + ROUNDING)
    parts = found.breakdown
    exposed = found.end_s - profile.forward_s - profile.backward_s - profile.update_s
    assert parts.latency_s + parts.bandwidth_s + parts.waiting_s + parts.contention_s == pytest.approx(
        exposed, abs=1e-9
    )
    assert parts.contention_s >= 0
    if plan.dynamic is None:
        # Either something travels or computation runs at full speed: all messages after backward are the worst case.
        busy = sum(span.end_s - span.start_s for span in found.timeline if span.lane.startswith("communicator"))
        assert found.end_s <= (profile.forward_s + profile.backward_s + profile.update_s + busy) * (1 + ROUNDING)


@settings(max_examples=60)
@given(profiles(most=9), measured_costs(), slowdowns, st.integers(1, 4))
def test_no_bucketing_beats_the_bound(profile: Profile, cost: LinkCost, slowdown: float, communicators: int) -> None:
    bound = communication_bound(profile.ready, profile.sizes, cost, communicators)
    for every in (1, 2, 3):
        ends = ends_of(profile, every)
        schedule = Schedule.of_ends(profile, ends, [index % communicators for index in range(len(ends))])
        assert bound <= BucketTravel(schedule, profile.backward_s).at(cost, slowdown)[0].end_s * (1 + ROUNDING)


@settings(max_examples=30)
@given(profiles(most=12), networks(), slowdowns)
def test_compressed_iterations_slow_down_too(profile: Profile, network: Network, slowdown: float) -> None:
    compute = profile.forward_s + profile.backward_s + profile.update_s
    plan = planned(profile, network, "compressed", density=0.1)
    alone, found = (stepped(profile, network, plan, slowdown=factor) for factor in (1.0, slowdown))
    assert found.end_s >= alone.end_s * (1 - ROUNDING)
    assert found.bound_s <= found.end_s * (1 + ROUNDING)
    parts = found.breakdown
    total = parts.latency_s + parts.bandwidth_s + parts.waiting_s + parts.contention_s
    assert total == pytest.approx(found.end_s - compute, abs=1e-9)


def test_two_messages_by_hand() -> None:
    """Backward of 4 s, gradients ready at 1 and 2 s, messages of 1 s each, computation beside them half as fast: the
    first travels from 1 to 2 s, the second is ready after another half second, and backward ends at 5 s."""
    profile = make_profile([1, 1], [1.0, 2.0], backward=4.0)
    network = affine(1.0, 0.0)
    found = stepped(profile, network, planned(profile, network, "wfbp"), slowdown=2.0)
    sent = [(span.start_s, span.end_s) for span in found.timeline if span.lane == "communicator 0"]
    assert sent == [(1.0, 2.0), (2.5, 3.5)]
    assert found.end_s == 5.0
    assert found.breakdown.contention_s == 1.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0, 50))
def test_a_clock_reads_both_ways(lengths: list[float], value: float) -> None:
    corners = np.cumsum(lengths)
    clock = ComputeClock(corners, 2 * corners)
    assert float(clock.done_by(clock.when(value + corners[0]))) == pytest.approx(value + corners[0])


@given(
    profiles(), networks(), st.sampled_from([1.0, 1.02, 1.5, 3.0]),
    st.sampled_from([1e-4, 1e-3, 5e-3]), st.sampled_from([10**4, 10**7]),
)  # fmt: skip
def test_fusion_at_run_time_is_its_own_fixed_point(
    profile: Profile, network: Network, slowdown: float, cycle_s: float, buffer_bytes: int
) -> None:
    """With gradients ready when computation beside these very messages makes them, the same messages come about."""
    settings = DynamicFusion(cycle_s=cycle_s, buffer_bytes=buffer_bytes)
    found = fuse(profile, network.cost, settings, slowdown)
    ready = np.array([_moment(found.flow, each, slowdown) for each in profile.ready])
    # What is ready at a tick, but for rounding, is caught by that tick or by the next.
    ticks = ready / cycle_s
    assume(not np.any(np.abs(ticks - np.round(ticks)) < 1e-7))
    late = tuple(replace(one, ready_s=at) for one, at in zip(profile.gradients, ready.tolist(), strict=True))
    again = fuse(replace(profile, backward_s=late[-1].ready_s, gradients=late), network.cost, settings)
    assert again.ends == found.ends
    assert found.flow.finishes == pytest.approx(again.flow.finishes, rel=1e-9, abs=1e-12)
    assert found.backward_end_s == pytest.approx(_moment(found.flow, profile.backward_s, slowdown), rel=1e-9, abs=1e-12)


def _moment(flow: Flow, computed_s: float, slowdown: float) -> float:
    """When so much is computed, more slowly while some message is under way."""
    now, left = 0.0, computed_s
    for begin, end in busy_periods(flow.starts, flow.finishes):
        if left <= begin - now:
            break
        left, now = left - max(begin - now, 0.0), max(begin, now)
        if left * slowdown <= end - now:
            return now + left * slowdown
        left, now = left - (end - now) / slowdown, end
    return now + left


def _plan(profile: Profile, network: Network, strategy: str, communicators: int) -> Plan:
    if strategy in ("horovod", "optimal"):
        return planned(profile, network, strategy)
    return planned(profile, network, strategy, communicators=communicators)
