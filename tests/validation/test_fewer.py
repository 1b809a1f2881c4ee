"""The plans that `fewer.py` measures against each other: as many gradients, the same time, fewer buckets."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import backbeat as bb
from tests.lab.cases import NEEDS_NAMESPACES

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

SCRIPT = Path(__file__).parents[2] / "validation" / "planners" / "fewer.py"


def test_both_ways_differ_in_groups_alone() -> None:
    both_ways = runpy.run_path(str(SCRIPT))["both_ways"]
    found = both_ways(bb.Profile.load("densenet121-b64-bf16-h200"), bb.Network.load("100gbe"))
    made = {choice.name: plan for choice, plan, _ in found}
    times = {choice.name: prediction.iteration_s for choice, _, prediction in found}
    few, many = made["optimal, few"], made["optimal, many"]
    assert 10 * len(few.buckets) < len(many.buckets)
    assert [n for g in few.buckets for n in g.gradients] == [n for g in many.buckets for n in g.gradients]
    assert times["optimal, few"] == pytest.approx(times["optimal, many"], rel=1e-12)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the script says where it ends with 2."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


def test_without_a_file_it_says_what_is_missing(refused: Callable[..., str]) -> None:
    assert "FILE is missing" in refused()


@NEEDS_NAMESPACES
def test_a_file_that_was_cut_short_is_named_and_kept(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"model": "res')
    assert "rows.json holds no rows" in refused(str(file))
    assert file.read_text() == '[{"model": "res'
