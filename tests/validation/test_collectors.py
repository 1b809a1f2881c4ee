"""The scripts that measure: what they import is there, and what they make of committed data is what the package has."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from backbeat.cost.operator_curves import FOLDER
from backbeat.model import Network
from backbeat.model.files import encode
from backbeat.model.slowdown import EMULATED

SCRIPTS = Path(__file__).parents[2] / "validation"
ZOO = SCRIPTS / "zoo"


def imported(path: Path) -> list[tuple[str, str | None]]:
    """Modules of the package, with the names that are taken from them."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backbeat"):
            found += [(str(node.module), one.name) for one in node.names]
        elif isinstance(node, ast.Import):
            found += [(one.name, None) for one in node.names if one.name.startswith("backbeat")]
    return found


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_what_a_script_takes_from_the_package_is_there(path: Path) -> None:
    pytest.importorskip("torch", reason="most of them measure")
    pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
    for module, name in imported(path):
        there = importlib.import_module(module)
        assert name is None or hasattr(there, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)


def test_curves_of_operators_are_those_of_the_measurement() -> None:
    script = runpy.run_path(str(ZOO / "make_operator_curves.py"))
    raw = json.loads(gzip.decompress((ZOO / "h200-operators.json.gz").read_bytes()))
    assert script["encode"](script["curves"](raw)) == (FOLDER / "h200.json").read_text()


def test_slowdowns_are_those_of_the_emulation() -> None:
    assert encode(runpy.run_path(str(ZOO / "keep_contention.py"))["kept"]()) == EMULATED.read_bytes()


def test_networks_are_those_of_the_script() -> None:
    for network in runpy.run_path(str(ZOO / "networks.py"))["networks"]():
        assert network == Network.load(network.name)
