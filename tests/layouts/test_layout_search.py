"""Ranking layouts."""

from __future__ import annotations

from typing import Any

import pytest

import backbeat as bb
from backbeat import layouts

JOB: dict[str, Any] = {"global_batch": 128, "sequence": 4096}


@pytest.mark.parametrize("model", ["llama-3-70b", "mixtral-8x7b"])
def test_ranked_layouts_fit_use_all_gpus_and_repeat(model: str) -> None:
    found = layouts.search(model, "dgx-h100", gpus=64, **JOB)
    assert 0 < len(found) <= 10
    assert all(one.fits and one.gpus == 64 for one in found)
    steps = [one.step_s for one in found]
    assert steps == sorted(steps)
    assert found == layouts.search(model, "dgx-h100", gpus=64, **JOB)
    assert found[0].step_s == layouts.predict(model, "dgx-h100", found[0].layout, **JOB).step_s


def test_no_layout_that_is_tried_by_hand_beats_the_search() -> None:
    best = layouts.search("llama-3-8b", "dgx-h100", gpus=16, **JOB)[0]
    for text in ("dp=16,micro=1,recompute=full", "dp=8,tp=2,micro=1", "dp=4,tp=4,micro=2", "dp=8,pp=2,micro=1"):
        one = layouts.predict("llama-3-8b", "dgx-h100", text, **JOB)
        assert not one.fits or one.step_s >= best.step_s


def test_nothing_is_ranked_where_nothing_fits() -> None:
    assert layouts.search("llama-3-405b", "dgx-h100", gpus=8, **JOB) == []
    with pytest.raises(bb.InputError, match="gpus is 0"):
        layouts.search("llama-3-8b", "dgx-h100", gpus=0, **JOB)


def test_a_framework_without_the_interleaved_schedule_is_not_told_to_use_it() -> None:
    with_chunks, without = (
        layouts.search("llama-3-70b", "dgx-h100", gpus=64, framework=framework, **JOB)
        for framework in ("megatron", "nanotron")
    )
    assert any(one.layout.chunks > 1 for one in with_chunks)
    assert all(one.layout.chunks == 1 for one in without)
