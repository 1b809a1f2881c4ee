"""The reducer itself on several ranks: order and overlap, equality with stock DDP, agreement, faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from auto_checks import CHECKS as AUTO
from rank_answers import all_right
from rank_faults import CHECKS as OF_RANKS
from rank_pool import DEVICE, SIZES, RankPool
from runtime_checks import CHECKS

FAULTS = sorted(name for name in OF_RANKS if name.startswith("rank_"))
ENDS = {name for name in FAULTS if name.startswith(("rank_dies", "rank_lost"))}
"""The last rank's process ends."""
READ_LATE = sorted(name for name in OF_RANKS if name.startswith("late_status_"))
PEACEFUL = sorted({*CHECKS, *AUTO})
NEEDS_TWO = {
    "a_strategy_by_name",
    "auto_calibrates_beneath_training",
    "auto_goes_back_if_worse",
    "auto_follows_drift",
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


@pytest.mark.skipif(DEVICE != "cpu", reason="on NCCL a lost rank is tried in test_lost_rank.py")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("size", SIZES)
def test_faults_are_named(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size > 2 and name in ("rank_dies_forward", "rank_dies_early", "rank_dies_late"):
        pytest.skip("the moment is tried on two ranks")
    answers = ranks(size).run(name, "backbeat", timeout=3)
    all_right(answers[:-1] if name in ENDS else answers)
    if name in ENDS:
        assert answers[-1]["outcome"] == "died"
