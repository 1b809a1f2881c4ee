"""`backbeat lab` with what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import run
from tests.lab.cases import NEEDS_NAMESPACES, profile

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
pytestmark = NEEDS_NAMESPACES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bandwidth", "fast"), "bandwidth"),
        (("--nodes", "1"), "nodes is 1"),
        (("--strategy", "wfbq"), "wfbq"),
        (("--straggler", "node=9,slowdown=2"), "node 9"),
        (("--communicators", "0"), "communicators"),
        (("--profile", "nothing.json"), "nothing.json"),
        (("--backend", "mpi"), "mpi"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    profile().save(tmp_path / "small.json")
    done = run("lab", "--profile", str(tmp_path / "small.json"), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
