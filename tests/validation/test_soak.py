"""`validation/soak/soak.py` for less than a minute: a damaged plan, a rank that dies and one that stands still, a full
disk, and training that ends with the losses of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the soak's ranks need torch")

SCRIPT = Path(__file__).resolve().parents[2] / "validation" / "soak" / "soak.py"


@pytest.mark.skipif(sys.platform != "linux" or not Path("/dev/full").exists(), reason="needs Linux and /dev/full")
def test_training_comes_through(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--kinds", "plan,freeze,disk", "--faults", "3", "--rest", "0", "--seed", "5"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *options, "--patience", "120", "-o", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        # It ends its torchruns and their ranks on the way out.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        raise
    finally:
        process.kill()
    assert process.returncode == 0, out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["wrong"] == []
    assert sorted(fault["fault"] for fault in found["faults"]) == ["disk", "freeze", "plan"]
    assert found["restarts"] == 1
    words = {fault["fault"]: " ".join(fault["words"]) for fault in found["faults"]}
    assert "No space left on device" in words["disk"]
    assert "stood still" in words["freeze"]
    assert "plan" in words["plan"]
    assert os.listdir(tmp_path).count("checkpoint.draft") == 0
