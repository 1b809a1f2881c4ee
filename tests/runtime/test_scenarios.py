"""Every scenario on backbeat's reducer, on 2 and 4 gloo ranks (BACKBEAT_TEST_DEVICE=cuda: NCCL, one rank or more)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right, run_scenario
from rank_pool import DEVICE, SIZES, RankPool
from runtime_scenarios import SCENARIOS

SKIPPING = {"scenarios_graphs", "scenarios_steps", "scenarios_wrapper"}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_mean(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    run_scenario(ranks(size), name, "backbeat")


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does so anyway")
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_gradients_are_the_mean_where_the_host_reads_late(name: str, ranks: Callable[[int], RankPool]) -> None:
    run_scenario(ranks(2), name, "deferred")


@pytest.mark.parametrize("name", sorted(name for name, one in SCENARIOS.items() if one.run.__module__ in SKIPPING))
def test_gradients_are_the_mean_where_unused_buckets_are_skipped(name: str, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(SIZES[0]).run(name, "skipping"))
