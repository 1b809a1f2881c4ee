from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backbeat.lab import plans
from backbeat.lab.jobs import (
    FEWEST_ITERATIONS,
    MOST_ITERATIONS,
    ROUNDS,
    ReplayJob,
    lab_job,
    slowdowns,
    turns,
    turns_s,
)
from tests.lab.cases import network, profile


def test_a_job_carries_every_byte_and_the_ready_time_of_each_groups_last_gradient():
    (choice,) = plans.parse_plans(["equal:3"])
    job = lab_job(profile(), plans.build_plan(choice, profile(), network()))
    assert sum(message.bytes for message in job.messages) == profile().total_bytes
    assert [message.ready_s for message in job.messages] == [profile().gradients[index].ready_s for index in (1, 3, 5)]


def test_compute_alone_sends_nothing():
    assert ReplayJob.of(profile()).messages == ()


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=12), st.floats(0.1, 10))
def test_every_job_plays_in_every_round_of_both_series(expected, seconds_each):
    planned = turns(expected, seconds_each)
    for job in range(len(expected)):
        own = [turn for turn in planned if turn.job == job]
        assert [turn.series for turn in own].count(0) == [turn.series for turn in own].count(1) == ROUNDS // 2
        assert FEWEST_ITERATIONS <= sum(turn.iterations for turn in own) <= MOST_ITERATIONS
    rounds = [planned[start : start + len(expected)] for start in range(0, len(planned), len(expected))]
    assert all(sorted(turn.job for turn in one) == list(range(len(expected))) for one in rounds)
    assert turns_s(expected, seconds_each) >= sum(expected) * FEWEST_ITERATIONS


def test_turns_are_the_same_for_every_node():
    assert turns([0.1, 0.2, 0.3], 1.0) == turns([0.1, 0.2, 0.3], 1.0)


def test_a_node_without_jitter_is_always_as_slow():
    factor = slowdowns(1.3, 0.0, seed=1)
    assert {factor() for _ in range(5)} == {1.3}


def test_jitter_strays_around_the_slowdown():
    factor = slowdowns(2.0, 0.1, seed=1)
    drawn = [factor() for _ in range(2000)]
    assert 1.98 < sum(drawn) / len(drawn) < 2.02
    assert len(set(drawn)) > 1900
