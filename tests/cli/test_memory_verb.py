"""`backbeat plan --memory` and `--density`, as a person uses them, and the largest batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

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
    done = run("plan", str(profile), "10gbe", "-n", "4", "-s", "optimal", "--memory", "2.5GB", "-o", str(out))
    assert done.returncode == 0, done.stderr
    for word in (
        "54 blocks in", "recompute", "recomputed", "this plan", "keep, every block", "recompute, every block",
        "offload, every block", "of a budget of 2.50 GB", "parameters 241 MB",
    ):  # fmt: skip
        assert word in done.stdout
    said = done.stdout[done.stdout.index("Predicted peak") :].splitlines()
    assert max(len(line) for line in said if str(out) not in line) <= 80
    made = bb.Plan.load(out)
    assert made.memory is not None
    assert made.memory.budget_bytes == 25 * GB // 10
    assert made.memory.peak_bytes is not None
    assert made.memory.peak_bytes <= 25 * GB // 10
    assert made.predicted is not None
    assert made.predicted.peak_bytes == made.memory.peak_bytes
    done = run("predict", str(profile), "10gbe", "-n", "4", "--plan", str(out))
    assert done.returncode == 0, done.stderr
    assert "optimal: predicted peak 2." in done.stdout
    rows = answer("predict", str(profile), "10gbe", "-n", "4", "--plan", str(out))["rows"]
    assert rows[0]["memory"]["peak_bytes"] == made.memory.peak_bytes


@pytest.mark.parametrize(("reserve", "room"), [("20%", 24 * GB // 10), ("1GB", 2 * GB), ("0", 3 * GB)])
def test_a_reserve_is_left(profile: Path, reserve: str, room: int) -> None:
    words = ("10gbe", "-s", "optimal", "--memory", "3GB", "--reserve", reserve)
    memory = answer("plan", str(profile), *words)["memory"]
    assert memory["budget_bytes"] == 3 * GB
    assert memory["peak_bytes"] <= room


@pytest.mark.parametrize("options", [("--reduce-dtype", "bf16"), ("--accumulation", "4")])
def test_a_sharded_plan_has_one_peak(options: tuple[str, ...]) -> None:
    job = ("plan", "llama-8b-b1-bf16-adamw-h200", "aws-p5en", "-s", "sharded", "-n", "16", "--memory", "120GB")
    text = run(*job, *options).stdout
    peaks = [re.search(words, text) for words in ("(.*) at the peak", "Budget: (.*) of 120 GB", "Memory: (.*) of the")]
    assert len({found and found[1] for found in peaks}) == 1


def test_enough_memory_is_said_too(profile: Path) -> None:
    done = run("plan", str(profile), "10gbe", "-s", "optimal", "--memory", "80GB")
    assert done.returncode == 0, done.stderr
    assert "Everything is kept: it fits." in done.stdout


def test_a_density_makes_a_compressed_plan(profile: Path) -> None:
    data = answer("plan", str(profile), "1gbe", "--density", "0.01", "--memory", "3GB")
    assert data["strategy"] == "compressed"
    assert {bucket["compression"]["density"] for bucket in data["buckets"] if "compression" in bucket} == {0.01}
    assert data["memory"]["budget_bytes"] == 3 * GB


def test_the_largest_batch_is_said_beside_the_memory(tmp_path: Path) -> None:
    job = ("resnet50-b64-bf16-h200", "10gbe", "-n", "8")
    row = answer("predict", *job, "-s", "ddp")["rows"][0]
    assert row["largest_batch"] > 64
    said = f"Batches of up to {row['largest_batch']:,} per GPU fit."
    for words in (("predict", *job, "-s", "ddp"), ("plan", *job, "-s", "ddp")):
        done = run(*words)
        assert said in " ".join(done.stdout.split())
        assert max(map(len, done.stdout[done.stdout.index("Memory:") :].splitlines())) <= 80
    bare = replace(bb.Profile.load("resnet50-b64-bf16-h200"), blocks=(), name="bare")
    bare.save(tmp_path / "bare.json")
    assert answer("predict", str(tmp_path / "bare.json"), *job[1:], "-s", "ddp")["rows"][0]["largest_batch"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "700MB"), "below what stays on the device"),
        (("--memory", "1GB"), "the smallest that fits is"),
        (("--memory", "lots"), "not a size"),
        (("--reserve", "5%"), "--reserve goes with --memory"),
        (("--memory", "3GB", "--reserve", "100%"), "from 0% to below 100%"),
        (("--memory", "3GB", "--reserve", "some%"), "from 0% to below 100%"),
        (("--memory", "3GB", "--reserve", "5"), "did you mean 5MB?"),
        (("--memory", "3GB", "--reserve", "4GB"), "below the budget"),
        (("--memory", ""), "'' is not a size"),
        (("--other-batch", "x.json"), "profile the model at both batch sizes, `backbeat profile --batch 32,64`"),
        (("--density", "0"), "above 0 and at most 1"),
        (("--density", "0.01", "--strategy", "best"), "'best' sends every element"),
        (("--density", "2"), "above 0 and at most 1"),
        (("--density", "0.1", "-s", "ddp"), "use compressed"),
        (("--residuals", "disk"), "device or host"),
    ],
)
def test_refusals_are_one_line(profile: Path, words: tuple[str, ...], message: str) -> None:
    done = run("plan", str(profile), "10gbe", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_profile_without_blocks_is_to_be_made_again(tmp_path: Path) -> None:
    bare = replace(bb.Profile.load("resnet50-b64-bf16-h200"), blocks=())
    bare.save(tmp_path / "bare.json")
    done = run("plan", str(tmp_path / "bare.json"), "10gbe", "--memory", "6GB")
    assert done.returncode == 2
    assert "profile it again with `backbeat profile`" in done.stderr
