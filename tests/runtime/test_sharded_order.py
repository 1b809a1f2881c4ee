"""FSDP2's rules, as predicted and as the installed torch follows them, on 2 and 4 gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_answers import all_right
from rank_pool import DEVICE, SIZES, RankPool
from sharded_order_checks import CHECKS


@pytest.mark.skipif(DEVICE != "cpu", reason="the order of calls is the same, and logged on the CPU")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_torch_calls_in_the_predicted_order(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(size).run(name, "stock"))
