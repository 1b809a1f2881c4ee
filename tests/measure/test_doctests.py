"""The examples in the docstrings of measure and comm, which need torch."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import backbeat.comm
import backbeat.measure

MODULES = sorted(
    found.name
    for package in (backbeat.comm, backbeat.measure)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.ispkg
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
