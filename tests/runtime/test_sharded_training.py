"""Sharded plans on 2 and 4 ranks, against torch's `fully_shard` written by hand and against DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right
from rank_pool import SIZES, RankPool
from sharded_checks import CHECKS


@pytest.mark.parametrize("name", sorted(CHECKS))
@pytest.mark.parametrize("size", SIZES)
def test_sharded_training(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    all_right(ranks(size).run(name, "backbeat"))
