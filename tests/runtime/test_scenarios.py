"""Every scenario on backbeat's reducer, on 2 and 4 gloo ranks (BACKBEAT_TEST_DEVICE=cuda: NCCL, one rank or more)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rank_pool import DEVICE, SIZES, RankPool
from runtime_scenarios import SCENARIOS


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_mean(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    _is_right(ranks(size).run(name, "backbeat"))


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does so anyway")
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_gradients_are_the_mean_where_the_host_reads_late(name: str, ranks: Callable[[int], RankPool]) -> None:
    _is_right(ranks(2).run(name, "deferred"))


def _is_right(answers: list[dict[str, Any]]) -> None:
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"
