"""`backbeat lab --train`: a real model over shaped links, under stock DDP and under plans, with the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import run_python
from tests.lab.cases import NEEDS_NAMESPACES

pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
pytestmark = NEEDS_NAMESPACES

MODEL = """
import torch
from torch import nn


def four_layers(batch_size: int = 4):
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
    return model, torch.randn(batch_size, 48), lambda model, batch: model(batch).square().mean()
"""


def test_training_in_the_lab_gives_stock_ddps_losses(tmp_path: Path) -> None:
    (tmp_path / "lab_model.py").write_text(MODEL)
    kept = tmp_path / "lab.json"
    done = run_python(
        "-m", "backbeat", "lab", "--train", "lab_model:four_layers", "--nodes", "2", "--bandwidth",
        "100mbit", "-s", "ddp,optimal,sharded", "--seconds", "0.5s", "--budget", "2s", "--json", "-o", str(kept),
        cwd=tmp_path, limit_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [row["strategy"] for row in shown["rows"]] == ["ddp", "optimal", "sharded"]
    assert all(row["measured_s"] > 0 and row["iterations"] > 0 for row in shown["rows"])
    losses = [row["losses"] for row in json.loads(kept.read_text())["rows"]]
    assert len(losses) == 3
    common = min(len(found) for found in losses)
    assert common >= 5
    # Two ranks: sums do not depend on the buckets.
    assert losses[0][:common] == losses[1][:common]
    assert losses[2][:common] == pytest.approx(losses[0][:common], rel=1e-5)
