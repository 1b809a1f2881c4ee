"""The reducer itself on several ranks: order and overlap, equality with stock DDP, agreement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from auto_checks import CHECKS as AUTO
from rank_answers import all_right
from rank_faults import CHECKS as OF_RANKS
from rank_pool import SIZES, RankPool
from runtime_checks import CHECKS

READ_LATE = sorted(name for name in OF_RANKS if name.startswith("late_status_"))
PEACEFUL = sorted({*CHECKS, *AUTO})
NEEDS_TWO = {
    "a_strategy_by_name",
    "auto_calibrates_beneath_training",
    "auto_goes_back_if_worse",
    "auto_keeps_a_plan_that_is_no_slower",
    "different_models_are_refused",
    "different_plans_are_refused",
}
ALONE = {"nothing_grows"}
"""Looks at the whole process, in which nothing else must have run."""
ONLY_TWO = {"bit_equal_to_stock", "bit_equal_through_ddp_backend", "nothing_grows"}


@pytest.mark.parametrize("name", PEACEFUL)
@pytest.mark.parametrize("size", SIZES)
def test_reducer(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size == 1 and name in NEEDS_TWO:
        pytest.skip("needs two ranks")
    if size > 2 and name in ONLY_TWO:
        pytest.skip("tried on two ranks; sums of more numbers depend on their order")
    all_right(ranks(size).run(name, "backbeat", fresh=name in ALONE))


@pytest.mark.parametrize("name", READ_LATE)
@pytest.mark.parametrize("size", SIZES)
def test_no_wrong_sum_where_the_host_reads_late(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size == 1 and name != "late_status_leaves_good_sums_alone":
        pytest.skip("needs two ranks")
    all_right(ranks(size).run(name, "deferred"))
