"""Decoupled plans: every scenario, and training step by step beside stock DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decoupled_checks import CHECKS
from rank_pool import SIZES, RankPool
from runtime_scenarios import SCENARIOS

ON_FOUR = {
    "exception_on_one", "join", "mixed_dtypes", "no_sync", "plain", "shuffled_plan", "sparse", "subgroup", "unfrozen",
    "unused_changing", "wire",
    "decoupled_accumulation", "decoupled_clipping_and_scaling", "decoupled_readers_see_what_they_should",
    "decoupled_schedulers", "decoupled_unused_and_frozen",
}  # fmt: skip
"""Run on more than two ranks as well."""


@pytest.mark.parametrize("name", sorted({**SCENARIOS, **CHECKS}))
@pytest.mark.parametrize("size", SIZES)
def test_decoupled(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size > 2 and name not in ON_FOUR:
        pytest.skip("tried on two ranks")
    answers = ranks(size).run(name, "decoupled")
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"
