"""`validation/memory/four_nodes.py` on two gloo nodes: rows are trained, and one that fails does not end the rest."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from backbeat.errors import InputError
from tests.forks import run_python
from tests.lab.cases import NEEDS_NAMESPACES

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

SCRIPT = Path(__file__).resolve().parents[2] / "validation" / "memory" / "four_nodes.py"
MODEL = """
import torch
from torch import nn


def layers(batch_size: int = 4):
    if batch_size == 7:
        raise RuntimeError("seven is too many")
    model = nn.Sequential(*[nn.Linear(192, 192) for _ in range(6)])
    return model, torch.randn(batch_size, 192), lambda model, batch: model(batch).square().mean()
"""


@pytest.mark.alone
@NEEDS_NAMESPACES
def test_rows_are_trained_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "row_model.py").write_text(MODEL)
    out = tmp_path / "out"
    # Weights and gradients take 1.8 MB, top-k's residuals and scratch 2 MB more, and all of batch 512 would take 5 MB.
    done = run_python(
        str(SCRIPT), str(out), "--nodes", "2", "--bandwidth", "200mbit", "--train", "row_model:layers",
        "--memory", "4.1MB", "--batches", "4,512,7,4", "--seconds", "0.05s", "--budget", "6s",
        "--profile-seconds", "0.05s", "--rows", "dense,memory,compressed,both,ddp",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    kept = json.loads((out / "gloo-2n-200mbit.json").read_text())
    rows = kept["rows"]
    assert list(rows) == ["dense", "memory", "compressed", "both", "ddp"]
    assert "seven is too many" in rows["compressed"]["error"]
    for key in ("dense", "memory", "both", "ddp"):
        row = rows[key]
        assert row["samples_per_s"] == pytest.approx(2 * row["batch_size"] / row["iteration_s"])
        assert row["steps"] == row["timed_steps"] + 5
        assert row["peak_bytes"] is None
    assert rows["ddp"]["batch_size"] == rows["dense"]["batch_size"] == 4
    # Two nodes: sums do not depend on the buckets.
    assert rows["ddp"]["first_loss"] == rows["dense"]["first_loss"]
    assert rows["memory"]["blocks"] != "all kept"
    assert rows["memory"]["predicted_peak_bytes"] <= 4_100_000
    assert kept["network"]["all_gather"]["points"]
    assert (out / "gloo-2n-200mbit-memory.plan.json").exists()
    assert len(list(out.glob("*.profile.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batches", "1,2"], "--batches"),
        (["--batches", "1,2,3,0"], "--batches"),
        (["--profiled", "1,2,3"], "write 2 batch sizes"),
        (["--rows", "dense,sparce"], "sparce"),
        (["--memory", "much"], "much"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str) -> None:
    parsed = runpy.run_path(str(SCRIPT))["parsed"]
    with pytest.raises(InputError, match=words):
        parsed(["folder", *arguments])


def test_the_batches_given_say_what_is_profiled() -> None:
    parsed = runpy.run_path(str(SCRIPT))["parsed"]
    given = parsed(["folder", "--batches", "32,96,24,80"])
    assert given.profiled == [24, 96]
    assert given.batches == {"dense": 32, "memory": 96, "compressed": 24, "both": 80}
