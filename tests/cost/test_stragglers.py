"""The slowest of N, against distributions whose answer is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.stragglers import ComputeTimes, between_ranks, straggling
from backbeat.planners.planned import predicted
from backbeat.show.words.notes import worded
from tests.problems import affine, make_profile


def harmonic(count: int) -> float:
    return math.log(count) + 0.5772156649 + 1 / (2 * count) if count > 100 else sum(1 / k for k in range(1, count + 1))


def normal_maximum(count: int) -> float:
    """Mean of the largest of N standard normal draws, by integration."""
    x = np.linspace(-10, 10, 40001)
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    return float(np.trapezoid(x * np.gradient(cdf**count, x), x))


def typical_wait(draw: object, samples: int, workers: int, repeats: int = 40) -> float:
    fits = [ComputeTimes.fit(draw(samples)) for _ in range(repeats)]  # type: ignore[operator]
    return float(np.median([fit.slowest(workers).wait_s for fit in fits if fit]))


@pytest.mark.parametrize("workers", [8, 64, 1000, 100_000])
@pytest.mark.parametrize(("samples", "within"), [(30, 0.2), (1000, 0.1)])
def test_exponential_tails_are_followed_to_a_hundred_thousand_workers(
    samples: int, within: float, workers: int
) -> None:
    random = np.random.default_rng(7)
    found = typical_wait(lambda n: 1 + random.exponential(0.05, n), samples, workers)
    assert found == pytest.approx(0.05 * (harmonic(workers) - 1), rel=within)


@pytest.mark.parametrize(
    ("samples", "workers", "within"),
    [(30, 8, 0.1), (30, 64, 0.1), (300, 1000, 0.15), (300, 100_000, 0.2), (3000, 100_000, 0.2)],
)
def test_normal_tails(samples: int, workers: int, within: float) -> None:
    random = np.random.default_rng(11)
    found = typical_wait(lambda n: random.normal(1, 0.05, n), samples, workers)
    assert found == pytest.approx(0.05 * normal_maximum(workers), rel=within)


def test_few_samples_of_a_light_tail_err_on_the_side_of_waiting() -> None:
    random = np.random.default_rng(11)
    found = typical_wait(lambda n: random.normal(1, 0.05, n), 30, 100_000)
    assert 0.05 * normal_maximum(100_000) < found < 2 * 0.05 * normal_maximum(100_000)


def test_the_wait_keeps_growing_past_the_number_of_samples() -> None:
    random = np.random.default_rng(3)
    times = ComputeTimes.fit(random.normal(1, 0.05, 30))
    assert times is not None
    waits = [times.slowest(n).wait_s for n in (30, 300, 3000, 30000)]
    assert all(after > before * 1.05 for before, after in itertools.pairwise(waits))
    assert not times.slowest(30).extrapolated
    assert times.slowest(31).extrapolated


def test_the_band_holds_four_fifths_of_the_steps() -> None:
    random = np.random.default_rng(5)
    draws = random.exponential(0.05, (20000, 16)).max(axis=1)
    times = ComputeTimes.fit(random.exponential(0.05, 2000))
    assert times is not None
    found = times.slowest(16)
    inside = np.mean((draws - 0.05 >= found.p10_s) & (draws - 0.05 <= found.p90_s))
    assert inside == pytest.approx(0.8, abs=0.03)


@given(st.lists(st.floats(0.01, 1.0), min_size=5, max_size=60), st.integers(1, 10**5), st.integers(1, 10**5))
def test_more_workers_never_wait_less(times: list[float], one: int, two: int) -> None:
    few, many = min(one, two), max(one, two)
    first, second = straggling(tuple(times), few), straggling(tuple(times), many)
    if first is None or second is None:
        assert first is second
        return
    assert 0 <= first.wait_s <= second.wait_s + 1e-12
    assert first.p10_s <= first.p90_s + 1e-12
    assert math.isfinite(second.wait_s)


def test_one_worker_waits_for_nobody_and_no_spread_means_no_wait() -> None:
    found = straggling(tuple(np.random.default_rng(1).normal(1, 0.1, 50).tolist()), 1)
    assert found is not None
    assert found.wait_s == pytest.approx(0, abs=1e-12)
    assert straggling((), 64) is None
    assert straggling((1.0,) * 40, 64) is None
    assert straggling((1.0, 1.1), 64) is None


@pytest.mark.parametrize(("count", "noted"), [(0, False), (1, True), (4, True), (5, False)])
def test_too_few_times_to_say_who_is_slow_are_noted(count: int, noted: bool) -> None:
    profile = msgspec.structs.replace(
        make_profile([100], [1e-3]), iteration_s=tuple(1e-3 + 1e-5 * index for index in range(count))
    )
    found = predicted(profile, affine(1e-6, 1e-12), "single")
    assert any("say too little" in note for note in worded(found.notes)) == noted
    assert (found.band is None) == (count < 5)


def test_a_tail_of_no_shape_is_the_limit_of_small_ones() -> None:
    times = ComputeTimes.fit(np.random.default_rng(2).exponential(0.05, 200))
    assert times is not None
    rare = np.array([0.5, 0.2, 0.1, 1e-3, 1e-6])
    none, small = (replace(times, shape=shape).quantile(rare) for shape in (0.0, 1e-7))
    assert none == pytest.approx(small, rel=1e-5)


@given(
    st.integers(2, 8),
    st.lists(st.floats(0.0, 5.0), min_size=4, max_size=12),
    st.floats(0.0, 0.05),
    st.integers(0, 2**32 - 1),
)
def test_what_slows_all_ranks_alike_makes_none_wait(ranks: int, common: list[float], spread: float, seed: int) -> None:
    own = np.random.default_rng(seed).normal(1.0, spread, (ranks, len(common))).clip(0.5)
    quiet, busy = (between_ranks((own + extra).tolist()) for extra in (np.zeros(len(common)), np.array(common)))
    assert len(quiet) == ranks * len(common)
    shift = np.mean(common)
    assert np.allclose(np.array(busy) - shift, quiet, atol=1e-9)
    if spread == 0:
        assert straggling(tuple(round(one, 9) for one in busy), ranks) is None


def test_what_is_left_has_the_spread_of_one_rank() -> None:
    drawn = np.random.default_rng(0).normal(100.0, 1.0, (4, 5000))
    wandering = np.random.default_rng(1).normal(0.0, 20.0, 5000)
    assert np.std(between_ranks((drawn + wandering).tolist())) == pytest.approx(1.0, rel=0.02)
    assert between_ranks([[3.0, 5.0]]) == (3.0, 5.0)


def test_iterations_that_take_one_of_two_times_take_no_other() -> None:
    found = straggling((0.128,) * 450 + (0.140,) * 50, 256)
    assert found is not None
    mean = 0.9 * 0.128 + 0.1 * 0.140
    assert mean + found.wait_s == pytest.approx(0.140, rel=2e-3)
    assert found.p10_s == found.p90_s
