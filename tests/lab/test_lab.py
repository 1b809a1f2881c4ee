"""A whole lab of two gloo nodes on a slow link, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backbeat.lab import runs
from tests.lab.cases import NEEDS_NAMESPACES, profile

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
pytestmark = [
    pytest.mark.alone,
    NEEDS_NAMESPACES,
]

RATE_BITS = 1e8
# A loaded machine stretches calibration and replay alike, but not equally.
TOLERANCE = 4.0


def backbeat(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backbeat", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("lab")
    profile(size=100_000).save(folder / "small.json")
    done = backbeat(
        "lab", "--nodes", "2", "--bandwidth", "100mbit", "--backend", "gloo", "--profile", str(folder / "small.json"),
        "--dilation", "2", "--strategy", "wfbp,ddp,optimal,single,best/2",
        "--straggler", "node=1,slowdown=1.2", "--seconds", "0.5s", "--budget", "10s",
        "-o", str(folder / "all.json"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), json.loads((folder / "all.json").read_text())


def test_every_strategy_is_measured_beside_its_prediction(answer):
    shown, _ = answer
    assert shown["nodes"] == 2
    assert shown["network"]["schema"] == "backbeat.network/2"
    assert [row["strategy"] for row in shown["rows"]] == ["wfbp", "ddp", "optimal", "single", "best"]
    assert [row["communicators"] for row in shown["rows"]][:4] == [1, 2, 1, 1]


def test_nothing_is_faster_than_the_slowest_nodes_compute(answer):
    shown, _ = answer
    compute = 2 * 1.2 * profile().single_s
    assert shown["compute_alone_s"] >= compute * 0.999
    assert all(row["measured_s"] >= compute * 0.999 for row in shown["rows"])
    assert all(row["single_s"] == pytest.approx(compute) for row in shown["rows"])


def test_links_carry_no_more_than_their_rate(answer):
    shown, _ = answer
    single = next(row for row in shown["rows"] if row["strategy"] == "single")
    burst = 16 * 2**10
    # An all-reduce between two nodes sends every byte once; the bucket may give its burst away at once.
    least = (600_000 - 2 * burst) * 8 / RATE_BITS
    assert single["measured_exposed_s"] > least


def test_predictions_are_of_the_right_size(answer):
    shown, _ = answer
    for row in shown["rows"]:
        assert 1 / TOLERANCE < row["predicted_s"] / row["measured_s"] < TOLERANCE


def test_the_file_keeps_every_iteration(answer):
    shown, kept = answer
    for row, all_of_it in zip(shown["rows"], kept["rows"], strict=True):
        samples = [sample for series in all_of_it["series_s"] for sample in series]
        assert len(samples) == row["iterations"]
        assert min(samples) <= row["measured_s"] <= max(samples)
    assert kept["timings"]


def test_nothing_is_left_behind(tmp_path: Path):
    profile(size=1000).save(tmp_path / "small.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "backbeat", "lab", "--profile", str(tmp_path / "small.json"), "--seconds", "0.1s",
         "--budget", "1s", "--bandwidth", "200mbit"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    shown, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "measured" in shown
    left = [*runs.home().glob(f"bb-{process.pid}-*"), *runs.NAMESPACES.glob(f"bb-{process.pid}-*")]
    assert left == []
