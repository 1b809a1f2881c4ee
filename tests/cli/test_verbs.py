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
from backbeat.planners.planned import predicted
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


def test_predict_prints_a_row_for_every_worker_count_and_strategy(profile: Path) -> None:
    done = run("predict", str(profile), "10gbe", "--workers", "4..16", "--strategy", "ddp,best", "--wide")
    assert done.returncode == 0, done.stderr
    assert "weak scaling" in done.stdout
    for word in ("samples/s", "GPU-h/1M", "exposed", "over bound", "limited by", "◀", "knee", "extrapolated from 8"):
        assert word in done.stdout
    assert done.stdout.count("ddp") == 3


def test_json_says_the_same_as_the_library(profile: Path) -> None:
    data = answer("predict", str(profile), "10gbe", "--workers", "4..16", "--strategy", "ddp,best")
    assert [(row["workers"], row["strategy"]) for row in data["rows"]] == [
        (n, s) for n in (4, 8, 16) for s in ("ddp", "best")
    ]
    for row in data["rows"]:
        network = bb.Network.load("10gbe").at(workers=row["workers"])
        expected = predicted(bb.Profile.load(profile), network, row["strategy"])
        assert row["iteration_s"] == expected.iteration_s
        assert row["gpu_hours"] == pytest.approx(1e6 / expected.samples_per_s * row["workers"] / 3600)
        assert row["breakdown"]["latency_s"] == expected.breakdown.latency_s


