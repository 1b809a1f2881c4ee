"""`validation/soak/soak.py` for about a minute, under buckets and under units: a damaged plan, a rank that dies, one
that stands still and one that is slow, a full disk, a world that shrinks and grows, and training that ends with the
losses of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.forks import run_python

pytest.importorskip("torch", reason="the soak's ranks need torch")

SCRIPT = Path(__file__).resolve().parents[2] / "validation" / "soak" / "soak.py"


@pytest.mark.skipif(sys.platform != "linux" or not Path("/dev/full").exists(), reason="needs Linux and /dev/full")
@pytest.mark.parametrize(
    ("plan", "kinds", "faults", "restarts"),
    [
        # A damaged plan is found by a rank that starts again: another one is killed for it.
        pytest.param(
            "buckets", "delay,disk,freeze,plan", ["delay", "disk", "freeze", "plan"], 1, marks=pytest.mark.long
        ),
        # Whatever shrinks grows again.
        ("units", "disk,shrink", ["disk", "grow", "shrink"], 2),
    ],
)
def test_training_comes_through(plan: str, kinds: str, faults: list[str], restarts: int, tmp_path: Path) -> None:
    options = ["--ranks", "2", "--kinds", kinds, "--faults", str(len(faults)), "--rest", "0", "--seed", "5"]
    # Its torchruns and their ranks are forks, too.
    done = run_python(str(SCRIPT), *options, "--plan", plan, "--patience", "120", "-o", str(tmp_path), limit_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["wrong"] == []
    assert sorted(fault["fault"] for fault in found["faults"]) == faults
    assert found["restarts"] == restarts
    words = {fault["fault"]: " ".join(fault["words"]) for fault in found["faults"]}
    assert "No space left on device" in words["disk"]
    assert os.listdir(tmp_path).count("checkpoint.draft") == 0
    # Whose loss a rank's words must name, the script has judged: it depends on who keeps the store.
    if plan == "units":
        assert words["shrink"]
        return
    assert "stood still" in words["freeze"]
    assert "times as long since step" in words["delay"]
    assert "plan" in words["plan"]
