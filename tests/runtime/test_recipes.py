"""Recipes under every kind of plan, on 2 ranks; and gone on with by 2 of 4, and by 4 after 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right
from rank_pool import DEVICE, SIZES, RankPool
from recipe_checks import CHECKS

ON_FOUR = {"recipe_resumed_by_other_ranks"}
# Compiled block by block is tried in `make test`.
LONG = {"recipe_compiled_as_one"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in sorted(CHECKS)]
)
def test_recipe(name: str, ranks: Callable[[int], RankPool]) -> None:
    size = 4 if name in ON_FOUR else 2
    if size not in SIZES:
        pytest.skip(f"needs {size} ranks")
    # Where a process has had another process group on a GPU, torch 2.11 ends it when a mesh splits the new one.
    all_right(ranks(size).run(name, "backbeat", fresh=DEVICE != "cpu"))
