"""What people's tools read of stock DDP, and the option that skips unused buckets, on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right
from rank_pool import DEVICE, SIZES, RankPool
from stock_checks import CHECKS

LATE = sorted(name for name in CHECKS if "skip" in name and "refused" not in name)


@pytest.mark.parametrize("name", sorted(CHECKS))
@pytest.mark.parametrize("size", SIZES)
def test_stock_habits(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(size).run(name, "backbeat"))


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does so anyway")
@pytest.mark.parametrize("name", LATE)
def test_stock_habits_where_the_host_reads_late(name: str, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(SIZES[0]).run(name, "deferred"))
