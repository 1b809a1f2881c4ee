"""Every scenario with its buckets spread over two communicators, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import SIZES, RankPool
from runtime_scenarios import SCENARIOS


@pytest.mark.skipif(2 not in SIZES, reason="needs two ranks (BACKBEAT_TEST_RANKS)")
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_two_communicators(name: str, ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(2).run(name, "two-communicators")
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"
