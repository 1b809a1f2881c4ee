"""`validation/lab`: a matrix is measured once."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from backbeat.lab.plans import parse_plans
from backbeat.lab.setting import Setting
from tests.forks import run_python
from tests.lab.cases import NEEDS_NAMESPACES, profile

VALIDATION = Path(__file__).parents[2] / "validation"
MEASURE = VALIDATION / "lab" / "measure.py"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
    monkeypatch.syspath_prepend(str(MEASURE.parent))
    return runpy.run_path(str(MEASURE))


def test_what_was_measured_is_not_measured_again(measure: dict[str, Any]) -> None:
    record = {"cases": [{"model": "small", "plan": "equal:3"}]}
    choices = parse_plans(["equal:3", "wfbp"])
    assert measure["missing"](record, ["small"], choices) == {"small": choices[1:]}
    assert measure["missing"](record, ["small"], choices[:1]) == {}


def test_two_communicators_on_many_nccl_nodes_are_left_out_where_cores_are_few(
    measure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    choices = parse_plans(["wfbp", "best/2"])
    four, eight = (Setting(nodes=nodes, rate_bits=1e10, backend="nccl") for nodes in (4, 8))
    assert measure["affordable"](choices, four) == choices
    assert measure["affordable"](choices, eight) == choices[:1]


@NEEDS_NAMESPACES
def test_a_matrix_is_measured_once(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the lab's workers need torch")
    pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
    profile(size=20_000).save(tmp_path / "tiny.json")
    results = tmp_path / "results"

    def run(*words: str) -> str:
        done = run_python(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = (
        str(MEASURE), str(results), "--backend", "gloo", "--models", "tiny.json", "--nodes", "2", "--bandwidth",
        "200mbit", "--dilation", "2", "--seconds", "0.1s", "--budget", "1s", "--strategy",
    )  # fmt: skip
    run(*arguments, "wfbp")
    run(*arguments, "wfbp,single")
    (record,) = results.glob("gloo-*.json")
    kept = json.loads(record.read_text())
    assert [(case["session"], case["plan"]) for case in kept["cases"]] == [(0, "wfbp"), (1, "single")]
    assert [model["name"] for model in kept["models"]] == ["tiny.json"]
    assert kept["alone"][0]["measured_s"] >= kept["alone"][0]["expected_s"] * 0.999
