"""FSDP2 in the lab: two nodes of two ranks, a fast link inside them, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import run_python
from tests.lab.cases import NEEDS_NAMESPACES, profile

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
pytestmark = NEEDS_NAMESPACES


def test_sharded_plans_are_run_beside_their_prediction(tmp_path: Path) -> None:
    profile(3, size=100_000).save(tmp_path / "small.json")
    done = run_python(
        "-m", "backbeat", "lab", "--profile", str(tmp_path / "small.json"), "--nodes", "2",
        "--ranks-per-node", "2", "--inside", "400mbit", "--bandwidth", "100mbit", "--strategy", "sharded,hsdp:2",
        "--seconds", "0.1s", "--budget", "2s", "--json", "-o", str(tmp_path / "all.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["nodes"], shown["ranks_per_node"]) == (2, 2)
    network = shown["network"]
    assert network["all_gather"]["points"]
    assert network["reduce_scatter"]["points"]
    assert any("FSDP2 on gloo waits for every collective" in note for note in network["notes"])
    assert network["topology"]["gpus_per_node"] == 2
    (inside,) = network["at"]
    assert inside["workers"] == 2
    assert inside["all_gather"]["points"]
    planned, hybrid = shown["rows"]
    assert (hybrid["plan"], hybrid["units"]) == ("hsdp:2", 3)
    # How many are best depends on the links as measured.
    assert planned["plan"] == "sharded"
    assert 1 <= planned["units"] <= 3
    assert all(row["measured_s"] > profile(3).single_s - profile(3).update_s for row in shown["rows"])
    assert all(row["predicted_s"] > 0 for row in shown["rows"])
    kept = json.loads((tmp_path / "all.json").read_text())
    units, pairs = (row["launches"] for row in kept["rows"])
    assert (len(units), sum(blocks for blocks, _ in units)) == (planned["units"], 3)
    assert pairs == [[1, 1]] * 3
