"""Sharded plans on 2 and 4 ranks, against torch's `fully_shard` written by hand and against DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rank_answers import all_right
from rank_pool import DEVICE, SIZES, RankPool
from sharded_checks import CHECKS

TWO_DIMENSIONS = {
    "a_mesh_that_is_a_part_of_the_world", "hybrid_mesh", "other_numbers_of_ranks_are_refused", "the_plans_own_mesh",
}  # fmt: skip
"""On NCCL (torch 2.11) processes ended that made such a mesh after they had destroyed a process group."""


@pytest.mark.parametrize("name", sorted(CHECKS))
@pytest.mark.parametrize("size", SIZES)
def test_sharded_training(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    all_right(ranks(size).run(name, "backbeat", fresh=DEVICE != "cpu" and name in TWO_DIMENSIONS))


@pytest.mark.skipif(SIZES != [2, 4], reason="needs two jobs, of two and of four ranks")
def test_a_second_job_with_more_ranks_goes_on(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(2).run("first_job", str(tmp_path)))
    all_right(ranks(4).run("second_job", str(tmp_path)))
