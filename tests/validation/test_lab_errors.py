"""`validation/lab`: the committed records give the committed errors, and a matrix is measured once."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pd = pytest.importorskip("pandas", reason="the scripts need pandas")
pytest.importorskip("matplotlib", reason="the scripts need matplotlib")

from backbeat.lab.plans import parse_plans  # noqa: E402
from backbeat.lab.setting import Setting  # noqa: E402
from tests.forks import run_python  # noqa: E402
from tests.lab.cases import NEEDS_NAMESPACES, profile  # noqa: E402

VALIDATION = Path(__file__).parents[2] / "validation"
ERRORS, MEASURE = VALIDATION / "lab" / "errors.py", VALIDATION / "lab" / "measure.py"


@pytest.fixture
def errors() -> dict[str, Any]:
    return runpy.run_path(str(ERRORS))


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
    monkeypatch.syspath_prepend(str(MEASURE.parent))
    return runpy.run_path(str(MEASURE))


@pytest.mark.parametrize("folder", ["lab", "simultaneous"])
def test_the_records_give_the_published_errors(errors: dict[str, Any], folder: str) -> None:
    records = errors["load"](VALIDATION / folder)
    found = pd.concat([errors["cases"](record) for record in records])
    table = errors["summary"](found, errors["from_fewer_nodes"](records))
    kept = pd.read_csv(VALIDATION / folder / "summary.csv", index_col=["by", "name"])
    pd.testing.assert_frame_equal(table, kept, rtol=0, atol=1e-6, check_dtype=False)
    kept = pd.read_csv(VALIDATION / folder / "speedups.csv", index_col=["session", "model"])
    pd.testing.assert_frame_equal(errors["speedups"](found), kept, rtol=0, atol=1e-4, check_names=False)


def test_cases_that_do_not_repeat_are_kept_apart(errors: dict[str, Any]) -> None:
    row = errors["errors"](pd.DataFrame({"error": [0.01, -0.02, 0.03, -0.5], "repeat": [0.0, 0.02, 0.01, 0.17]}))
    assert row["repeating cases"] == 3
    assert row["repeating median"] == pytest.approx(0.02)
    assert row["repeating p95"] == pytest.approx(0.029)
    assert row["repeating worst"] == pytest.approx(0.03)
    assert row["repeating bias"] == pytest.approx(0.01)
    assert row["cases"] == 4
    assert row["worst"] == 0.5
    assert row["repeat worst"] == 0.17


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    done = subprocess.run([sys.executable, str(ERRORS), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"no measured cases in {tmp_path}" in done.stderr


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
def test_a_matrix_is_measured_once_and_judged(tmp_path: Path) -> None:
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
    shown = run(str(ERRORS), str(results))
    assert "by setting, one communicator" in shown
    assert len(pd.read_csv(results / "summary.csv").query("by == 'session, one communicator'")) == 2
    assert "<svg" in (results / "scatter.svg").read_text()
