"""What is loaded when; which folder may import which is import-linter's to say (`pyproject.toml`)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

REUSED = {
    # What many modules have for themselves.
    *("T", "logger"),
    # Verbs and constants of one module's own.
    *("check", "check_model", "decide", "describe", "load", "one_by_one"),
    *("planned", "predict", "release", "save", "timeline", "train"),
    *("COMPUTE", "DTYPES", "EVERY", "FIRST_STEPS", "KINDS", "MOST_COMMUNICATORS", "REDUCE_DTYPES"),
    *("PRECISIONS", "SIZES"),
    # Types.
    *("Count", "Mark", "Streams", "Transfer"),
}
"""Public names that stand in several modules. No other may: a reader would ask whether it is one idea."""

PACKAGE = Path(__file__).resolve().parent.parent / "backbeat"


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


def test_no_name_means_two_things() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__" and path.parent.name != "cli"]
    names = Counter(path.stem for path in modules if path.stem != "__main__")
    assert [name for name, count in names.items() if count > 1] == []
    classes = Counter(name for path in modules for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M))
    assert [name for name, count in classes.items() if count > 1] == []
    public = Counter(name for path in modules for name in _public_names(path))
    assert {name for name, count in public.items() if count > 1} <= REUSED


def _public_names(path: Path) -> list[str]:
    """Functions, classes and constants of a module."""
    found: list[str] = []
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.append(name)
            case ast.Assign(targets=targets):
                found += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(name)
    return [name for name in found if not name.startswith("_")]
