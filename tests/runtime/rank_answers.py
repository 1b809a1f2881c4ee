"""What ranks must answer."""

from __future__ import annotations

from typing import Any

import pytest
from rank_pool import DEVICE, RankPool

from tests.golden import runtime as golden


def all_right(answers: list[dict[str, Any]]) -> None:
    if all(answer["outcome"] == "skipped" for answer in answers):
        pytest.skip(answers[0]["detail"])
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"rank {rank}: {answer['outcome']}: {answer['detail']}"


def run_scenario(pool: RankPool, name: str, route: str) -> None:
    """Right on every rank, and on the CPU as `tests/golden` has it on record."""
    on_record = DEVICE == "cpu"
    answers = pool.run(name, route, record=on_record)
    if on_record and all(answer["outcome"] in ("right", "skipped") for answer in answers):
        golden.compare(golden.key(pool.size, route, name), golden.logs(answers))
    all_right(answers)
