"""An error where ranks agree: the next step is right on every rank, or raises on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from agreement_checks import CASES, SITES, SITUATIONS, STEPS, is_long, sites
from rank_answers import all_right
from rank_pool import DEVICE, RankPool


def test_every_agreement_is_known() -> None:
    """A new one needs a situation in which it is reached."""
    assert sites() == SITES.keys()
    assert {name for names in SITES.values() for name in names} == SITUATIONS.keys()


@pytest.mark.skipif(DEVICE != "cpu", reason="on NCCL ranks that wait for one that raised wait for the watchdog")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if is_long(case) else []) for case in CASES]
)
def test_an_error_where_ranks_agree(case: str, ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(2).run(case, "backbeat", timeout=5)
    all_right(answers)
    found = [json.loads(answer["detail"]) for answer in answers]
    assert any(one["reached"] for one in found), "nobody came there"
    assert not any(one["unknown"] for one in found), found
    for step in zip(*(one["steps"][-STEPS:] for one in found), strict=True):
        raised = {outcome.startswith("raised") for outcome in step}
        assert "wrong" not in step, found
        assert len(raised) == 1, f"some ranks go on alone: {found}"
        assert raised == {False} or not case.endswith("agreed"), f"nothing had changed: {found}"
