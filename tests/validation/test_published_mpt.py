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


@pytest.mark.parametrize(
    "identity",
    [
        "mosaicml/mpt-1b/a100_40gb/bf16/seq=2048/gpus=128/mbs=10/gbs=1280",
        "mosaicml/mpt-7b/h100_80gb/amp_bf16/seq=2048/gpus=128/mbs=6/gbs=768",
        "mosaicml/mpt-1b/h100_80gb/amp_bf16/seq=2048/gpus=512/mbs=12/gbs=6144",
    ],
)
def test_several_nodes_follow_from_eight_gpus(identity: str) -> None:
    assert SPLIT[identity] == "development"
    (row,) = published_mpt.calibrated([RUNS[identity]], list(RUNS.values())).values()
    assert abs(row["error"]) < 0.04
    assert row["inside"]


def test_long_sequences_on_old_kernels() -> None:
    """65536 tokens: far too fast with the attention of today, close with that of the time."""
    run = RUNS["mosaicml/mpt-7b/a100_80gb/amp_bf16/seq=65536/gpus=8/mbs=1/gbs=16"]
    assert SPLIT[run.identity] == "development"
    now, then = (published_mpt.predicted(run, attention=factor).iteration_s for factor in (1.0, 1.9))
    assert now / run.measured_s == pytest.approx(0.65, abs=0.03)
    assert then / run.measured_s == pytest.approx(1.0, abs=0.05)


def test_runs_of_fsdp1_keep_its_rules() -> None:
    small = RUNS["mosaicml/mpt-1b/a100_40gb/bf16/seq=2048/gpus=128/mbs=10/gbs=1280"]
    large = RUNS["mosaicml/mpt-1b/h100_80gb/amp_bf16/seq=2048/gpus=512/mbs=12/gbs=6144"]
    first, second = published_mpt.plan_of(small).sharding, published_mpt.plan_of(large).sharding
    assert first is not None
    assert second is not None
    assert (first.reduce_dtype, first.units[0].reshard, first.units[0].prefetch) == ("bf16", True, 0)
    assert (second.reduce_dtype, second.units[0].reshard, second.units[0].prefetch) == ("fp32", False, 1)
    assert first.gradient_sync == second.gradient_sync == "every"
