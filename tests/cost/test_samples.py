"""Statistics of repeated timings."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.samples import monotone, quantile, summarise

times = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=40)


def test_outliers_do_not_move_the_median() -> None:
    calm = [1.0 + 0.001 * step for step in range(40)]
    timing = summarise([*calm, 500.0, 800.0])
    assert timing.median_s == pytest.approx(1.02, rel=0.01)
    assert timing.jitter < 0.03


def test_more_repeats_make_the_median_surer() -> None:
    draw = random.Random(1)
    samples = [draw.gauss(1.0, 0.05) for _ in range(400)]
    assert summarise(samples).uncertainty < summarise(samples[:20]).uncertainty


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


@given(times)
def test_the_interval_encloses_the_median(samples: list[float]) -> None:
    timing = summarise(samples)
    assert min(samples) <= timing.median_s <= max(samples)
    if timing.median_s > 0:
        width = (max(samples) - min(samples)) / timing.median_s
        assert 0 <= timing.jitter <= width * (1 + 1e-9)
        assert 0 <= timing.uncertainty <= width / 2 * (1 + 1e-9)
    assert timing.repeats == len(samples)


@given(times, st.floats(0, 1))
def test_quantiles_lie_within(samples: list[float], share: float) -> None:
    ordered = sorted(samples)
    assert ordered[0] <= quantile(ordered, share) <= ordered[-1] * (1 + 1e-12)


@given(st.lists(st.tuples(st.floats(1e-6, 10.0), st.floats(0.1, 10.0)), min_size=1, max_size=30))
def test_monotone_never_falls_and_keeps_the_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    fitted = monotone(values, weights)
    assert all(before <= after for before, after in itertools.pairwise(fitted))
    total = sum(value * weight for value, weight in pairs)
    assert sum(value * weight for value, weight in zip(fitted, weights, strict=True)) == pytest.approx(total)
    if values == sorted(values):
        assert fitted == values
