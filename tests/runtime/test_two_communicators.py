"""Every scenario with its buckets spread over two communicators, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import run_scenario
from rank_pool import SIZES, RankPool
from runtime_scenarios import SCENARIOS


@pytest.mark.skipif(2 not in SIZES, reason="needs two ranks (BACKBEAT_TEST_RANKS)")
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_two_communicators(name: str, ranks: Callable[[int], RankPool]) -> None:
    run_scenario(ranks(2), name, "two-communicators")
