"""Top-k training reaches the loss of dense training: small network, small transformer, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import run_python

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "topk_convergence.py"
STEPS = 250
"""After 120 steps dense training itself has learned neither task; after 180, top-k is still behind on one."""
LEARNED = 0.2
TOLERANCE = 0.1
"""Nats of cross-entropy, where guessing costs log(8) = 2.08 and log(16) = 2.77."""


@pytest.mark.parametrize(("task", "seed"), [("cnn", 0), pytest.param("transformer", 1, marks=pytest.mark.long)])
def test_top_k_learns_what_dense_training_does(task: str, seed: int, tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    options = ["--task", task, "--steps", str(STEPS), "--seeds", str(seed), "--methods", "dense;top-k 5 %"]
    done = run_python(str(SCRIPT), *options, "--json", str(found))
    assert done.returncode == 0, done.stderr
    dense, compressed = json.loads(found.read_text())["rows"]
    assert max(dense["losses"]) < LEARNED, "the task is not learned at all"
    assert compressed["worst_gap"] <= TOLERANCE, f"{compressed['losses']} against {dense['losses']}"
