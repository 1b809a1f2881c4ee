"""`backbeat layout`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["layout", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_the_ranked_table_is_one_screen_and_ends_in_a_decision() -> None:
    text = run("llama-3-70b", "dgx-h100", "--gpus", "64", "--global-batch", "512", "--sequence", "8192")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert "tok/s/GPU" in lines[1]
    assert any(line.startswith(("Use dp=", "Use tp=")) for line in lines)
    assert "Limited by" in text


def test_several_numbers_of_gpus_are_compared() -> None:
    text = run("llama-3-70b", "dgx-h100", "--gpus", "64,128", "--global-batch", "512", "--sequence", "8192")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[:6] if line.startswith((" 64 ", "  64 ", " 128 "))] == ["64", "128"]
    assert "On 128 GPUs a step takes" in text
    assert "times as fast as 64" in text


def test_one_layout_is_shown_in_full() -> None:
    text = run("llama-3-70b", "dgx-h100", "--layout", "dp=2+tp=4+pp=8+micro=1+recompute=selective+schedule=1f1b")
    for word in ("matrix products", "pipeline bubble", "activations", "stage 7", "Limited by"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80
    data = json.loads(run("llama-3-70b", "dgx-h100", "--layout", "dp=2+tp=4+pp=8+micro=1", "--json"))
    assert data["timeline"]
    assert data["gpus"] == 64


def test_the_decision_names_flags_of_megatron() -> None:
    words = ("llama-3-70b", "dgx-h100", "--global-batch", "512", "--sequence", "8192")
    text = run(*words, "--layout", "dp=2+tp=4+pp=4+cp=2+micro=1+chunks=5+recompute=full")
    flags = text[text.index("Flags of Megatron-LM for 64 GPUs:\n") :].replace("\\\n", " ").split("\n", 1)[1].split()
    for words_of in (
        ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--pipeline-model-parallel-size", "4"],
        ["--num-virtual-stages-per-pipeline-rank", "5", "--context-parallel-size", "2", "--micro-batch-size", "1"],
        ["--global-batch-size", "512", "--seq-length", "8192", "--bf16", "--use-distributed-optimizer"],
        ["--overlap-grad-reduce", "--overlap-param-gather", "--recompute-granularity", "full"],
    ):
        at = flags.index(words_of[0])
        assert flags[at : at + len(words_of)] == words_of
    assert max(map(len, text.splitlines())) <= 80
    # Of what Megatron-LM does not have, and of other frameworks, no flags are claimed.
    for other in (
        ("--layout", "dp=8+zero=3+recompute=full"),
        ("--layout", "tp=4+pp=2+schedule=gpipe+recompute=full"),
        ("--framework", "nanotron"),
    ):
        given = other if other[0] == "--layout" else (*other, "--layout", "tp=8")
        text = run("llama-3-8b", "dgx-h100", "--global-batch", "64", *given)
        assert "Flags of Megatron-LM" not in text
        assert ("No flags of Megatron-LM" in text) == (other[0] == "--layout")


@pytest.mark.parametrize(("zero", "advised"), [(1, True), (3, False)])
def test_sharding_is_not_advised_to_what_is_sharded(zero: int, advised: bool) -> None:
    layout = f"dp=32+tp=2+pp=1+zero={zero}+recompute=full"
    text = run("llama-3-8b", "dgx-h100", "--global-batch", "512", "--sequence", "8192", "--layout", layout)
    assert "Limited by recomputation" in text
    assert ("(zero=3) help" in " ".join(text.split())) == advised


def test_slow_ranks_are_named_by_rank_or_node() -> None:
    words = ("llama-3-8b", "dgx-h100", "--layout", "dp=8+tp=2+micro=1", "--global-batch", "64", "--json")
    plain, rank, node = (
        json.loads(run(*words, *more))
        for more in ((), ("--straggler", "rank=3,slowdown=1.3"), ("--straggler", "node=1,slowdown=1.3"))
    )
    assert plain["breakdown"]["stragglers_s"] == 0
    assert rank["step_s"] == node["step_s"] > plain["step_s"]
    text = run(*words[:-1], "--straggler", "rank=3,slowdown=1.3")
    assert "waiting for slow ranks" in text


def test_a_page_is_written_instead(tmp_path: Path) -> None:
    page = tmp_path / "layout.html"
    words = ("llama-3.2-1b", "dgx-h100", "--global-batch", "32", "-o", str(page))
    assert f"wrote {page}" in run(*words, "--gpus", "8,16")
    text = page.read_text()
    assert '"8":{"headline":"Use ' in text
    assert '"16":{"headline":"Use ' in text
    run(*words, "--layout", "dp=4+tp=2+micro=1")
    assert '"8":{"headline":"Use tp=2+dp=4+micro=1' in page.read_text()


def test_what_does_not_fit_says_what_would_take_least() -> None:
    text = run("llama-3-405b", "dgx-h100", "--gpus", "8", "--global-batch", "16")
    assert "No layout fits on 8 GPUs: tp=8" in text
    assert text.endswith("Take more GPUs.\n"), "with --zero 3 it does not fit either"
    text = run("llama-3-405b", "dgx-h100", "--gpus", "1", "--global-batch", "16", "--zero", "3")
    assert "No layout fits on 1 GPU: " in text
    assert text.endswith("Take more GPUs.\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["llama-3-8b", "dgx-h100"], "--gpus is missing"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--layout", "dp=2+tp=3"], "dp(2) * tp(3)"),
        (["llama-3-8b", "dgx-h100", "--layout", "dp=2+tq=3"], "'tq=3'"),
        (["llama-3-8b", "dgx-h100", "--layout", "dp=8,tp=4,mb=2,full"], "write dp=8+tp=4+micro=2+recompute=full"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--zero", "5"], "ZeRO stages"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--straggler", "rank=8,slowdown=1.3"], "ranks of 8 GPUs are 0 to 7"),
        (["llama-3-8b", "dgx-h100", "--gpus", "64", "--straggler", "node=9,slowdown=2"], "(node 9) is not there"),
        (["llama-3-8b", "dgx-h100", "--gpus", "64,0"], "'0' is not a number of GPUs: it must be 1 or more"),
        (["llama-3-8b", "dgx-h100", "--gpus", "64..8"], "'64..8' is not a range of GPUs: it must rise from 1 or more"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "-o", "x.pdf"], "x.pdf: the page is HTML"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--straggler", "slow=8"], "write it like rank=13,slowdown=1.3"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--straggler", "rank=,slowdown="], "write it like rank=13"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--straggler", "rank=3,slowdown=."], "write it like rank=13"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--straggler", "rank=3,node=0,slowdown=2"], "write it like rank=13"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8,16", "--layout", "dp=8"], "--gpus 8,16 with --layout: one layout"),
    ],
)
def test_bad_input_is_said_in_one_line(words: list[str], why: str) -> None:
    from backbeat.errors import InputError

    done = CliRunner().invoke(app, ["layout", *words])
    assert isinstance(done.exception, InputError | SystemExit)
    assert why in done.output or why in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layout", "dp=0"), "'dp=0': dp: Expected `int` >= 1: correct it"),
        (("--layout", "schedule=foo"), "it must be 1f1b or gpipe or interleaved or zero-bubble"),
        (("--gpus", "8", "--precision", "fp7"), "precision: Invalid enum value 'fp7': it must be bf16 or fp16 or fp8"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_takes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        CliRunner().invoke(app, ["layout", "llama-3-8b", "dgx-h100", *words], catch_exceptions=False)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder without a config\.json"):
        CliRunner().invoke(app, ["layout", str(tmp_path), "dgx-h100", "--gpus", "8"], catch_exceptions=False)
