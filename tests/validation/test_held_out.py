"""Constants chosen again without a row's cluster and family, and what travels with the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backbeat.model import cluster
from validation import cases, held_out
from validation.ask import Answer, Asker, holding
from validation.case import Case
from validation.cases import Table
from validation.figures import Judged

CHECKED = Path(__file__).resolve().parents[2] / "backbeat" / "zoo" / "checked.json"


def case(cluster: str, family: str) -> Case:
    return Case(table="t", identity="i", cluster=cluster, family=family, accelerator="h100", seconds=1.0)


GRID = held_out.CONSTANTS["sustained"].grid
H100 = "sustained h100"


def chosen(own: Case, groups: list[tuple[Case, float, int]]) -> Any:
    """Among rows of which each group is best off with one share."""
    rows, errors = [], {}
    for one, best, count in groups:
        for _ in range(count):
            rows.append(replace(one, id=str(len(rows))))
            errors[H100, one.table, rows[-1].id] = [abs(share - best) for share in GRID]
    return held_out.chosen_again(own, H100, rows, errors)


def test_neither_the_cluster_nor_the_family_of_a_row_chooses_for_it() -> None:
    own = case("mine", "gpt-1b")
    same_cluster, same_family = (case("mine", "llama-7b"), 0.5, 9), (case("yours", "gpt-175b"), 0.5, 9)
    others = case("yours", "llama-7b"), 0.8, held_out.FEWEST
    assert chosen(own, [same_cluster, same_family, others]) == 0.8
    assert chosen(own, [same_cluster, same_family]) == 1.0
    assert chosen(own, [same_cluster, (*others[:2], held_out.FEWEST - 1)]) == 1.0


def test_a_constant_that_is_stated_is_the_line_without_ones_own_cluster() -> None:
    own, other = case("vTrain's A100s", "gpt-1b"), case("yours", "gpt-1b")
    assert held_out.took_part(own, "waits", [])
    assert not held_out.took_part(other, "waits", [own])
    assert held_out.chosen_again(own, "waits", [], {}) == (23e-6, 9.1e-6)


def test_rows_that_made_a_rule_inform_no_range() -> None:
    """A constant is chosen again; of collectives no range is made."""
    silent = {name for names in json.loads(CHECKED.read_text())["informs nothing"].values() for name in names}
    tables = (cases.table(name) for name in cases.names())
    rules = {one.name for one in tables if any(held_out.constant(name) is None for name in one.chose)}
    assert rules - {"nccl_clusters", "nccl_intra_node", "collectives_ethernet"} <= silent


def test_other_constants_hold_while_they_are_asked_with() -> None:
    asker = Asker(Table(name="t", title="", source="", licence="", rows="", routes=()))
    own = case("mine", "gpt-1b")

    def told() -> tuple[float, float, float]:
        return asker.gpu(own).sustained_share, asker.framework("nanotron").unfused, cluster.CALL_S

    before = told()
    with holding({H100: 0.5, "nanotron.unfused": 1.0, "waits": (1e-6, 2e-6)}):
        assert told() == (0.5, 1.0, 1e-6)
    assert told() == before


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
