"""Verbs are found by name, and loaded only when they run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from backbeat.cli import VERBS, app, load


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_loads_and_says_what_it_does(name: str) -> None:
    verb = load(name)
    assert verb.name == name
    assert verb.help
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_help_names_every_verb_and_imports_none_of_them() -> None:
    code = (
        "import sys\n"
        "from backbeat.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "heavy = [n for n in ('numpy', 'torch', 'rich', 'msgspec', 'backbeat.cli.predict') if n in sys.modules]\n"
        "print('heavy:', heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in done.stdout
    for name, line in VERBS.items():
        assert f"  {name}" in done.stdout
        assert line.split()[0] in done.stdout


def test_a_mistyped_verb_is_answered_with_the_nearest() -> None:
    done = CliRunner().invoke(app, ["predct"])
    assert done.exit_code == 2
    assert "Did you mean 'predict'?" in done.output
