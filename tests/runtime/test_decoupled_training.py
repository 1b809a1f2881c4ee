"""Decoupled plans: every scenario, and training step by step beside stock DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decoupled_checks import CHECKS
from rank_pool import DEVICE, SIZES, RankPool
from runtime_checks import CHECKS as REDUCER_CHECKS
from runtime_scenarios import SCENARIOS

ON_FOUR = {
    "exception_on_one", "join", "mixed_dtypes", "no_sync", "plain", "shuffled_plan", "sparse", "subgroup", "unfrozen",
    "unused_changing", "wire",
    "decoupled_accumulation", "decoupled_clipping_and_scaling", "decoupled_readers_see_what_they_should",
    "decoupled_schedulers", "decoupled_unused_and_frozen",
}  # fmt: skip
"""Run on more than two ranks as well."""
READ_LATE = {
    "accumulate", "exception_differs", "exception_everywhere", "exception_on_one", "forward_forward", "grad_scaler",
    "join", "mixed_dtypes", "no_sync", "not_finite", "plain", "reentrant_later", "shared_reentrant", "unfrozen",
    "unused_accumulating", "unused_by_rank", "unused_changing", "unused_then_used", "wire",
    "decoupled_accumulation", "decoupled_clipping_and_scaling", "decoupled_dropped_gradients",
    "decoupled_readers_see_what_they_should", "decoupled_schedulers", "decoupled_unused_and_frozen",
    "late_word_of_a_broken_step", "late_word_of_a_skipped_step", "late_word_of_late_gradients",
    "late_word_of_unused_parameters",
}  # fmt: skip
"""What a guard over scattered sums could break: also where the host reads one step late."""


@pytest.mark.parametrize("name", sorted({**SCENARIOS, **CHECKS}))
@pytest.mark.parametrize("size", SIZES)
def test_decoupled(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size > 2 and name not in ON_FOUR:
        pytest.skip("tried on two ranks")
    _is_right(ranks(size).run(name, "decoupled"))


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does so anyway")
@pytest.mark.parametrize("name", sorted(READ_LATE))
def test_decoupled_where_the_host_reads_late(name: str, ranks: Callable[[int], RankPool]) -> None:
    assert name in {**SCENARIOS, **CHECKS, **REDUCER_CHECKS}
    _is_right(ranks(2).run(name, "decoupled-deferred"))


def _is_right(answers: list[dict[str, Any]]) -> None:
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"
