"""Data goes one way: a folder imports only what stands to its left, and the core never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "backbeat"
BASE = ["errors", "units", "model"]
LEFT_OF = {
    "model": ["errors", "units"],
    "cost": BASE,
    "simulate": [*BASE, "cost"],
    "planners": [*BASE, "cost", "simulate"],
    "importers": [*BASE, "cost", "simulate", "planners"],
    "report": [*BASE, "cost", "simulate", "planners", "importers"],
}


def imports_at_module_level(file: Path) -> list[str]:
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("folder", LEFT_OF)
def test_imports_point_left(folder: str) -> None:
    for file in (PACKAGE / folder).rglob("*.py"):
        for name in imports_at_module_level(file):
            if name.startswith("backbeat."):
                part = name.split(".")[1]
                assert part == folder or part in LEFT_OF[folder], f"{file} imports {name}"
            assert name.split(".")[0] != "torch", f"{file} imports torch"


def test_predicting_and_planning_never_load_torch() -> None:
    code = (
        "import sys, backbeat as bb\n"
        "from tests.problems import affine, make_profile\n"
        "bb.predict(make_profile([100], [1e-3]), affine(1e-3, 1e-9), 'best')\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, timeout=120)


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['backbeat', '--help']\n"
        "from backbeat.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "bad = {'numpy', 'torch', 'plotly', 'scipy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)