def test_plan_writes_a_file_that_predict_takes(profile: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    done = run("plan", str(profile), "10gbe", "--workers", "64", "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stderr
    assert "over the bound" in done.stdout
    plan = bb.Plan.load(target)
    assert plan.workers == 64
    row = answer("predict", str(profile), "10gbe", "--workers", "64", "--plan", str(target))["rows"][0]
    assert plan.predicted is not None
    assert row["iteration_s"] == pytest.approx(plan.predicted.iteration_s)
    shown = answer("plan", str(profile), "10gbe", "--workers", "64")
    assert shown["schema"] == "backbeat.plan/2"
    assert shown["buckets"] == json.loads(target.read_text())["buckets"]


def test_strong_scaling_between_two_batch_sizes(profile: Path) -> None:
    words = ("10gbe", "-n", "4..16", "-s", "optimal", "--global-batch", "32")
    both = str(profile.with_name("mine-both.json"))
    data = answer("predict", both, *words)
    assert data["scaling"] == "strong"
    assert [row["samples_per_s"] * row["iteration_s"] for row in data["rows"]] == pytest.approx([32.0] * 3)
    refused = run("predict", str(profile), *words)
    assert refused.returncode == 2
    assert "profile it at both (`backbeat profile --batch 1,2`)" in refused.stderr
    uneven = run("predict", both, "10gbe", "-n", "5", "--global-batch", "32")
    assert uneven.returncode == 2
    assert "does not divide by 5 workers" in uneven.stderr


def test_a_plan_for_one_worker_says_that_nothing_is_sent(profile: Path) -> None:
    done = run("plan", str(profile), "10gbe", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "sends nothing" in done.stdout
    assert "at 1 worker:" in done.stdout
    assert "launch order" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "64"), "Decision: run it. Write it with -o plan.json, then"),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "64"), 'model = DistributedDataParallel(model, plan="plan.json")'),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "--reduce-dtype", "bf16"), ', reduce_dtype="bf16")'),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-s", "fsdp"), "Decision: it saves memory, not time."),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-s", "fsdp"), "optimizer = torch.optim.SGD("),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-s", "ddp"), "Decision: keep stock DDP"),
        (("gpt2-b8-bf16-h200", "dgx-h100", "-n", "8", "--memory", "100GB"), "Decision: keep stock DDP"),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-s", "horovod"), "nothing runs a plan of horovod"),
        (("resnet50-b64-bf16-h200", "100gbe", "-n", "1"), "Decision: nothing to decide for one GPU"),
        (("llama-8b-b1-bf16-adamw-h200", "aws-p5en", "-n", "64", "-s", "ddp"), "Decision: do not run it, it does not"),
    ],
)
def test_a_plan_ends_in_a_decision(words: tuple[str, ...], said: str) -> None:
    done = run("plan", *words)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout[done.stdout.index("\nDecision: ") :]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--max-batch"), "backbeat plan: --max-batch went: `backbeat predict` and `backbeat plan` say"),
        (("report", "--redact"), "backbeat report: --redact went: a report shows the names"),
        (("trace", "PROFILE", "10gbe", "--redact"), "backbeat trace: --redact went"),
    ],
)
def test_an_option_that_went_names_what_to_do_instead(profile: Path, words: tuple[str, ...], message: str) -> None:
    done = run(*(str(profile) if word == "PROFILE" else word for word in words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "resnet5", "10gbe"), "neither a file nor a bundled profile"),
        (("report", "PROFILE", "10gbe", "-o", "x.pdf"), "x.pdf: the page is HTML; give a name that ends in .html"),
        (("predict", "PROFILE", "10gbit"), "did you mean 10gbe"),
        (("predict", "PROFILE", "10gbe", "-n", "many"), "'many' is not a number of workers"),
        (("predict", "PROFILE", "10gbe", "-s", "bets"), "did you mean 'best'"),
        (("plan", "PROFILE", "10gbe", "-n", "4..64"), "several numbers: give one"),
        (("predict", "PROFILE", "10gbe", "--plan", "none.json"), "none.json: no such file"),
        (("predict", "PROFILE", "10gbe", "--bucket", "25 gallons", "-s", "ddp"), "25 gallons"),
        (("plan", "PROFILE", "10gbe", "-o", "/nowhere/plan.json"), "/nowhere/plan.json: cannot be written"),
        (("plan", "PROFILE", "10gbe", "--communicators", "0"), "communicators is 0"),
        (("plan", "PROFILE", "PROFILE"), "give the network file"),
        (("predict", "PROFILE", "10gbe", "-n", ""), "'' is not a number of workers"),
        (("predict", "PROFILE", "10gbe", "-s", "FSDP"), "did you mean 'fsdp'?"),
        (("predict", "PROFILE", "10gbe", "-s", "zero-3"), "ZeRO-3 is 'fsdp'"),
        (("plan", "PROFILE", "10gbe", "-s", "decoupled"), "it went: 'sharded' weighs its plans"),
        (("predict", "PROFILE", "10gbe", "--bucket", "0"), "--bucket is 0: it must be above zero, like 25MB"),
        (("predict", "PROFILE", "10gbe", "--bucket", "25"), "did you mean 25MB?"),
        (("plan", "PROFILE", "10gbe", "--memory", "40"), "did you mean 40GB?"),
        (("plan", "PROFILE", "10gbe", "-s", "ddp,best"), "--strategy ddp,best names several: a plan has one"),
        (("report", "PROFILE", "10gbe", "--memory-budget", "0GB"), "--memory-budget is 0GB: it must be above zero"),
        (("import", "kineto", "FOLDER", "-o", "o.json"), "it is a folder: give a trace"),
        (("network", "--across", "FOLDER"), "it is a folder: give nccl-tests output"),
        (("predict", "TEXT", "10gbe"), "TEXT, line 1 column 1: not JSON"),
        (("predict", "TEXT", "10gbe"), ": give a profile file"),
        (("predict", "10gbe", "PROFILE"), "PROFILE comes before NETWORK"),
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
    assert ", ".join(FRAMEWORKS) in text.replace("- ", "-")


