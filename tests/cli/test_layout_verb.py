"""`backbeat layout`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from backbeat.cli import app


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
    text = run("mixtral-8x7b", "dgx-h100", "--gpus", "32,64", "--global-batch", "128")
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["32", "64"]


def test_one_layout_is_shown_in_full() -> None:
    text = run("llama-3-70b", "dgx-h100", "--layout", "dp=2,tp=4,pp=8,micro=1,recompute=selective,schedule=1f1b")
    for word in ("matrix products", "pipeline bubble", "activations", "stage 7", "Limited by"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 84
    data = json.loads(run("llama-3-70b", "dgx-h100", "--layout", "dp=2,tp=4,pp=8,micro=1", "--json"))
    assert data["timeline"]
    assert data["gpus"] == 64


def test_what_does_not_fit_says_what_would_take_least() -> None:
    text = run("llama-3-405b", "dgx-h100", "--gpus", "8", "--global-batch", "16")
    assert "No layout fits on 8 GPUs" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["llama-3-8b", "dgx-h100"], "--gpus is missing"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--layout", "dp=2,tp=3"], "dp(2) * tp(3)"),
        (["llama-3-8b", "dgx-h100", "--layout", "dp=2,tq=3"], "'tq=3'"),
        (["llama-3-8b", "dgx-h100", "--gpus", "8", "--zero", "5"], "ZeRO stages"),
    ],
)
def test_bad_input_is_said_in_one_line(words: list[str], why: str) -> None:
    from backbeat.errors import InputError

    done = CliRunner().invoke(app, ["layout", *words])
    assert isinstance(done.exception, InputError | SystemExit)
    assert why in done.output or why in str(done.exception)
