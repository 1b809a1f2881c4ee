"""MosaicML's published FSDP runs, replayed: a few rows, none of the half that is set aside."""

from __future__ import annotations

import json

import pytest

from validation.sharded import published_mpt
from validation.sharded.published_mpt import Run

RUNS = {run.identity: run for run in published_mpt.runs()}
SPLIT = json.loads((published_mpt.HERE / "mpt_split.json").read_text())["rows"]


def test_every_row_is_in_one_half_and_has_its_blocks() -> None:
    assert list(RUNS) == list(SPLIT)
    assert {run.block_key for run in RUNS.values()} == set(published_mpt.block_times())


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()][::20])
def test_shapes_have_the_parameters_that_the_row_states(run: Run) -> None:
    assert run.layers * run.block_elements + run.embedding_elements + 2 * run.hidden == run.parameters
    profile = published_mpt.profile_of(run)
    assert sum(gradient.bytes for gradient in profile.gradients) == 4 * run.parameters
