"""Which candidate is taken, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_candidates import candidate

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes
from backbeat.runtime.parallel.candidates import KINDS
from backbeat.runtime.parallel.choice import decide, extrapolation, simplest, worth_trying
from backbeat.runtime.parallel.trials import Trials, affordable

ALL = [candidate(kind) for kind in KINDS]


@given(st.lists(st.floats(1e-3, 10), min_size=len(ALL), max_size=len(ALL)), st.floats(0, 0.5))
def test_the_simplest_of_the_fastest(times: list[float], tolerance: float) -> None:
    seconds = {one.name: time for one, time in zip(ALL, times, strict=True)}
    taken = simplest(ALL, seconds, tolerance)
    limit = min(times) * (1 + max(tolerance, 0.01))
    assert seconds[taken.name] <= limit
    assert all(seconds[one.name] > limit for one in ALL if one.simplicity < taken.simplicity)


def test_nothing_is_tried_where_the_bound_leaves_nothing() -> None:
    stock = candidate("stock", 1.0, bound_s=0.995)
    assert worth_trying([stock, candidate("buckets", 0.995), candidate("units", 1.2)]) == [stock]
    _, words = decide([stock], Trials(), None)
    assert "the bound leaves nothing to gain" in words
    # A shorter update is not in the bound of buckets.
    units = candidate("units", 0.9)
    assert worth_trying([stock, units]) == [stock, units]


def test_small_messages_say_little_of_a_large_model() -> None:
    gpt2 = bb.Profile.load("gpt2-b8-bf16-h200")
    for largest, times in ((65_536, 1024), (64 * 2**20, 1), (128 * 2**20, 1)):
        curve = CollectiveTimes(points=((4096, 1e-3), (largest, 2e-3)))
        assert extrapolation(bb.Network(name="slow", workers=2, all_reduce=curve), gpt2) == times
    line = CollectiveTimes(alpha_s=1, beta_s_per_byte=1)
    assert extrapolation(bb.Network(name="l", workers=2, all_reduce=line), gpt2) == 1
    assert extrapolation(bb.Network(name="l", workers=2, all_reduce=line, all_gather=curve), gpt2) == 1
    assert "extrapolated to messages 64 times as large" in decide(ALL, Trials(), None, extrapolated=64.0)[1]
    assert "extrapolated" not in decide(ALL, Trials(), None, extrapolated=8.0)[1]


def test_measured_decides_over_predicted() -> None:
    stock, buckets = candidate("stock", 1.0), candidate("buckets", 0.5)
    trials = Trials(turns_s={stock.name: [1.0, 1.02], buckets.name: [1.1, 1.1]})
    assert decide([stock, buckets], trials, None)[1].startswith("stock DDP, 1.00 s a step measured")
    trials = Trials(turns_s={stock.name: [1.0, 1.02], buckets.name: [0.8, 0.8]})
    assert "1.25 times as fast as stock DDP (1.00 s)" in decide([stock, buckets], trials, None)[1]


def test_words_say_only_what_holds() -> None:
    stock, buckets = candidate("stock", 1.3, bound_s=1.2, exposed_s=0.2), candidate("buckets", bound_s=0.5)
    trials = Trials(turns_s={stock.name: [1.0, 1.02], buckets.name: [1.1, 1.1]})
    words = decide([stock, buckets], trials, None)[1]
    assert words.startswith(
        "stock DDP, 1.00 s a step measured; 1.10 s with 1 bucket of buckets on 1 communicator; less"
    )
    assert words.endswith("less than the bound of 1.20 s: steps were slower while the example was timed")
    # Longer than what a step computes: it was the link.
    stock = candidate("stock", 1.3, bound_s=1.2, exposed_s=0.5)
    words = decide([stock, buckets], trials, None)[1]
    assert words.endswith("less than the bound of 1.20 s: messages were slower while the network was measured")


def test_of_a_single_candidate_it_says_what_was_measured_and_why_no_other_was_tried() -> None:
    stock, buckets, units = candidate("stock", 1.0, 0.94), candidate("buckets", 1.06), candidate("units", 1.5)
    assert worth_trying([stock, buckets, units]) == [stock]
    words = decide([stock], Trials(turns_s={stock.name: [1.034]}), None, excluded=[buckets, units])[1]
    assert words == (
        "stock DDP, 1.03 s a step measured; 10% over the bound of 940 ms; nothing else was tried: "
        "1 bucket of buckets on 1 communicator is predicted to take 1.06 s, stock DDP 1.00 s"
    )


def test_turns_that_differ_are_no_gain() -> None:
    stock, buckets = candidate("stock"), candidate("buckets")
    trials = Trials(turns_s={stock.name: [1.0, 1.2], buckets.name: [0.9, 1.05]})
    assert decide([stock, buckets], trials, None)[1].startswith("stock DDP")


def test_predictions_decide_where_not_all_were_tried() -> None:
    stock, units = candidate("stock", 1.0), candidate("units", 0.5)
    taken, words = decide([stock, units], Trials(turns_s={stock.name: [1.0]}), None)
    assert taken is units
    assert "predicted (no time was left" in words
    assert words.startswith("1 unit of fsdp")
    assert "predicted (full)" in decide([stock, units], Trials(), "full")[1]
    little = decide([stock, candidate("buckets", 0.98)], Trials(), "full")[1]
    assert little.startswith("stock DDP, 1.00 s a step predicted (full); 980 ms with 1 bucket")
    assert "no gain beyond the 2.5% that predictions may be off by" in little


def test_where_one_was_tried_predictions_count_as_far_as_they_were_right_about_it() -> None:
    """Predicted at 271 ms and measured at 140, stock DDP stays: what is predicted at 236 may be as far off."""
    stock, buckets = candidate("stock", 0.271), candidate("buckets", 0.236)
    words = decide([stock, buckets], Trials(turns_s={stock.name: [0.140]}), None)[1]
    assert words.startswith(
        "stock DDP, 140 ms a step measured; 122 ms with 1 bucket of buckets on 1 communicator, predicted"
    )
    assert "(no time was left to try all; budget_s= gives more), no gain beyond the 93.6% that predictions may" in words
    words = decide([stock, buckets], Trials(turns_s={stock.name: [0.280]}), None)[1]
    assert words.startswith("1 bucket of buckets on 1 communicator, 244 ms a step predicted (no time was left")
    assert "1.15 times as fast as stock DDP (280 ms measured)" in words


def test_predictions_extrapolated_too_far_take_the_simplest() -> None:
    stock, buckets, units = candidate("stock", 1.0), candidate("buckets", 0.8), candidate("units", 0.5)
    for trials in (Trials(), Trials(turns_s={stock.name: [1.0]})):
        words = decide([stock, buckets, units], trials, None, extrapolated=49.0)[1]
        assert words.startswith("stock DDP, 1.00 s a step")
        assert "49 times as large as measured, too far to take more than the simplest" in words
        assert not decide([stock, buckets, units], trials, None, extrapolated=8.0)[1].startswith("stock DDP")
    # What `fully_shard` does by itself needs no plan file.
    assert decide([buckets, units], Trials(), None, extrapolated=49.0)[1].startswith("1 unit")
    # Two that were measured need no prediction.
    trials = Trials(turns_s={stock.name: [1.0, 1.0], buckets.name: [0.8, 0.8]})
    words = decide([stock, buckets, units], trials, None, extrapolated=49.0)[1]
    assert words.startswith("1 bucket")
    assert "too far" not in words


def test_two_that_were_tried_decide_and_the_rest_is_named() -> None:
    stock, buckets, units = candidate("stock", 1.0), candidate("buckets", 0.9), candidate("units", 0.95)
    trials = Trials(turns_s={stock.name: [1.0], buckets.name: [1.1]})
    words = decide([stock, buckets, units], trials, None)[1]
    assert words.startswith("stock DDP, 1.00 s a step measured")
    assert words.endswith("no time was left to try 1 unit of fsdp on replicate(1) * shard(2); budget_s= gives more")
    # Of one turn nobody knows how well it repeats.
    trials = Trials(turns_s={stock.name: [1.0], buckets.name: [0.98]})
    assert decide([stock, buckets], trials, None)[1].startswith("stock DDP")


def test_slow_steps_are_tried_in_one_turn_or_only_the_best() -> None:
    stock, buckets, units = found = candidate("stock", 1.0), candidate("buckets", 0.9), candidate("units", 0.8)
    assert affordable(found, 60) == ([stock.name, units.name, buckets.name], 2)
    assert affordable(found, 30) == ([stock.name, units.name, buckets.name], 1)
    assert affordable(found, 20) == ([stock.name, units.name], 1)
    assert affordable(found, 10) == ([], 0)
    assert affordable([units, buckets], 20) == ([units.name, buckets.name], 1)
    copies = candidate("copies", 0.85)
    assert affordable([*found, copies], 35)[0] == [stock.name, units.name, copies.name, buckets.name]
    assert affordable([*found, copies], 30) == ([stock.name, units.name, copies.name], 1)


def test_equally_fast_copies_give_way_to_one_copy() -> None:
    """Kinds are in order from the simplest on: HSDP needs a mesh of two dimensions."""
    units, copies = candidate("units"), candidate("copies")
    assert simplest([copies, units], {units.name: 1.0, copies.name: 1.0}, 0.0) == units


def test_what_is_far_behind_has_no_second_turn_but_stock_ddp_has() -> None:
    stock, buckets, units = candidate("stock"), candidate("buckets"), candidate("units")
    trials = Trials(turns_s={stock.name: [2.0], units.name: [1.6]})
    assert [trials.much_slower(one) for one in (stock, buckets, units)] == [False, False, False]
    trials.turns_s[buckets.name] = [1.0]
    assert [trials.much_slower(one) for one in (stock, buckets, units)] == [False, False, True]
    assert not Trials().much_slower(units)


def test_what_was_dropped_is_said() -> None:
    stock, units = candidate("stock"), candidate("units")
    trials = Trials(turns_s={units.name: [1.0, 1.0]}, dropped={stock.name: "rank 1: full"})
    words = decide([stock, units], trials, None)[1]
    assert "stock DDP does not run here" in words
    assert "stock DDP was dropped, rank 1: full" in words
    with pytest.raises(InputError, match="nothing ran: stock DDP: rank 1: full"):
        decide([stock], Trials(dropped={stock.name: "rank 1: full"}), None)
