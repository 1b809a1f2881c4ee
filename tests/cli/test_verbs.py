"""The command line as a person uses it: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.model.batches import join
from backbeat.model.framework import FRAMEWORKS
from backbeat.planners import STRATEGIES
from tests.cli.terminal import WIDE, answer, run
from tests.problems import make_profile


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "mine-b1-fp32-laptop.json"
    sizes = [4000, 10**6, 2 * 10**6, 5 * 10**6, 10**5, 9 * 10**6]
    made = make_profile(sizes, [1e-3, 3e-3, 4e-3, 8e-3, 9e-3, 12e-3], forward=6e-3)
    made.save(path)
    four = replace(make_profile(sizes, [3e-3, 9e-3, 12e-3, 24e-3, 27e-3, 36e-3], forward=18e-3), batch_size=4)
    join(made, four).save(path.with_name("mine-both.json"))
    return path


def test_plan_writes_a_file_that_predict_takes(profile: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    words = (str(profile), "10gbe", "--gpus", "64")
    done = run("plan", *words, "--way", "best", "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stderr
    assert f'model = DistributedDataParallel(model, plan="{target}")' in done.stdout
    plan = bb.Plan.load(target)
    assert plan.workers == 64
    row = answer("predict", *words, "--plan", str(target))["rows"][0]
    assert plan.predicted is not None
    assert row["step_s"] == pytest.approx(plan.predicted.iteration_s)
    shown = answer("plan", *words, "--way", "best")
    assert shown["schema"] == "backbeat.plan/2"
    assert shown["buckets"] == json.loads(target.read_text())["buckets"]


def test_a_plan_without_a_way_is_the_decisions() -> None:
    words = ("resnet50-b64-bf16-h200", "100gbe", "--gpus", "16")
    assert answer("plan", *words)["strategy"] == answer("predict", *words)["decision"]["way"]


def test_strong_scaling_between_two_batch_sizes(profile: Path) -> None:
    words = ("10gbe", "-n", "4..16", "-w", "optimal", "--global-batch", "32")
    both = str(profile.with_name("mine-both.json"))
    data = answer("predict", both, *words)
    assert [row["samples_per_s"] * row["step_s"] for row in data["rows"]] == pytest.approx([32.0] * 3)
    uneven = run("predict", both, "10gbe", "-n", "5", "-w", "ddp", "--global-batch", "32")
    assert uneven.returncode == 2
    assert "32" in uneven.stderr


def test_a_plan_for_one_gpu_says_that_nothing_is_sent(profile: Path) -> None:
    done = run("plan", str(profile), "10gbe", "--gpus", "1", "-w", "best")
    assert done.returncode == 0, done.stderr
    assert "sends nothing" in done.stdout
    assert "launch order" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "resnet5", "10gbe"), "neither a file nor a bundled model"),
        (("report", "PROFILE", "10gbe", "-o", "x.pdf"), "x.pdf: the page is HTML; give a name that ends in .html"),
        (("predict", "PROFILE", "10gbit"), "did you mean 10gbe"),
        (("predict", "PROFILE", "10gbe", "-n", "many"), "'many' is not a number of GPUs"),
        (("predict", "PROFILE", "10gbe", "-w", "bets"), "did you mean 'best'"),
        (("plan", "PROFILE", "10gbe", "-n", "4..64"), "names 5 numbers: give one"),
        (("predict", "PROFILE", "10gbe", "--plan", "none.json"), "none.json: no such file"),
        (("predict", "PROFILE", "10gbe", "--bucket", "25 gallons", "-w", "ddp"), "25 gallons"),
        (
            ("plan", "PROFILE", "10gbe", "-w", "best", "-o", "/nowhere/plan.json"),
            "cannot be written",
        ),
        (("plan", "PROFILE", "10gbe", "-w", "best", "--communicators", "0"), "communicators is 0"),
        (("plan", "PROFILE", "PROFILE"), "give the network file"),
        (("predict", "PROFILE", "10gbe", "-n", ""), "'' is not a number of GPUs"),
        (("predict", "PROFILE", "10gbe", "-w", "FSDP"), "did you mean 'fsdp'?"),
        (("predict", "PROFILE", "10gbe", "-w", "zero-3"), "ZeRO-3 is 'fsdp'"),
        (("plan", "PROFILE", "10gbe", "-w", "decoupled"), "it went: 'sharded' weighs its plans"),
        (("predict", "PROFILE", "10gbe", "--bucket", "0"), "bucket is 0: it must be above zero, like 25MB"),
        (("predict", "PROFILE", "10gbe", "--bucket", "25"), "say the unit"),
        (("plan", "PROFILE", "10gbe", "--memory", "40"), "say the unit"),
        (("plan", "PROFILE", "10gbe", "-w", "ddp,best"), "--way ddp,best names several: a plan has one"),
        (("import", "kineto", "FOLDER", "-o", "o.json"), "it is a folder: give a trace"),
        (("network", "--across", "FOLDER"), "it is a folder: give nccl-tests output"),
        (("predict", "TEXT", "10gbe"), "TEXT, line 1 column 1: not JSON"),
        (("predict", "10gbe", "PROFILE"), "the model comes first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(profile: Path, words: tuple[str, ...], message: str) -> None:
    (profile.parent / "TEXT").write_text("words")
    given = {"PROFILE": str(profile), "FOLDER": str(profile.parent)}
    done = run(*(given.get(word, word) for word in words), cwd=profile.parent)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_version_zoo_and_completion() -> None:
    done = subprocess.run([sys.executable, "-m", "backbeat", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"backbeat {bb.__version__}", "")
    names = {row["name"] for row in answer("zoo")["networks"]}
    assert {"1gbe", "10gbe", "25gbe", "100gbe", "ib56", "ib100", "ib400", "nvlink-ib400"} <= names
    assert "--show-completion" in run("--help").stdout


def test_help_names_every_strategy_and_framework() -> None:
    text = " ".join(run("predict", "--help").stdout.split())
    assert ", ".join(STRATEGIES) in text
    assert all(name in text for name in FRAMEWORKS)


def test_demo_tells_the_whole_story(tmp_path: Path) -> None:
    done = run("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("llama-3-8b") < done.stdout.index("resnet50")
    assert done.stdout.count("Decision: ") == 2
    assert bb.Plan.load(tmp_path / "plan.json").workers == 64


@pytest.fixture(scope="module")
def marked_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile whose names would be read as rich's markup, as emoji, or as a terminal's commands."""
    path = tmp_path_factory.mktemp("cli") / "marked.json"
    made = make_profile([10**6, 10**6], [1e-3, 2e-3])
    first, second = made.gradients
    replace(
        made,
        model="[bold]net[/bold] :smile:",
        device="[/]",
        gradients=(
            replace(first, name="[red]é漢[/red]"),
            replace(second, name="<script>\x1b[31m\n"),
        ),
    ).save(path)
    return path


