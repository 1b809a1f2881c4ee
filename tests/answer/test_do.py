"""What an answer says to do, run as it stands on two ranks, is what was predicted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backbeat as bb
from backbeat.model import Profile
from backbeat.model.profile import Gradient
from tests.cli.terminal import run

torch = pytest.importorskip("torch")
PROCESS = Path(__file__).with_name("do_process.py")


def small() -> Profile:
    """Of the model that the ranks train."""
    gradients = []
    for layer in reversed(range(4)):
        for name, count in (("bias", 64), ("weight", 64 * 64)):
            ready = 1e-4 * (len(gradients) + 1)
            gradients.append(Gradient(name=f"layers.{layer}.{name}", bytes=4 * count, ready_s=ready))
    fields: Any = {"batch_size": 8, "precision": "fp32", "device": "laptop", "gradients": tuple(gradients)}
    return Profile(name="small", model="small", forward_s=4e-4, backward_s=9e-4, update_s=1e-5, **fields)


def trained(tmp_path: Path, way: str, *flags: str) -> tuple[bb.Prediction, dict[str, Any]]:
    """Both ranks run the lines; commands run first, once."""
    path = tmp_path / "small.json"
    small().save(path)
    done = run("predict", str(path), "10gbe", "--gpus", "2", "--way", way, *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["decision"]["do"]
    script = []
    for line in lines:
        if line.startswith("backbeat "):
            assert run(*shlex.split(line)[1:], cwd=tmp_path).returncode == 0
        else:
            script.append(line)
    (tmp_path / "do.json").write_text(json.dumps(script))
    words = [[sys.executable, str(PROCESS), str(rank), str(tmp_path)] for rank in (0, 1)]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, cwd=tmp_path) for each in words]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    keywords = {"reduce_dtype": flags[1]} if flags else {}
    return bb.predict(small(), "10gbe", way, gpus=2, **keywords), json.loads(outputs[0].splitlines()[-1])


def test_stock_ddp_sends_in_the_dtype_that_was_predicted(tmp_path: Path) -> None:
    # Torch takes its bf16 hook on NCCL alone.
    _, seen = trained(tmp_path, "ddp", "--reduce-dtype", "fp16")
    assert seen["class"] == "DistributedDataParallel"
    assert "fp16_compress_hook" in seen["hook"]


def test_planned_buckets_are_those_that_were_predicted(tmp_path: Path) -> None:
    one, seen = trained(tmp_path, "best")
    assert one.plan is not None
    assert seen["buckets"] == [list(bucket.gradients) for bucket in one.plan.buckets]


def test_units_are_those_that_were_predicted(tmp_path: Path) -> None:
    one, seen = trained(tmp_path, "zero2")
    assert one.plan is not None
    assert one.plan.sharding is not None
    assert seen["units"] == len(one.plan.sharding.units)
