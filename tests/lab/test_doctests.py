from __future__ import annotations

import doctest

import pytest

from backbeat.lab import jobs, plans, scatter, setting, statistics


@pytest.mark.parametrize("module", [jobs, plans, scatter, setting, statistics], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0
