"""A pipeline in the lab, through the command line: two nodes, a model of four layers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import run
from tests.forks import run_python

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)
SHAPE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4,
    "intermediate_size": 512, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path / "config.json")


def test_layouts_are_run_beside_both_predictions(model: str, tmp_path: Path) -> None:
    done = run_python(
        "-m", "backbeat", "lab", "--nodes", "2", "--bandwidth", "200mbit", "--layout", "pp=2",
        "--layout", "tp=2", "--model", model, "--global-batch", "2", "--sequence", "128",
        "--dilation", "2", "--seconds", "0.1s", "--budget", "0.5s", "--json", "-o", str(tmp_path / "all.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [row["layout"] for row in shown["rows"]] == ["pp=2+micro=1", "tp=2+micro=1"]
    for row in shown["rows"]:
        assert row["measured_s"] > 0
        assert set(row["predicted_s"]) == set(row["error"]) == {"events", "closed-form"}
        assert set(row["cost_s"]) == {"events", "closed-form", "execution"}
    kept = json.loads((tmp_path / "all.json").read_text())
    assert {row["kind"] for row in kept["transfers"]} == {"send", "swap", "late", "all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "4"), "is 2 GPUs, the lab has 4"),
        (("--straggler", "node=1,slowdown=2"), "--straggler is not predicted of layouts"),
        (("--profile", "small.json"), "leave --profile, --train and --strategy out"),
    ],
)
def test_what_does_not_go_with_layouts_is_refused(model: str, arguments: tuple[str, ...], words: str) -> None:
    done = run("lab", "--layout", "pp=2", "--model", model, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_layout_needs_a_model() -> None:
    done = run("lab", "--layout", "pp=2")
    assert done.returncode == 2
    assert "give --model" in done.stderr
