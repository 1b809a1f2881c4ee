"""Schedules as events and in closed form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.engine import run
from backbeat.steps.pipeline import _simulated, closed_form, run_pipeline
from backbeat.steps.stage_graph import StageTimes, _StageBuilding
from backbeat.steps.stage_programs import in_flight, order

seconds = st.floats(0.1, 5.0)


def equal(stages: int, forward: float, inputs: float, weights: float, chunks: int = 1) -> list[StageTimes]:
    return [StageTimes(forward / chunks, inputs / chunks, weights / chunks)] * (stages * chunks)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), seconds, seconds, seconds)
def test_events_are_the_closed_form_for_equal_stages(
    schedule: str, stages: int, count: int, forward: float, inputs: float, weights: float
) -> None:
    times = equal(stages, forward, inputs, weights)
    simulated = run_pipeline(schedule, stages, count, times, 0.0).seconds  # type: ignore[arg-type]
    assert simulated == pytest.approx((count + stages - 1) * (forward + inputs + weights))
    assert closed_form(schedule, stages, count, times, 0.0).seconds == pytest.approx(simulated)  # type: ignore[arg-type]


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 4), seconds, seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, rounds: int, chunks: int, forward: float, backward: float
) -> None:
    count = rounds * stages
    times = equal(stages, forward, backward / 2, backward / 2, chunks)
    whole = forward + backward
    simulated = run_pipeline("interleaved", stages, count, times, 0.0).seconds
    assert simulated == pytest.approx(count * whole + (stages - 1) * whole / chunks)
    assert closed_form("interleaved", stages, count, times, 0.0).seconds == pytest.approx(simulated)


@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]),
    st.integers(3, 6),
    st.integers(2, 4),
    seconds,
    st.floats(0, 1),
)
def test_a_step_waits_for_as_many_sends_as_the_closed_form_says(
    schedule: tuple[str, int], stages: int, rounds: int, each: float, share: float
) -> None:
    name, chunks = schedule
    times = equal(stages, each, each, each, chunks)
    send = share * each / chunks / 8
    found = run_pipeline(name, stages, rounds * stages, times, send).seconds  # type: ignore[arg-type]
    formula = closed_form(name, stages, rounds * stages, times, send).seconds  # type: ignore[arg-type]
    # Where an activation and a gradient leave a stage at once they share its NIC, which the formula does not know.
    assert formula == pytest.approx(found, abs=1e-9 + (stages * send if name == "zero-bubble" else 0))


@given(st.integers(2, 8), st.integers(1, 20), seconds, seconds, st.floats(0.05, 1))
def test_zero_bubble_is_its_closed_form_for_few_micro_batches_and_many(
    stages: int, count: int, forward: float, inputs: float, share: float
) -> None:
    times = equal(stages, forward, inputs, share * min(forward, inputs))
    simulated = _simulated("zero-bubble", stages, count, times, 0.0, "direction").seconds
    assert closed_form("zero-bubble", stages, count, times, 0.0).seconds == pytest.approx(simulated)


@given(st.integers(2, 8), st.integers(1, 12), seconds, seconds, seconds)
def test_zero_bubble_with_long_gradients_of_weights_is_nearly_its_closed_form(
    stages: int, count: int, forward: float, inputs: float, weights: float
) -> None:
    """Where they take longest they may also hold up the stages in the middle, which the formula does not know."""
    times = equal(stages, forward, inputs, weights)
    simulated = _simulated("zero-bubble", stages, count, times, 0.0, "direction").seconds
    formula = closed_form("zero-bubble", stages, count, times, 0.0).seconds
    assert 0.85 * simulated <= formula <= simulated * (1 + 1e-9)


@given(st.sampled_from(["gpipe", "1f1b", "zero-bubble"]), st.integers(2, 8), st.integers(1, 12), seconds)
def test_few_micro_batches_wait_for_as_many_sends_as_the_closed_form_says(
    schedule: Any, stages: int, count: int, each: float
) -> None:
    times, send = equal(stages, each, each, each * 0.9), each / 100
    found = run_pipeline(schedule, stages, count, times, send).seconds
    assert closed_form(schedule, stages, count, times, send).seconds == pytest.approx(found)


@given(st.integers(2, 5), st.integers(2, 10), seconds, seconds, seconds, st.floats(0, 1))
def test_zero_bubble_is_never_slower_and_never_beats_the_work(
    stages: int, count: int, forward: float, inputs: float, weights: float, send: float
) -> None:
    times = equal(stages, forward, inputs, weights)
    split = run_pipeline("zero-bubble", stages, count, times, send).seconds
    assert split >= count * (forward + inputs + weights) - 1e-9
    # A put-off gradient may run a little into the time of the next operation.
    assert split <= run_pipeline("1f1b", stages, count, times, send).seconds * 1.001 + weights


@given(
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.lists(st.tuples(seconds, seconds, seconds), min_size=2, max_size=4),
    st.integers(1, 8),
    st.floats(0, 2),
)
def test_every_schedule_keeps_order_and_does_all_work(
    schedule: str, shapes: list[tuple[float, float, float]], count: int, send: float
) -> None:
    times = [StageTimes(*shape) for shape in shapes]
    stages = len(times)
    found = run_pipeline(schedule, stages, count, times, send)  # type: ignore[arg-type]
    ends = {(each.operation.kind, each.operation.micro_batch, each.stage): each for each in found.performed}
    for (kind, micro, stage), each in ends.items():
        if kind == "F" and stage:
            assert each.start_s >= ends["F", micro, stage - 1].end_s + send - 1e-9
        if kind == "B" and stage + 1 < stages:
            assert each.start_s >= ends["B", micro, stage + 1].end_s + send - 1e-9
    for stage in range(stages):
        own = sorted((each.start_s, each.end_s) for each in found.performed if each.stage == stage)
        assert all(after >= before - 1e-9 for (_, before), (after, _) in itertools.pairwise(own))
        assert sum(end - start for start, end in own) == pytest.approx(count * times[stage].total_s)


@given(
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]),
    st.sampled_from(["direction", "connection", "pair", "rank"]),
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4),
    st.tuples(st.integers(8, 14), st.integers(0, 1)),
    st.tuples(st.floats(0, 3), st.sampled_from([None, 0.0, 0.5])),
)
@settings(max_examples=60)
def test_the_middle_of_a_long_step_is_simulated_once(
    schedule: Any, streams: Any, shapes: list[Any], length: tuple[int, int], sends: tuple[float, float | None]
) -> None:
    name, chunks = schedule if len(shapes) > 1 else ("1f1b", 1)
    times, stages = [StageTimes(*shape) for shape in shapes] * chunks, len(shapes)
    count = length[0] * stages + (length[1] if chunks == 1 else 0)
    send, late = sends[0], None if sends[1] is None else sends[0] * sends[1]
    found = run_pipeline(name, stages, count, times, send, streams, late)
    whole = _simulated(name, stages, count, times, send, streams, late)
    assert found.end_s == pytest.approx(whole.end_s, rel=1e-7)
    assert found.last_backward_s == pytest.approx(whole.last_backward_s, rel=1e-7)
    starts = {each[:2]: each.start_s for each in whole.performed}
    assert len(found.performed) == len(starts)
    assert {each[:2]: each.start_s for each in found.performed} == pytest.approx(starts, rel=1e-7, abs=1e-7)


def test_a_step_whose_rounds_take_turns_is_repeated_by_its_turns() -> None:
    """Here rounds of three stages take two times by turns: one of them repeated is 1.4 % off."""
    times = [StageTimes(1.0, 1.5, 1.9), StageTimes(2.0, 4.0, 3.6), StageTimes(3.0, 3.0, 3.3)]
    shorter, longer = (run_pipeline("1f1b", 3, count, times, 3.6, "pair", 1.8).seconds for count in (90, 96))
    whole = [_simulated("1f1b", 3, count, times, 3.6, "pair", 1.8).seconds for count in (90, 96)]
    assert [shorter, longer] == pytest.approx(whole)


@given(st.integers(2, 8), seconds, st.floats(0.01, 0.2))
def test_gloo_swaps_one_after_the_other(count: int, each: float, share: float) -> None:
    times, send = equal(2, each, each, each), share * each
    alone = run_pipeline("1f1b", 2, count, times, 0.0).seconds
    assert run_pipeline("1f1b", 2, count, times, send, "direction").seconds == pytest.approx(alone + (count + 1) * send)
    assert run_pipeline("1f1b", 2, count, times, send, "connection").seconds == pytest.approx(alone + 2 * count * send)


def test_on_one_stream_a_receive_holds_up_the_sends_behind_it() -> None:
    times = equal(4, 1.0, 1.0, 1.0, chunks=2)
    apart, together = (
        run_pipeline("interleaved", 4, 8, times, 0.1, streams).seconds for streams in ("direction", "rank")
    )
    assert together > 1.1 * apart


def test_buffers_take_what_comes_before_its_receiver_is_ready() -> None:
    """GPipe on one stream: between its passes a stage sends, and then receives what has come in meanwhile."""
    times, send = equal(3, 1.0, 0.5, 0.5), 0.25
    for late, waits in ((None, 2 * send), (0.1, send), (0.0, send)):
        found, again = (run_pipeline("gpipe", 3, count, times, send, "rank", late).seconds for count in (12, 13))
        # One more micro-batch: forward and backward of the stage in the middle.
        assert again - found == pytest.approx(2 + 2 * waits), late


def test_what_waits_in_a_buffer_still_takes_the_late_part_of_its_send() -> None:
    """The second activation comes while the second stage, five times as slow, computes the first."""
    times = [StageTimes(1.0, 0.1, 0.1), StageTimes(5.0, 0.5, 0.5)]
    at_once = run_pipeline("gpipe", 2, 2, times, 0.5, "rank", 0.0).seconds
    for late, longer in ((0.2, 0.2), (0.5, 0.5), (0.8, 0.5), (None, 0.5)):
        assert run_pipeline("gpipe", 2, 2, times, 0.5, "rank", late).seconds == pytest.approx(at_once + longer), late


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.sampled_from(["direction", "connection", "pair", "rank"]),
    st.integers(2, 4),
    st.floats(0, 1.5),
)
@settings(max_examples=60)
def test_a_step_with_buffers_ends_and_computes_as_much(schedule: Any, streams: Any, stages: int, share: float) -> None:
    times = equal(stages, 1.0, 0.5, 0.5, chunks=2 if schedule == "interleaved" else 1)
    plain = run_pipeline(schedule, stages, 2 * stages, times, 0.0, streams)
    found = run_pipeline(schedule, stages, 2 * stages, times, 0.4, streams, 0.4 * share)
    assert found.seconds >= plain.seconds - 1e-9
    assert sorted(each[:2] for each in found.performed) == sorted(each[:2] for each in plain.performed)


def test_an_activation_and_a_gradient_that_leave_at_once_share_a_nic() -> None:
    times = equal(4, 1.0, 0.7, 0.3, chunks=2)
    apart, shared = (
        run_pipeline("interleaved", 4, 16, times, 0.8, streams).seconds for streams in ("direction", "pair")
    )
    assert shared > 1.05 * apart


@pytest.mark.parametrize(("streams", "takes"), [("direction", 1.0), ("connection", 2.0), ("pair", 2.0), ("rank", 2.0)])
@pytest.mark.parametrize(("activation", "gradient"), [(("F", 0, 2), ("B", 0, 0)), (("F", 0, 1), ("B", 0, 1))])
def test_what_leaves_the_stage_in_the_middle_at_once_or_comes_to_it_shares_its_nic(
    streams: Any, takes: float, activation: Any, gradient: Any
) -> None:
    moving = _StageBuilding(3, 1.0, streams, None)
    for stage in range(3):
        its_own = tuple(one for one in (activation, gradient) if stage in ends_of(one))
        moving.post(stage, its_own, ())
    assert run(moving.graph).ends == [takes, takes]


def ends_of(transfer: Any) -> tuple[int, int]:
    return transfer[2] % 3, (transfer[2] + (-1 if transfer[0] == "F" else 1)) % 3


def test_unequal_stages_wait_for_the_slowest() -> None:
    times = [StageTimes(1, 1, 1), StageTimes(2, 2, 2)]
    assert run_pipeline("1f1b", 2, 10, times, 0.0).seconds == pytest.approx(63)
    assert closed_form("1f1b", 2, 10, times, 0.0).seconds == pytest.approx(63)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_a_stage_holds_what_it_has_begun_and_not_ended(schedule: Any, chunks: int) -> None:
    for stages, count in ((1, 3), (2, 2), (4, 2), (4, 4), (4, 8)):
        parts = chunks if stages > 1 else 1
        for stage in range(stages):
            done = order(schedule, stage, stages, count, parts)
            ends = "W" if any(each.kind == "W" for each in done) else "B"
            most = open_now = 0
            for each in done:
                open_now += (each.kind == "F") - (each.kind == ends)
                most = max(most, open_now)
            assert most / parts == in_flight(schedule, stage, stages, count, parts)


@settings(max_examples=200)
@given(st.data())
def test_stages_that_compute_less_end_no_later(data: st.DataObject) -> None:
    """Programs do not depend on times. Where no two sends share a NIC, every moment is the latest of others plus a time
    that is given. Where they do, at most two leave a stage or come to it at once, and each takes at most twice as long:
    a step ends no later than where every send takes that from the start."""
    name, chunks = data.draw(st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]))
    stages, rounds = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    streams: Any = data.draw(st.sampled_from(["direction", "pair", "rank"]))
    slow = [StageTimes(*(data.draw(seconds) for _ in range(3))) for _ in range(stages * chunks)]
    share = st.sampled_from([0.0, 0.5, 1.0])
    fast = [
        StageTimes(*(one * data.draw(share) for one in (each.forward_s, each.input_s, each.weight_s))) for each in slow
    ]
    send = data.draw(st.floats(0.01, 2.0))

    def ends(times: list[StageTimes], send_s: float) -> float:
        return run_pipeline(name, stages, rounds * stages, times, send_s, streams).seconds

    shared = 1 if streams == "direction" else 2
    assert ends(fast, send) <= ends(slow, shared * send) * (1 + 1e-9)


def test_a_step_too_long_to_be_simulated_whole_takes_what_its_middle_takes() -> None:
    times = [StageTimes(1.0 + 0.1 * stage, 1.0, 1.0) for stage in range(4)]
    for schedule in ("gpipe", "1f1b"):
        few, many = (run_pipeline(schedule, 4, count, times, 0.1, listed=False).seconds for count in (1000, 41000))  # type: ignore[arg-type]
        assert many - few == pytest.approx(40000 * (3.3 + (0.2 if schedule == "gpipe" else 0)), rel=0.1)


def test_what_is_too_large_for_a_graph_is_taken_in_closed_form() -> None:
    times = [StageTimes(1.0, 1.0, 1.0)] * 256
    found = run_pipeline("interleaved", 128, 256, times, 0.01)
    assert not found.simulated
    assert found == closed_form("interleaved", 128, 256, times, 0.01)
    assert run_pipeline("1f1b", 35, 280, times[:35], 0.01).simulated
