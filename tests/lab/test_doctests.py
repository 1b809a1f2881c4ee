from __future__ import annotations

import doctest

import pytest

from backbeat.lab import health, jobs, plans, setting


@pytest.mark.parametrize("module", [health, jobs, plans, setting], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0
