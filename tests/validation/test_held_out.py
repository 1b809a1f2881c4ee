"""Constants chosen again without a row's cluster and family, and what travels with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from validation import held_out
from validation.ask import Answer, shares_of, sustaining
from validation.cases import Case
from validation.figures import Judged

CHECKED = Path(__file__).resolve().parents[2] / "backbeat" / "zoo" / "checked.json"


def case(cluster: str, family: str) -> Case:
    return Case(table="t", identity="i", cluster=cluster, family=family, accelerator="h100", seconds=1.0)


def errors(best: float) -> list[float]:
    return [abs(share - best) for share in held_out.GRID]


def test_neither_the_cluster_nor_the_family_of_a_row_chooses_for_it() -> None:
    own = case("mine", "gpt-1b")
    same_cluster = [(case("mine", "llama-7b"), errors(0.5))] * 9
    same_family = [(case("yours", "gpt-175b"), errors(0.5))] * 9
    others = [(case("yours", "llama-7b"), errors(0.8))] * held_out.FEWEST
    assert held_out.share_without(own, [*same_cluster, *same_family, *others]) == (0.8, 0.8)
    assert held_out.share_without(own, [*same_cluster, *same_family]) is None
    assert held_out.share_without(own, [*same_cluster, *others[1:]]) is None


def test_other_shares_hold_while_they_are_asked_with() -> None:
    before = shares_of("h100")
    with sustaining("h100", (0.5, 0.5)):
        assert shares_of("h100") == (0.5, 0.5)
    with sustaining("h100", None):
        assert shares_of("h100") == shares_of("rtx-4090")
    assert shares_of("h100") == before
    with sustaining("rtx-4090", (0.5, 0.5)):
        pass
    assert shares_of("rtx-4090") == shares_of("l40s")


def test_what_was_compared_is_told_by_cell() -> None:
    rows = [
        Judged(case=case(f"c{place}", "gpt-1b"), route="shape", answer=Answer(seconds=seconds))
        for place, seconds in enumerate((0.9, 1.1, 1.3))
    ]
    (cell,) = held_out.checked(rows)
    assert cell["clusters"] == ["c0", "c1", "c2"]
    assert cell["families"] == ["gpt"]
    assert (cell["n"], cell["median"], cell["bias"]) == (3, 0.1, 0.1)
    assert cell["low"] == pytest.approx(1 / 1.3, abs=1e-4)
    assert cell["high"] == pytest.approx(1 / 0.9, abs=1e-4)


def test_the_committed_file_tells_no_measured_time() -> None:
    told = json.loads(CHECKED.read_text())
    assert told["commit"]
    assert told["rows"]
    for row in told["rows"]:
        assert {"gpu", "scale", "parallelism", "route", "n", "clusters", "families", "low", "high"} <= set(row)
        assert row["low"] <= row["high"]
        assert not {"seconds", "memory_bytes"} & set(row)
