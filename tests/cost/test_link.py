"""Several messages: back to back on one communicator, at once on several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost import Batch, Curve, LinkCost
from backbeat.model import ConcurrencyPoint
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import Schedule
from tests.problems import affine, curve

MEGABYTE = 10**6


def row(seconds: float, messages: int, communicators: int, size: int = MEGABYTE) -> ConcurrencyPoint:
    return ConcurrencyPoint(bytes=size, messages=messages, communicators=communicators, seconds=seconds)


def test_back_to_back_rows_give_the_time_each_further_message_adds() -> None:
    cost = affine(1e-3, 1e-9, concurrency=(row(2e-3 + 7 * 1.5e-3, 8, 1),)).cost
    assert float(cost.time(MEGABYTE)) == pytest.approx(2e-3)
    assert float(cost.busy_time(MEGABYTE)) == pytest.approx(1.5e-3)
    assert cost.batch_s(MEGABYTE, 8, 1) == pytest.approx(2e-3 + 7 * 1.5e-3)


@given(st.sampled_from([2, 3, 4]), st.floats(0.3, 2.0), st.integers(1, 5))
def test_efficiency_is_fitted_back(communicators: int, efficiency: float, rounds: int) -> None:
    seconds = rounds * (1e-3 + communicators * 1e-3 / efficiency)
    cost = affine(1e-3, 1e-9, concurrency=(row(seconds, rounds * communicators, communicators),)).cost
    assert cost.efficiency(communicators) == pytest.approx(min(efficiency, communicators))
    assert cost.batch_s(MEGABYTE, rounds * communicators, communicators) == pytest.approx(
        rounds * (1e-3 + communicators * 1e-3 / min(efficiency, communicators))
    )


def test_the_nearest_measured_count_speaks_for_the_others() -> None:
    cost = LinkCost(Curve.affine(0, 1e-9), None, {2: 0.8, 4: 0.6})
    assert [cost.efficiency(n) for n in (1, 2, 3, 4, 9)] == [1.0, 0.8, 0.8, 0.6, 0.6]
    assert cost.best_efficiency(4) == 1.0
    assert LinkCost(Curve.affine(0, 1e-9)).efficiency(5) == 1.0
    assert LinkCost(Curve.affine(0, 1e-9), None, {2: 1.5}).best_efficiency(2) == 1.5


@given(st.sampled_from([2, 4]), st.floats(0.4, 1.9), st.floats(1.0, 2.0))
def test_latencies_that_slow_each_other_down_are_told_from_a_contended_link(
    communicators: int, efficiency: float, stretch: float
) -> None:
    rows = tuple(
        row(stretch * 1e-3 + communicators * 1e-9 * size / efficiency, communicators, communicators, size)
        for size in (1000, MEGABYTE, 20 * MEGABYTE)
    )
    cost = affine(1e-3, 1e-9, concurrency=rows).cost
    assert cost.efficiency(communicators) == pytest.approx(efficiency, rel=1e-6)
    assert cost.stretch(communicators) == pytest.approx(stretch, rel=1e-6)
    assert cost.stretch(1) == 1.0
    for point in rows:
        assert cost.batch_s(point.bytes, point.messages, point.communicators) == pytest.approx(point.seconds)


def test_a_count_measured_without_slowdown_is_not_given_another_ones() -> None:
    sizes = (1000, MEGABYTE, 20 * MEGABYTE)
    two = tuple(row(1e-3 + 2e-9 * size, 2, 2, size) for size in sizes)
    four = tuple(row(2e-3 + 4e-9 * size, 4, 4, size) for size in sizes)
    cost = affine(1e-3, 1e-9, concurrency=(*two, *four)).cost
    assert cost.stretch(2) == pytest.approx(1.0)
    assert cost.stretch(4) == pytest.approx(2.0)


@given(st.dictionaries(st.integers(2, 12), st.floats(0.3, 2.0)), st.integers(1, 15))
def test_the_best_efficiency_is_that_of_the_best_count(efficiencies: dict[int, float], communicators: int) -> None:
    cost = LinkCost(Curve.affine(0, 1e-9), None, efficiencies)
    assert cost.best_efficiency(communicators) == max(cost.efficiency(n) for n in range(1, communicators + 1))
    assert cost.best_efficiency(10**15) >= 1.0


@given(st.sampled_from([(8, 2), (5, 2), (3, 2), (2, 4), (7, 3), (9, 4), (11, 4)]), st.floats(0.5, 1.8))
def test_efficiency_is_fitted_to_what_the_engine_would_measure(batch: tuple[int, int], efficiency: float) -> None:
    messages, communicators = batch
    sharing = min(batch)
    schedule = Schedule(
        np.zeros(messages), np.full(messages, 4.0 * MEGABYTE), [index % communicators for index in range(messages)]
    )
    truth = LinkCost(Curve.affine(1e-3, 1e-9), None, {sharing: efficiency})
    seconds = BucketTravel(schedule, 0.0).at(truth)[0].end_s
    cost = affine(1e-3, 1e-9, concurrency=(row(seconds, messages, communicators, 4 * MEGABYTE),)).cost
    assert cost.efficiency(sharing) == pytest.approx(efficiency, rel=1e-6)
    assert cost.batch_s(4 * MEGABYTE, messages, communicators) == pytest.approx(seconds)


def test_beyond_the_largest_size_measured_back_to_back_the_saving_stays_what_it_was() -> None:
    cost = affine(1e-3, 1e-9, concurrency=(row(2e-3 + 7 * 1.5e-3, 8, 1),)).cost
    for size in (2 * MEGABYTE, 100 * MEGABYTE):
        assert float(cost.time(size) - cost.busy_time(size)) == pytest.approx(0.5e-3)


def test_latencies_that_hide_behind_transfers_are_not_taken_for_a_wider_link() -> None:
    """Small batches that end as soon as the link has carried them; large ones that share it and nothing more."""
    latency_s, per_byte = 0.1e-3, 1e-9
    hidden = [row(latency_s + 8 * size * per_byte, 8, 2, size) for size in (2**16, 2**18)]
    large = [row(latency_s * 4 + 8 * size * per_byte, 8, 2, size) for size in (2**22, 2**24)]
    cost = affine(latency_s, per_byte, concurrency=(*hidden, *large)).cost
    assert cost.efficiency(2) == pytest.approx(1.0, rel=0.01)


@given(st.floats(0.4, 0.95), st.floats(1.0, 2.0))
def test_a_head_start_is_not_stretched_as_latencies_are(alone: float, stretch: float) -> None:
    """Large messages that find the link idle take less than its rate says, small ones little but their latency."""
    large = 20 * MEGABYTE
    isolated = Curve([1000, large], [1e-3, alone * large * 1e-9], 1e-9)
    busy = Curve([1000, large], [1e-3, large * 1e-9], 1e-9)
    truth = LinkCost(isolated, busy, {2: 1.0}, {2: stretch})
    rows = [
        row(BucketTravel(Schedule(np.zeros(2), np.full(2, float(size)), [0, 1]), 0.0).at(truth)[0].end_s, 2, 2, size)
        for size in (1000, large)
    ]
    in_a_row = [row(isolated.at(size) + busy.at(size), 2, 1, size) for size in (1000, large)]
    fitted = LinkCost.fit(isolated, [*rows, *in_a_row])
    assert fitted.efficiency(2) == pytest.approx(1.0, rel=1e-6)
    assert fitted.stretch(2) == pytest.approx(stretch, rel=1e-3)


@given(
    st.lists(st.sampled_from([0.0, 1e-9, 1e-5, 1e-3]), min_size=2, max_size=4).map(sorted),
    st.lists(
        st.builds(
            row,
            st.sampled_from([0.0, 1e-9, 1e-4, 1.0]),
            st.integers(1, 9),
            st.integers(1, 4),
            st.sampled_from([1, 4096, 2**20, 2**24]),
        ),
        max_size=5,
    ),
)
def test_whatever_was_measured_the_fit_is_a_number(times: list[float], rows: list[ConcurrencyPoint]) -> None:
    sizes = [1, 4096, 2**20, 2**24][: len(times)]
    cost = curve(list(zip(sizes, times, strict=True)), concurrency=tuple(rows)).cost
    assert all(0 < efficiency < np.inf for efficiency in cost.efficiencies.values())
    assert all(1 <= stretch < np.inf for stretch in cost.stretches.values())
    assert all(np.isfinite(cost.batch_s(point.bytes, point.messages, point.communicators)) for point in rows)


def test_small_messages_do_not_say_how_the_link_is_shared() -> None:
    """They took 30 % longer than their latencies say: read as transfer, that would make large messages crawl."""
    isolated = Curve.affine(2e-4, 1e-9)
    small = [Batch(size, 8, 2, 1.3 * (4 * 2e-4 + 8e-9 * size)) for size in (1024, 4096)]
    cost = LinkCost.fit(isolated, small)
    assert cost.efficiencies == {2: 1.0}
    assert cost.stretches[2] == pytest.approx(1.3, rel=0.02)
    assert cost.batch_s(10_000_000, 8, 2) == pytest.approx(8e-2, rel=0.02)
    assert cost.sharing_unknown(small) == {2: 4096}
    assert cost.sharing_unknown([*small, Batch(2**20, 8, 2, 9e-3)]) == {}


def test_batches_of_a_calibration_cut_short_make_no_wider_link() -> None:
    """Four NCCL nodes at 10 Gbit/s, jitter of over 20 %. Read as transfer, these rows double the link: messages a
    hundred times as large were predicted to take half of what they took."""
    isolated = Curve([4096, 65536, 524288, 1048576, 26214400], [2.27e-4, 4.15e-4, 7.99e-4, 1.424e-3, 3.41e-2], 1.3e-9)
    alone = [(4096, 1.80e-3), (16384, 1.91e-3), (65536, 6.69e-3), (262144, 6.54e-3), (1048576, 12.93e-3)]
    at_once = [(4096, 1.96e-3), (16384, 1.66e-3), (65536, 5.61e-3), (262144, 3.72e-3)]
    batches = [Batch(size, 8, 1, seconds) for size, seconds in alone]
    batches += [Batch(size, 8, 2, seconds) for size, seconds in at_once]
    cost = LinkCost.fit(isolated, batches)
    assert cost.efficiencies == {2: 1.0}
    assert cost.sharing_unknown(batches) == {2: 262144}


@given(st.floats(0.5, 2.0), st.floats(1.0, 2.0))
def test_one_batch_that_is_nearly_all_transfer_says_how_the_link_is_shared(efficiency: float, stretch: float) -> None:
    truth = LinkCost(Curve.affine(2e-4, 1e-9), None, {2: efficiency}, {2: stretch})
    batches = [Batch(size, 8, 2, truth.batch_s(size, 8, 2)) for size in (2**12, 2**16, 2**24)]
    fitted = LinkCost.fit(truth.isolated, batches)
    assert fitted.efficiency(2) == pytest.approx(efficiency, rel=1e-6)
    assert fitted.stretch(2) == pytest.approx(stretch, rel=1e-4)
