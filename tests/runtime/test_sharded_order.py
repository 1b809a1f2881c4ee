"""FSDP2's rules, as predicted and as the installed torch follows them, on 2 and 4 gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rank_answers import all_right
from rank_pool import DEVICE, SIZES, RankPool
from sharded_order_checks import CHECKS, Log, watch_held


@pytest.mark.skipif(DEVICE != "cpu", reason="the order of calls is the same, and logged on the CPU")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_torch_calls_in_the_predicted_order(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(size).run(name, "stock"))


def test_waits_are_seen_where_torch_holds_one_input_and_in_no_torch_are_they_lost() -> None:
    """Up to torch 2.11 there is one input, no list."""

    class Context:
        reduce_scatter_state: Any = None

    log, one = Log({}), Context()
    held = watch_held(one, log)
    for unit in (1, 0):
        held.in_post_backward = True
        one.reduce_scatter_state = None
        log.add("reduce_scatter", unit)
        one.reduce_scatter_state = f"input {unit}"
        assert one.reduce_scatter_state == f"input {unit}"
    held.in_post_backward = False
    one.reduce_scatter_state = None
    assert log.events == [("reduce_scatter", 1), ("wait", 1), ("reduce_scatter", 0)]
    with pytest.raises(AssertionError, match="neither reduce_scatter_states nor reduce_scatter_state"):
        watch_held(object(), log)