def test_names_are_shown_as_they_are(marked_up: Path) -> None:
    for verb in (("predict", "-w", "ddp"), ("plan", "-w", "wfbp")):
        done = run(*verb, str(marked_up), "10gbe")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
    assert "[red]é漢[/red]" in done.stdout
    assert r"<script>\x1b[31m\n" in done.stdout


def test_an_output_that_knows_ascii_only_gets_its_table(marked_up: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backbeat", "plan", str(marked_up), "10gbe", "-w", "wfbp"],
        capture_output=True,
        env={**WIDE, "PYTHONIOENCODING": "ascii"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"[red]??[/red]" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "backbeat", "zoo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=WIDE
    )
    assert program.stdout is not None
    program.stdout.close()
    _, errors = program.communicate(timeout=120)
    assert errors == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--global-batch", "0"), "global_batch is 0: it must be 1 or more"),
        (("--gpus", "99999999999"), "at most"),
        (("--plan", "nowhere.json"), "write one with `backbeat plan`"),
    ],
)
def test_more_that_is_refused_in_one_line(words: tuple[str, ...], message: str, profile: Path) -> None:
    done = run("predict", str(profile), "10gbe", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_plan_of_another_model_is_refused(profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for way in ("best", "sharded"):
        words = ("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-w", way, "-o", str(other))
        assert run("plan", *words).returncode == 0
        done = run("predict", str(profile), "10gbe", "-n", "8", "--plan", str(other))
        assert done.returncode == 2
        assert "make one for this profile" in done.stderr
        assert done.stderr.count("\n") == 1


def test_demo_as_data(tmp_path: Path) -> None:
    done = run("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [one["schema"] for one in data["predict"]] == ["backbeat.answer/1"] * 2
    (tmp_path / "again.json").write_text(json.dumps(data["plan"]))
    assert bb.Plan.load(tmp_path / "again.json") == bb.Plan.load(tmp_path / "plan.json")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict"], "backbeat predict: missing argument 'MODEL'. See `backbeat predict --help`."),
        (["predict", "a", "b", "--qqqqq"], "backbeat predict: no such option: --qqqqq. See `backbeat predict --help`."),
        (["profile", "a:b", "--batch-size", "8"], "backbeat profile: --batch-size went: it is --batch."),
        (
            ["predict", "a", "b", "--other-batch", "c"],
            "backbeat predict: --other-batch went: profile the model at both batch sizes, "
            "`backbeat profile --batch 32,64`.",
        ),
        (
            ["predict", "a", "b", "--wa", "ddp"],
            "backbeat predict: no such option: --wa; did you mean --lora or --plan or --way? "
            "See `backbeat predict --help`.",
        ),
        (["predct"], "backbeat: no such command 'predct'. Did you mean 'predict'? See `backbeat --help`."),
    ],
)
def test_a_command_line_nobody_can_read_is_refused_in_one_line(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr == f"{said}\n"


def test_no_words_at_all_print_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "predict" in done.stderr


def test_a_bucket_size_is_refused_where_nothing_takes_it(profile: Path) -> None:
    words = ("predict", str(profile), "10gbe", "-n", "16", "--bucket", "1MB")
    refused = run(*words, "-w", "best")
    assert refused.returncode == 2
    assert "bucket is 1000000" in refused.stderr
    assert run(*words, "-w", "ddp").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_answer_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "backbeat", "zoo"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "backbeat: the answer could not be written: no space is left on the device it goes to\n"
