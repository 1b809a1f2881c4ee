"""The walk through one's own model, as the quick start has it: profile, predict, plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cli import terminal

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> str:
    done = terminal.run(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_model_of_ones_own_to_a_plan(tmp_path: Path) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    factory = "examples.my_model:small_cnn"
    options = ("--batch", "8", "--device", "cpu", "--iterations", "3", "-o", profile)
    done = subprocess.run(
        [sys.executable, "-m", "backbeat", "profile", factory, *options],
        cwd=ROOT, timeout=180, check=False, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "small-cnn-b8-fp32-cpu" in done.stdout
    measured = json.loads(Path(profile).read_text())
    assert len(measured["gradients"]) == 16
    assert measured["batch_size"] == 8
    predicted = json.loads(run("predict", profile, "10gbe", "-n", "4..64", "--json"))
    assert {row["gpus"] for row in predicted["rows"]} == {4, 8, 16, 32, 64}
    assert all(row["step_s"] > 0 for row in predicted["rows"])
    run("plan", profile, "10gbe", "-n", "16", "-w", "best", "-o", plan)
    planned = json.loads(Path(plan).read_text())
    travelling = [name for bucket in planned["buckets"] for name in bucket["gradients"]]
    assert sorted(travelling) == sorted(gradient["name"] for gradient in measured["gradients"])
    assert planned["workers"] == 16


def test_the_same_model_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run("profile", "examples.my_model:small_cnn", "--analytic", "h100", "--precision", "bf16", "-o", str(path))
    computed = json.loads(path.read_text())
    assert computed["name"] == "small-cnn-b32-bf16-h100-analytic"
    assert len(computed["gradients"]) == 16
