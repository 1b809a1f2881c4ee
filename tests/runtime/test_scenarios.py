"""Every scenario on backbeat's reducer, on 2 and 4 gloo ranks (BACKBEAT_TEST_DEVICE=cuda: NCCL, one rank or more)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import SIZES, RankPool
from runtime_scenarios import SCENARIOS


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_mean(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(size).run(name, "backbeat")
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"
