"""Flags of Megatron-LM: what it would refuse, or read as another layout."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.answer.megatron_flags import megatron_flags
from backbeat.importers.config_json import read_architecture
from backbeat.model.architecture import Architecture
from backbeat.model.framework import FRAMEWORKS, framework_named
from backbeat.model.layout import Job, Layout
from backbeat.steps.stage_layers import split_layers

JOB = Job(global_batch=64, sequence=4096)


def layers_of(text: str) -> list[int]:
    """A `--pipeline-model-parallel-layout` read as Megatron-LM reads it."""
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(pattern, lambda found: found[1] * int(found[2]), unrolled)
    assert unrolled.startswith("E")
    assert unrolled.endswith("L")
    return [len(stage) for stage in unrolled[1:-1].split("|")]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 130))
def test_every_stage_has_the_layers_of_the_layout(pp: int, chunks: int, layers: int) -> None:
    stages = pp * (chunks if pp > 1 else 1)
    model = Architecture(name="some", layers=max(layers, stages), hidden=64, heads=4, ffn=256, vocab=100)
    layout = Layout(pp=pp, chunks=stages // pp)
    made = megatron_flags(model, layout, JOB, FRAMEWORKS["megatron"])
    flags = dict(flag.partition(" ")[::2] for flag in made)
    assert flags.get("--pipeline-model-parallel-size", "1") == str(pp)
    text = flags.get("--pipeline-model-parallel-layout")
    counts = [stage.layers for stage in split_layers(model, layout)]
    if text is None:
        # Megatron-LM divides them itself, and only evenly.
        assert len(set(counts)) == 1
        assert flags.get("--num-virtual-stages-per-pipeline-rank", "1") == str(layout.chunks)
    else:
        assert layers_of(text.strip('"')) == counts
        # It takes one of the two.
        assert "--num-virtual-stages-per-pipeline-rank" not in flags


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_products_overlap_only_where_the_sequence_is_sharded(sequence_parallel: bool) -> None:
    layout = Layout(dp=2, tp=4, sequence_parallel=sequence_parallel)
    flags = megatron_flags(read_architecture("llama-3-8b"), layout, JOB, framework_named("megatron", overlap="dp+tp"))
    assert ("--tp-comm-overlap" in flags) == ("--sequence-parallel" in flags) == sequence_parallel


def test_experts_are_not_cut() -> None:
    for model, tp, asked in (("mixtral-8x7b", 2, True), ("mixtral-8x7b", 1, False), ("llama-3-8b", 2, False)):
        flags = megatron_flags(read_architecture(model), Layout(dp=8, tp=tp), JOB, FRAMEWORKS["megatron"])
        assert ("--expert-tensor-parallel-size 1" in flags) == asked
