"""Measures of answers: their rules, on any numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation import measures

seconds = st.floats(0.01, 100.0)
pairs = st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8)


@given(pairs)
def test_the_best_choice_has_no_regret_and_any_choice_has_none_below(found: list[tuple[float, float]]) -> None:
    assert measures.regret(found) >= 0
    assert measures.regret([(measured, measured) for _, measured in found]) == 0


@given(pairs, st.floats(0.1, 10.0))
def test_ratios_and_ranks_do_not_see_a_common_factor(found: list[tuple[float, float]], factor: float) -> None:
    scaled = [(predicted * factor, measured) for predicted, measured in found]
    assert measures.ratios(scaled) == pytest.approx(measures.ratios(found))
    if len({one for one, _ in found}) == len(found) == len({one for one, _ in scaled}):
        assert measures.rank_correlation(scaled) == measures.rank_correlation(found)


@given(seconds, st.floats(1.0, 3.0), st.floats(1.001, 3.0))
def test_a_range_cannot_win_by_being_wide(measured: float, width: float, more: float) -> None:
    """Of two ranges that hold the case, the narrower scores better; one that misses it pays for how far."""
    narrow = measures.interval_score(measured / width, measured * width, measured)
    wide = measures.interval_score(measured / width / more, measured * width * more, measured)
    assert narrow < wide
    assert narrow == pytest.approx(2 * math.log(width))
    missed = measures.interval_score(measured * more, measured * more * width, measured)
    assert missed > math.log(width) + 19 * math.log(more)


def test_ties_share_a_rank() -> None:
    assert measures.rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(math.sqrt(3) / 2)
    assert measures.rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_said_to_fit_and_failed_weighs_five_times() -> None:
    assert measures.fits([(True, False)])["cost"] == 5 * measures.fits([(False, True)])["cost"] == 5
    assert measures.fits([]) == {}


def test_choices_need_two_ways_of_a_job() -> None:
    assert measures.choosing({"a": [(1.0, 1.0)]}) == {}
    found = measures.choosing({"a": [(1.0, 2.0), (2.0, 1.0)], "b": [(1.0, 1.0), (2.0, 2.0)], "c": [(1.0, 1.0)]})
    assert (found["jobs"], found["regret"], found["regret p90"], found["ranks"]) == (2, 0.5, 1.0, None)
    assert found["ratios"] == pytest.approx((0.75 + 0.0) / 2)


def test_what_is_written_has_four_digits() -> None:
    assert measures.rounded({"a": 1 / 3, "b": [2 / 3, "x"], "n": 3}) == {"a": 0.3333, "b": [0.6667, "x"], "n": 3}
