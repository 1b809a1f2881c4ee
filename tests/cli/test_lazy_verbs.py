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


def test_what_typer_takes_from_a_newer_click_is_not_said_to_users() -> None:
    """typer before 0.26 imports what click 8.5 deprecates. With -W error a warning would end the program."""
    code = (
        "import sys, warnings\n"
        "class Deprecating:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            warnings.warn(\"'click.utils.get_text_stream' is deprecated …\", DeprecationWarning)\n"
        "sys.meta_path.insert(0, Deprecating())\n"
        "import backbeat.cli\n"
        "print('typer' in sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
