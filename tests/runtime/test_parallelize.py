"""`parallelize` on 2 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parallel_checks import CHECKS
from rank_answers import all_right
from rank_pool import SIZES, RankPool


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_parallelize(name: str, ranks: Callable[[int], RankPool]) -> None:
    if 2 not in SIZES:
        pytest.skip("needs two ranks")
    all_right(ranks(2).run(name, "backbeat"))
