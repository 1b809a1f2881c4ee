"""`backbeat predict` as a person asks it: one screen, one decision, exit codes; and the same by every route."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import Topology
from tests.cli.terminal import answer, run
from tests.problems import affine

LLAMA, AWS = "llama-3-8b", "aws-p5en"
RESNET, ETHERNET = "resnet50-b64-bf16-h200", "100gbe"
QUESTIONS: list[tuple[str, ...]] = [
    (LLAMA, AWS, "--gpus", "64"),
    (LLAMA, AWS, "--gpus", "16,64,256", "--tokens", "15B", "--price", "2.5/gpu-h"),
    (RESNET, ETHERNET, "--gpus", "4..64"),
    ("bert-large-b32-bf16-h200", "10gbe", "--gpus", "8..32"),
    ("vit-l-b64-bf16-h200", "25gbe", "--gpus", "4..32"),
    ("llama-8b-b1-bf16-adamw-h200", AWS, "--gpus", "512", "--way", "ddp,fsdp,hsdp,sharded"),
    ("mixtral-8x7b", AWS, "--gpus", "64", "--way", "tp=8+ep=8,fsdp"),
]


def joined(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("words", QUESTIONS, ids=" ".join)
def test_one_screen_that_ends_in_a_decision_with_what_to_do(words: tuple[str, ...]) -> None:
    done = run("predict", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip("\n").splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    at = next(index for index, line in enumerate(lines) if line.startswith("Decision: "))
    assert any(line.startswith("  ") for line in lines[at + 1 :])
    assert "habits" in joined(done.stdout)
    # Nobody who owns GPUs rents them.
    assert "rent" not in re.findall(r"[a-z]+", done.stdout)


@pytest.mark.parametrize("words", QUESTIONS[:4], ids=" ".join)
def test_screen_data_python_and_page_say_one_thing(words: tuple[str, ...], tmp_path: Path) -> None:
    screen, data = run("predict", *words).stdout, answer("predict", *words)
    decision = data["decision"]
    assert joined(decision["text"]) in joined(screen)
    page = tmp_path / "report.html"
    assert run("report", *words, "-o", str(page)).returncode == 0
    shown = joined(page.read_text(encoding="utf-8").split('id="data"')[0])
    assert shown.count("Decision: ") == 1
    assert decision["text"].split(".")[0] in shown
    best = data["rows"][data["best"]]
    one = bb.predict(words[0], words[1], best["way"], gpus=best["gpus"])
    assert best["step_s"] == pytest.approx(one.step_s, rel=1e-9)


def test_the_mesh_is_printed() -> None:
    done = run("predict", "llama-8b-b1-bf16-adamw-h200", AWS, "--gpus", "512", "--way", "hsdp:64,fsdp")
    assert "replicate 8 × shard 64" in done.stdout


def test_a_way_alone_and_the_table_give_the_same_number() -> None:
    table = {row["way"]: row["step_s"] for row in answer("predict", LLAMA, AWS, "--gpus", "64")["rows"]}
    for way in ("fsdp", "ddp", "hsdp:8", "zero2"):
        (alone,) = answer("predict", LLAMA, AWS, "--gpus", "64", "--way", way)["rows"]
        assert alone["step_s"] == pytest.approx(table[way], rel=1e-9)


def test_a_model_is_the_same_by_name_and_by_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = (AWS, "--gpus", "64", "--way", "fsdp")
    (named,), (read,) = (answer("predict", model, *words)["rows"] for model in (LLAMA, str(path)))
    assert named["step_s"] == pytest.approx(read["step_s"], rel=1e-9)


def test_an_encoder_is_no_causal_decoder() -> None:
    done = run("predict", "bert-large-b32-bf16-h200", ETHERNET, "--gpus", "16")
    assert "torch's habits" in joined(done.stdout)
    assert "tensor-model-parallel" not in done.stdout
    assert "4096 tokens" not in done.stdout


def test_what_is_left_out_is_one_line_where_tokens_are_asked() -> None:
    words = (LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--tokens", "15B")
    plain, lossy = (joined(run("predict", *words, *more).stdout) for more in ((), ("--goodput", "0.9")))
    for text in (plain, lossy):
        assert "leaves out data loading, evaluation, checkpoints, restarts, warm-up and compile time" in text
    assert "--goodput 0.9 counts what does not" in plain
    assert "of which 90 % makes progress" in lossy


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--require", "fits"), 0),
        ((LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--require", "tokens/s>1"), 0),
        ((LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--require", "tokens/s>400000000"), 4),
        (("llama-3-70b", "dgx-h100", "--gpus", "8", "--way", "ddp"), 3),
        (("llama-3-70b", "dgx-h100", "--gpus", "8", "--way", "ddp", "--require", "fits"), 3),
        ((LLAMA, AWS, "--gpus", "64", "--require", "fit"), 2),
        ((LLAMA, AWS, "--gpus", "10000000"), 2),
        ((LLAMA, AWS, "--gpus", "8", "--batch", "99999999999"), 2),
        ((LLAMA, AWS, "--gpus", "8", "--global-batch", "99999999999999"), 2),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int) -> None:
    done = run("predict", *words)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (("layout", LLAMA, AWS), "backbeat predict"),
        (("predict", LLAMA, AWS, "--workers", "8"), "--gpus"),
        (("predict", LLAMA, AWS, "--strategy", "fsdp"), "--way"),
        (("predict", LLAMA, AWS, "--accumulation", "4"), "--global-batch"),
        (("predict", LLAMA, AWS, "--epoch-samples", "4"), "--samples"),
        (("predict", LLAMA, AWS, "--compute-factor", "1.1"), "--measured"),
        (("predict", LLAMA, AWS, "--block", "layer.json"), "--measured"),
        (("report", LLAMA, AWS, "--memory-budget", "40GB"), "--memory"),
        (("predict", LLAMA, AWS, "--layout", "tp=8"), "--way"),
        (("predict", LLAMA, AWS, "--zero", "1"), "--way"),
        (("predict", LLAMA, AWS, "--wide"), "--json"),
        (("predict", LLAMA, AWS, "--plot", "a.png"), "report"),
        (("plan", RESNET, ETHERNET, "--reserve", "5%"), "--memory"),
    ],
)
def test_an_old_name_ends_with_one_line_that_says_the_new_one(words: tuple[str, ...], new: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert new in done.stderr


def test_every_name_of_the_zoo_can_be_asked() -> None:
    data = answer("zoo")
    for model in [one["name"] for one in data["models"]][:3]:
        assert run("predict", model, AWS, "--gpus", "16", "--way", "fsdp").returncode in (0, 3)
    profile, network = data["profiles"][0]["name"], data["networks"][0]["name"]
    assert run("predict", profile, network, "--gpus", "8", "--way", "ddp").returncode == 0
    gpu = data["accelerators"][0]["name"]
    words = ("predict", LLAMA, "nvlink-ib400", "--accelerator", gpu, "--precision", "fp16", "--gpus", "64")
    assert run(*words, "--way", "fsdp").returncode in (0, 3)


def test_what_do_prints_is_what_was_predicted() -> None:
    words = ("bert-large-b32-bf16-h200", "10gbe", "--gpus", "8", "--way", "ddp", "--reduce-dtype", "bf16")
    done = run("predict", *words)
    assert "bf16_compress_hook" in done.stdout
    made = ("bert-large-b32-bf16-h200", "10gbe", "--gpus", "8", "--way", "best", "--reduce-dtype", "bf16")
    said = answer("predict", *made)["decision"]["do"]
    assert "--reduce-dtype bf16" in said[0]
    assert 'reduce_dtype="bf16"' in said[2]


def test_commands_in_an_answer_do_what_it_says(tmp_path: Path) -> None:
    data = answer("predict", RESNET, ETHERNET, "--gpus", "16", "--way", "best")
    command = data["decision"]["do"][0].split()
    assert command[0] == "backbeat"
    target = tmp_path / "plan.json"
    assert run(*command[1:-1], str(target)).returncode == 0
    (again,) = answer("predict", RESNET, ETHERNET, "--gpus", "16", "--plan", str(target))["rows"]
    assert again["step_s"] == pytest.approx(data["rows"][0]["step_s"], rel=1e-9)


def test_what_makes_it_fit_makes_it_fit() -> None:
    words = (LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--recompute", "none")
    done = run("predict", *words, "--batch", "64")
    assert done.returncode == 3
    flag = re.search(r"--batch (\d+)", joined(done.stdout))
    assert flag is not None
    assert run("predict", *words, "--batch", flag[1]).returncode == 0
    assert "More GPUs alone do not help" in joined(done.stdout)


def test_blocks_are_not_denied_beside_units_of_them() -> None:
    for words in (QUESTIONS[0], QUESTIONS[2], QUESTIONS[3]):
        text = joined(run("predict", *words).stdout)
        assert not ("has no blocks" in text and "for each block" in text)


def test_an_own_step_corrects_the_answer() -> None:
    words = (LLAMA, AWS, "--gpus", "64", "--way", "fsdp")
    (before,) = answer("predict", *words)["rows"]
    (after,) = answer("predict", *words, "--measured", "fsdp@64=700ms")["rows"]
    assert after["step_s"] == pytest.approx(0.7, rel=0.02)
    assert after["range_s"][1] / after["range_s"][0] <= before["range_s"][1] / before["range_s"][0]


def test_compression_named_says_what_it_changes() -> None:
    done = run("predict", "bert-large-b32-bf16-h200", "1gbe", "-n", "8", "-w", "compressed", "--density", "0.01")
    text = joined(done.stdout)
    assert "changes what the optimizer sees" in text
    assert "model.attach(optimizer)" in text


def test_jitter_is_said_and_hides_gains(tmp_path: Path) -> None:
    one = bb.Profile.load(RESNET)
    alone = one.forward_s + one.backward_s + one.update_s
    noisy = replace(one, name="noisy", iteration_s=tuple(alone * (1 + 0.05 * (step % 50)) for step in range(100)))
    noisy.save(tmp_path / "noisy.json")
    data: dict[str, Any] = answer("predict", str(tmp_path / "noisy.json"), ETHERNET, "-n", "8", "--way", "ddp,best")
    low, high = data["rows"][0]["jitter_s"]
    assert high - low > 0.2 * data["rows"][0]["step_s"]
    gain = max(row["step_s"] for row in data["rows"]) / min(row["step_s"] for row in data["rows"]) - 1
    if gain < (high - low) / data["rows"][0]["step_s"]:
        assert data["decision"]["way"] == "ddp"


def test_the_accelerator_may_be_said() -> None:
    words = ("predict", LLAMA, "nvlink-ib400", "--gpus", "16", "--way", "fsdp")
    done = run(*words)
    assert done.returncode == 0 or "accelerator" in done.stderr
    assert run(*words, "--accelerator", "h100").returncode == 0


def test_the_zoo_has_one_row_a_model_and_fits_80_columns() -> None:
    text = run("zoo").stdout
    rows = text[: text.index("networks")].splitlines()
    for name in (bb.Profile.load(RESNET).model, "llama-1b", "bert-large"):
        (row,) = (line for line in rows if line.startswith(f"{name} "))
        assert " in bf16" in row
    assert max(map(len, text.splitlines())) <= 80
    shown = joined(run("zoo", "aws-p5").stdout)
    assert "https://aws.amazon.com" in shown
    assert "AdamW" in run("zoo", "llama-1b-b4-bf16-adamw-h200").stdout
    assert "32 layers" in run("zoo", LLAMA).stdout
    assert answer("zoo", RESNET)["flops_per_sample"] > 0
    assert "is not in the zoo" in run("zoo", "aws-p9").stderr


def test_more_links_a_node_carry_more(tmp_path: Path) -> None:
    node = affine(2e-5, 5e-12, workers=8, topology=Topology(gpus_per_node=8))
    node.save(tmp_path / "node.json")
    words = ("predict", RESNET, str(tmp_path / "node.json"), "-n", "64", "--across", "100gbe", "-w", "ddp")
    one, eight = (answer(*words, "--nics-per-node", links)["rows"][0] for links in ("1", "8"))
    assert eight["step_s"] < one["step_s"]
    assert "across" in run("predict", RESNET, "nvlink-ib400", "--nics-per-node", "8").stderr


def test_what_is_level_is_marked_and_the_mark_explained() -> None:
    out = run("predict", RESNET, ETHERNET, "-n", "16").stdout
    assert ("*: level" in out) == bool(re.search(r"^ *\d* *[\w:+=]+\*", out, re.MULTILINE))


def test_a_range_has_its_unit_and_an_unmet_requirement_a_figure_that_people_read() -> None:
    done = run("predict", LLAMA, AWS, "--gpus", "64", "--way", "fsdp", "--require", "tokens/s>9000000")
    assert done.returncode == 4
    assert "p10–p90, ms" in done.stdout
    assert re.search(r"it is \d{3},\d{3}$", done.stderr.strip())


def test_a_deadline_is_said_once_and_who_misses_it() -> None:
    words = ("predict", LLAMA, AWS, "--gpus", "8..64", "--way", "fsdp", "--tokens", "15B", "--deadline", "24h")
    out = joined(run(*words).stdout)
    assert "Done in time (24.0 hours): " in out
    assert re.search(r"need [\d.]+ % fewer GPU-hours, but are late", out)


def test_the_zoo_shows_each_of_its_accelerators() -> None:
    assert "RTX 3090" in run("zoo", "rtx-3090").stdout
    assert json.loads(run("zoo", "rtx-3090", "--json").stdout)["memory_bytes"] > 20e9


def test_a_default_table_has_what_helps_most() -> None:
    """Ways that are named find nothing faster than the ways of the default table."""
    words = ("predict", "vit-l-b32-bf16-h200", "25gbe", "--gpus", "8")
    usual, named = answer(*words), answer(*words, "--way", "ddp,sharded")
    assert min(row["step_s"] for row in usual["rows"]) <= min(row["step_s"] for row in named["rows"]) * (1 + 1e-9)
