"""Compressed plans: every scenario with buckets that send all they have, and training step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from compressed_checks import CHECKS
from compressed_faults import CHECKS as FAULTS
from rank_answers import all_right, run_scenario
from rank_pool import DEVICE, SIZES, RankPool
from runtime_scenarios import SCENARIOS

OTHERWISE = {
    "comm_hook_unused": "communication hooks are refused",
    "comm_hooks": "communication hooks are refused",
    "exception_differs": "what a failed step brought stays in the residual",
    "exception_everywhere": "what a failed step brought stays in the residual",
    "exception_on_one": "what a failed step brought stays in the residual",
    "frozen": "a gradient that comes late, here of a parameter that unfrozen, goes with the next step",
    "grad_scaler": "gradient scalers must not be used",
    "not_finite": "a gradient that is not finite is an error",
    "reentrant_beside": "what comes late goes with the next step",
    "unused_changing": "a parameter that was ever used has a gradient from then on",
    "unused_with_flag": "a parameter that was ever used has a gradient from then on",
}
"""Scenarios in which compressed plans differ on purpose; `compressed_checks` says how."""

ON_TWO_ONLY = {"compressed_a_dead_rank_is_named"}


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - set(OTHERWISE)))
def test_everything_sent_is_a_dense_plan(name: str, ranks: Callable[[int], RankPool]) -> None:
    run_scenario(ranks(SIZES[0]), name, "compressed")


@pytest.mark.parametrize("name", sorted({**CHECKS, **FAULTS}))
@pytest.mark.parametrize("size", SIZES)
def test_compressed(name: str, size: int, ranks: Callable[[int], RankPool]) -> None:
    if size != 2 and name in ON_TWO_ONLY:
        pytest.skip("tried on two ranks")
    if DEVICE != "cpu" and name in ON_TWO_ONLY:
        pytest.skip("on NCCL, where waiting does not raise, a lost rank is tried in test_lost_rank.py")
    all_right(ranks(size).run(name, "compressed", timeout=10 if name in ON_TWO_ONLY else 30))
