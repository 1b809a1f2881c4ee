"""Ranks that die, stand still or go elsewhere: the others name them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right
from rank_faults import CHECKS
from rank_pool import DEVICE, SIZES, RankPool

FAULTS = sorted(name for name in CHECKS if name.startswith("rank_"))
ENDS = {name for name in FAULTS if name.startswith(("rank_dies", "rank_lost"))}
"""The last rank's process ends."""
ON_TWO = {f"rank_dies_{moment}" for moment in ("forward", "early", "late")} | {
    f"rank_forwards_in_order_{order}" for order in ("120", "102")
}


@pytest.mark.skipif(DEVICE != "cpu", reason="on NCCL a lost rank is tried in test_lost_rank.py")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("size", SIZES)
def test_faults_are_named(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size > 2 and name in ON_TWO:
        pytest.skip("the moment or the order is tried on two ranks")
    answers = ranks(size).run(name, "backbeat", timeout=3)
    all_right(answers[:-1] if name in ENDS else answers)
    if name in ENDS:
        assert answers[-1]["outcome"] == "died"
