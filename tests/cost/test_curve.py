"""One collective: the curve, its slope, latency and work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.curve import Curve, relative_line
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import Schedule
from tests.problems import affine, curve, networks
from tests.steps.test_bucket_travel import by_engine, recursion

SIZES = np.array([0, 1, 100, 1024, 5000, 2**20, 3 * 2**20, 2**30], dtype=float)


def test_affine_is_exact() -> None:
    cost = affine(1e-3, 2e-9).cost
    assert cost.time(SIZES) == pytest.approx(1e-3 + 2e-9 * SIZES)
    assert cost.isolated.latency(SIZES) == pytest.approx(np.full(len(SIZES), 1e-3))
    assert cost.isolated.line == (1e-3, 2e-9)


def test_a_measured_curve_is_flat_below_linear_between_and_sloped_beyond() -> None:
    cost = curve([(1024, 1e-4), (2**20, 1e-3), (2**21, 2e-3), (2**22, 4e-3)]).cost.isolated
    slope = cost.link_s_per_byte
    assert slope == pytest.approx(1e-3 / 2**20, rel=1e-6)
    assert float(cost.time(10)) == 1e-4
    assert float(cost.time((1024 + 2**20) / 2)) == pytest.approx(5.5e-4)
    assert float(cost.time(2**23)) == pytest.approx(4e-3 + slope * 2**22)
    # Bandwidth-bound points have no latency left; the smallest message is latency but for its bytes.
    assert float(cost.latency(2**21)) == pytest.approx(0, abs=1e-9)
    assert float(cost.latency(1024)) == pytest.approx(1e-4 - slope * 1024)


def test_the_slope_comes_from_points_of_a_mebibyte_and_more() -> None:
    small = [(1024, 5e-3), (65536, 5e-3)]
    large = [(2**20, 5e-3 + 1e-9 * 2**20), (2**24, 5e-3 + 1e-9 * 2**24), (2**26, 5e-3 + 1e-9 * 2**26)]
    assert Curve.through((*small, *large)).link_s_per_byte == pytest.approx(1e-9)


@given(networks())
def test_cost_rises_with_size_and_splits_without_remainder(network: object) -> None:
    cost = network.cost  # type: ignore[attr-defined]
    sizes = np.sort(np.concatenate([SIZES, np.geomspace(1, 1e9, 50)]))
    assert (np.diff(cost.time(sizes)) >= -1e-15).all()
    assert (np.diff(cost.busy_time(sizes)) >= -1e-15).all()
    alone, busy, work = cost.times(sizes)
    assert alone == pytest.approx(cost.time(sizes))
    assert busy == pytest.approx(cost.busy_time(sizes))
    for part in (busy - work, work):
        assert (part >= -1e-12).all()
    # An isolated message is faster than the link only where messages in a row were measured and are not.
    assert ((alone - work >= -1e-12) | (cost.time(sizes) < cost.busy_time(sizes) + 1e-12)).all()


@given(networks(), st.floats(1, 1e8), st.floats(1, 1e8))
def test_the_cheapest_message_is_nowhere_beaten(network: object, one: float, two: float) -> None:
    cost = network.cost  # type: ignore[attr-defined]
    low, high = min(one, two), max(one, two)
    least_latency, least_per_byte = cost.cheapest(low, high)
    sizes = np.geomspace(low, high, 400)
    alone, _, work = cost.times(sizes)
    assert np.maximum(alone - work, 0.0).min() >= least_latency * (1 - 1e-9) - 1e-12
    assert (np.minimum(work, cost.time(sizes)) / sizes).min() >= least_per_byte * (1 - 1e-9)


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_a_line_is_fitted_back(alpha: float, beta: float) -> None:
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
    fitted = relative_line(sizes, alpha + beta * sizes)
    assert fitted[0] == pytest.approx(alpha, rel=1e-4)
    assert fitted[1] == pytest.approx(beta, rel=1e-4)


def test_on_a_slow_link_the_slope_comes_from_the_largest_points() -> None:
    # 8 Mbit/s: every point is far below 1 MiB, and latency hides the slope of the small ones.
    points = [(64, 9e-3), (1024, 9e-3), (4096, 9e-3), (65536, 65536e-6), (131072, 131072e-6), (262144, 262144e-6)]
    cost = Curve.through(tuple(points))
    assert cost.link_s_per_byte == pytest.approx(1e-6)
    assert float(cost.time(10**7)) == pytest.approx(10.0)


def test_points_that_noise_made_level_do_not_make_a_link_of_endless_speed() -> None:
    points = [(1024, 1e-3), (65536, 5e-3), (2**19, 3e-2), (2**20, 6e-2), (2**21, 5e-2)]
    assert Curve.through(tuple(points)).link_s_per_byte > 1e-8
    # Nothing rises: what is known of the bandwidth is that it is at least the last point's.
    level = Curve.through(((1024, 1e-3), (2**20, 1e-3)))
    assert float(level.time(2**25)) == pytest.approx(32e-3, rel=1e-9)


def test_a_head_start_on_an_idle_link_is_not_bandwidth() -> None:
    """A shaped link lets 0.5 MB through in 0.3 ms after a pause, but in a row they take 0.5 ms each, as the link."""
    points = ((2**18, 0.262e-3), (500_000, 0.3e-3), (2**20, 1.048576e-3), (2**22, 4.194304e-3), (2**24, 16.777216e-3))
    cost = Network(
        name="shaped",
        workers=4,
        all_reduce=CollectiveTimes(points=points),
        concurrency=(ConcurrencyPoint(bytes=500_000, messages=9, communicators=1, seconds=0.3e-3 + 8 * 0.5e-3),),
    ).cost
    assert float(cost.times(500_000).transfer) == pytest.approx(0.5e-3, rel=1e-6)
    both = Schedule(np.zeros(20), np.full(20, 5e5), [0, 1] * 10)
    # Twenty at once: the first finds the link idle, all others find it busy.
    assert BucketTravel(both, 0.0).at(cost)[0].end_s == pytest.approx(0.3e-3 + 19 * 0.5e-3, rel=1e-3)
    alone = Schedule(np.arange(3) * 1e-2, np.full(3, 5e5), [0, 1, 0])
    assert BucketTravel(alone, 0.0).at(cost)[0].finishes == pytest.approx(alone.ready + 0.3e-3)
    # On one communicator the head start is as long as the link was idle, as the recursion has it.
    gaps = Schedule(np.array([0.0, 0.35e-3, 0.95e-3, 5e-3]), np.full(4, 5e5), [0] * 4)
    expected, found = recursion(gaps, cost), by_engine(gaps, cost)
    for field in ("starts", "on_link", "finishes"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-9)
