from __future__ import annotations

import doctest

import pytest

from backbeat.lab import jobs, lab_rank, plans, setting


@pytest.mark.parametrize("module", [jobs, lab_rank, plans, setting], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0
