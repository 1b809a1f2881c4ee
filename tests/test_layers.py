"""What is loaded when; which folder may import which is import-linter's to say (`pyproject.toml`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
