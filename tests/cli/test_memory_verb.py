"""`backbeat plan --memory` and `--density`, as a person uses them, and the largest batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import backbeat as bb
from tests.chains import resnet152
from tests.cli.terminal import answer, run

GB = 10**9


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "resnet152-b64.json"
    resnet152(batch=64).save(path)
    return path


def test_a_budget_adds_a_memory_plan_and_says_what_it_costs(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = (str(profile), "10gbe", "-n", "4")
    done = run("plan", *words, "-w", "optimal", "--memory", "2.5GB", "-o", str(out))
    assert done.returncode == 0, done.stderr
    for word in ("54 blocks in", "recompute", "recomputed", "of 2.50 GB"):
        assert word in done.stdout
    made = bb.Plan.load(out)
    assert made.memory is not None
    assert made.memory.budget_bytes == 25 * GB // 10
    assert made.memory.peak_bytes is not None
    assert made.memory.peak_bytes <= 25 * GB // 10
    (row,) = answer("predict", *words, "--plan", str(out))["rows"]
    assert row["memory"]["peak_bytes"] == pytest.approx(made.memory.peak_bytes, rel=0.02)


def test_a_density_makes_a_compressed_plan(profile: Path) -> None:
    data = answer("plan", str(profile), "1gbe", "-w", "compressed", "--density", "0.01", "--memory", "3GB")
    assert data["strategy"] == "compressed"
    assert {bucket["compression"]["density"] for bucket in data["buckets"] if "compression" in bucket} == {0.01}
    assert data["memory"]["budget_bytes"] == 3 * GB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "700MB"), "give more, or take more GPUs"),
        (("--memory", "1GB"), "give more, or take more GPUs"),
        (("--memory", "lots"), "not a size"),
        (("--memory", ""), "'' is not a size"),
        (("--other-batch", "x.json"), "profile the model at both batch sizes, `backbeat profile --batch 32,64`"),
        (("--density", "0"), "density is"),
        (("--density", "0.01", "-w", "best"), "only the way compressed"),
        (("--density", "2"), "density is"),
        (("--density", "0.1", "-w", "ddp"), "only the way compressed"),
    ],
)
def test_refusals_are_one_line(profile: Path, words: tuple[str, ...], message: str) -> None:
    more = () if "-w" in words else ("-w", "best")
    done = run("plan", str(profile), "10gbe", *words, *more)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