def test_demo_tells_the_whole_story(tmp_path: Path) -> None:
    done = run("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2048" in done.stdout
    assert "depending on how busy the cluster is" in " ".join(done.stdout.split())
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
    for verb in (("predict",), ("plan", "-s", "wfbp")):
        done = run(*verb, str(marked_up), "10gbe")
        assert done.returncode == 0, done.stderr
        assert "[bold]net[/bold] :smile:" in done.stdout
        assert "\x1b" not in done.stdout
    assert "[red]é漢[/red]" in done.stdout
    assert r"<script>\x1b[31m\n" in done.stdout


def test_an_output_that_knows_ascii_only_gets_its_table(marked_up: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backbeat", "plan", str(marked_up), "10gbe", "-s", "wfbp"],
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


def test_plans_of_one_strategy_are_told_apart(profile: Path, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    for workers, file in (("8", one), ("64", two)):
        assert run("plan", str(profile), "10gbe", "-n", workers, "-s", "optimal", "-o", file).returncode == 0
    data = answer("predict", str(profile), "10gbe", "-n", "8,4", "-s", "ddp,ddp", "--plan", f"{one},{two}")
    assert [row["strategy"] for row in data["rows"]] == ["ddp", f"optimal ({one})", f"optimal ({two})"] * 2
    assert set(data["knee"]) == {"ddp", f"optimal ({one})", f"optimal ({two})"}
    done = run("predict", str(profile), "10gbe", "-n", "8,1", "-s", "ddp")
    assert "At 8 GPUs: " in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--global-batch", "0"), "global batch is 0: it must be 1 or more"),
        (("--workers", "99999999999"), "choose fewer"),
        (("--plan", "nowhere.json"), "write one with `backbeat plan`"),
    ],
)
def test_more_that_is_refused_in_one_line(words: tuple[str, ...], message: str, profile: Path) -> None:
    done = run("predict", str(profile), "10gbe", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_plan_of_another_model_is_refused_by_its_file(profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for strategy in ("best", "sharded"):
        words = ("resnet50-b64-bf16-h200", "100gbe", "-n", "8", "-s", strategy, "-o", str(other))
        assert run("plan", *words).returncode == 0
        done = run("predict", str(profile), "10gbe", "-n", "8", "--plan", str(other))
        assert done.returncode == 2
        assert done.stderr.startswith(f"backbeat: {other}: ")
        assert "make one for this profile" in done.stderr
        assert done.stderr.count("\n") == 1


def test_demo_as_data(tmp_path: Path) -> None:
    done = run("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [len(table["rows"]) for table in data["predict"]] == [20, 14]
    (tmp_path / "again.json").write_text(json.dumps(data["plan"]))
    assert bb.Plan.load(tmp_path / "again.json") == bb.Plan.load(tmp_path / "plan.json")
    assert (tmp_path / "report.html").exists()


def test_batch_sizes_that_were_not_profiled_say_so(profile: Path) -> None:
    words = ("predict", str(profile.with_name("mine-both.json")), "10gbe", "-s", "ddp", "--global-batch")
    for batch, note, extrapolated in (
        ("8", None, False),
        ("16", "times are between batch 1 and 4", False),
        ("64", "batch 8 is extrapolated from batch 1 and 4", True),
    ):
        (row,) = answer(*words, batch)["rows"]
        assert row["extrapolated"] is extrapolated
        assert note is None or any(note in one["text"] for one in row["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict"], "backbeat predict: missing argument 'PROFILE'. See `backbeat predict --help`."),
        (["predict", "a", "b", "--bogus"], "backbeat predict: no such option: --bogus. See `backbeat predict --help`."),
        (["profile", "a:b", "--batch-size", "8"], "backbeat profile: --batch-size went: it is --batch."),
        (
            ["predict", "a", "b", "--other-batch", "c"],
            "backbeat predict: --other-batch went: profile the model at both batch sizes, "
            "`backbeat profile --batch 32,64`.",
        ),
        (
            ["predict", "a", "b", "--strateg", "ddp"],
            "backbeat predict: no such option: --strateg; did you mean --strategy? See `backbeat predict --help`.",
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
    refused = run(*words, "-s", "best")
    assert refused.returncode == 2
    assert "--bucket is for ddp and horovod, not best" in refused.stderr
    assert "DDP with buckets of 1.00 MB" in " ".join(run(*words).stdout.split())
    assert "chooses its buckets itself" in run("plan", *words[1:], "-s", "best").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_answer_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "backbeat", "zoo"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "backbeat: the answer could not be written: no space is left on the device it goes to\n"
