"""Ranking layouts."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

import backbeat as bb
from backbeat.importers.config_json import read_architecture
from backbeat.model.cluster import cluster_of
from backbeat.model.layout import Layout, job_of
from backbeat.model.possible_layout import impossible
from backbeat.planners.layout_search import _candidates, search
from backbeat.planners.layout_ways import RECOMPUTE, rank
from backbeat.steps.predict_layout import predict_layout, predictor_of

JOB: dict[str, Any] = {"global_batch": 128, "sequence": 4096}


@pytest.mark.parametrize("model", ["llama-3-70b", pytest.param("mixtral-8x7b", marks=pytest.mark.long)])
def test_ranked_layouts_fit_use_all_gpus_and_repeat(model: str) -> None:
    found = search(model, "dgx-h100", gpus=64, **JOB)
    assert 0 < len(found) <= 10
    assert all(one.fits != "no" and one.gpus == 64 for one in found)
    steps = [one.step_s for one in found]
    assert steps == sorted(steps)
    assert found == search(model, "dgx-h100", gpus=64, **JOB)
    assert found[0].step_s == predict_layout(model, "dgx-h100", found[0].layout, **JOB).step_s
    assert not any(one.timeline for one in found)


def test_no_layout_that_is_tried_by_hand_beats_the_search() -> None:
    best = search("llama-3-8b", "dgx-h100", gpus=16, **JOB)[0]
    for text in ("dp=16+micro=1+recompute=full", "dp=8+tp=2+micro=1", "dp=4+tp=4+micro=2", "dp=8+pp=2+micro=1"):
        one = predict_layout("llama-3-8b", "dgx-h100", text, **JOB)
        assert one.fits == "no" or one.step_s >= best.step_s


@pytest.mark.parametrize(("model", "sequence"), [("llama-3.2-1b", 8192), ("llama-3-8b", 4096)])
def test_the_search_ranks_what_trying_everything_ranks(model: str, sequence: int) -> None:
    """On four GPUs: every way to share them, size of a micro-batch, number of chunks and recomputation."""
    job, there = job_of(16, sequence), cluster_of("dgx-h100")
    known = read_architecture(model)
    found = []
    for tp, pp, cp, micro, chunks in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4, 8), range(1, 9)):
        dp = 4 // (tp * pp * cp)
        if dp * tp * pp * cp != 4 or known.layers % (pp * chunks) or cp * 4096 > max(sequence, 4096):
            continue
        for recompute in RECOMPUTE:
            layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, chunks=chunks, recompute=recompute)
            if impossible(known, layout, job, 4) is not None:
                continue
            one = predict_layout(known, there, layout, global_batch=16, sequence=sequence, band=False)
            if one.fits != "no":
                found.append(one)
                break
    ranked = search(known, there, gpus=4, global_batch=16, sequence=sequence, most=5)
    best = sorted(found, key=lambda one: one.step_s)[:5]
    assert [(one.layout, one.step_s) for one in ranked] == [(one.layout, one.step_s) for one in best]


@pytest.mark.parametrize(
    "options",
    [
        {"framework": "nanotron"},
        {"precision": "fp8"},
        {"accelerator": "a100"},
        {"compute_factor": 1.5},
        {"imbalance": 1.5},
        {"stragglers": {1: 1.3}},
        {"contention": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_asked_of_a_prediction_is_asked_of_the_search(options: dict[str, Any]) -> None:
    small = read_architecture(
        {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "experts": 4, "experts_per_token": 2,
         "expert_ffn": 1024}
    )  # fmt: skip
    job: dict[str, Any] = {"global_batch": 8, "sequence": 2048}
    plain, best = (search(small, "dgx-h100", gpus=2, most=1, **job, **each)[0] for each in ({}, options))
    found = predict_layout(small, "dgx-h100", best.layout, **job, **options)
    assert (best.step_s, best.breakdown, best.memory) == (found.step_s, found.breakdown, found.memory)
    assert best.step_s != plain.step_s


def test_stages_of_zero_are_searched_as_asked_and_one_gpu_has_one_layout_of_each_size() -> None:
    found = search("llama-3-8b", "dgx-h100", gpus=16, zero=(2, 3), most=3, **JOB)
    assert {one.layout.zero for one in found} <= {2, 3}
    alone = search("llama-3.2-1b", "dgx-h100", gpus=1, global_batch=8, sequence=2048)
    assert [one.gpus for one in alone] == [1] * len(alone)
    assert {one.layout.micro_batch for one in alone} == {1, 2, 4, 8}


def test_nothing_is_ranked_where_nothing_fits() -> None:
    assert search("llama-3-405b", "dgx-h100", gpus=8, **JOB) == []
    with pytest.raises(bb.InputError, match="gpus is 0"):
        search("llama-3-8b", "dgx-h100", gpus=0, **JOB)


def test_a_framework_without_the_interleaved_schedule_is_not_told_to_use_it() -> None:
    with_chunks, without = (
        search("llama-3-70b", "dgx-h100", gpus=64, framework=framework, **JOB) for framework in ("megatron", "nanotron")
    )
    assert any(one.layout.chunks > 1 for one in with_chunks)
    assert all(one.layout.chunks == 1 for one in without)


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "framework"),
    [
        ("llama-3-8b", "dgx-h100", 64, "torchtitan"),
        ("mixtral-8x7b", "dgx-h100", 64, "megatron"),
        ("gpt3-13b", "dgx-a100", 32, "nanotron"),
        pytest.param("llama-3-70b", "dgx-h100", 64, "megatron", marks=pytest.mark.long),
    ],
)
def test_the_best_by_events_is_among_the_first_by_formula(model: str, cluster: str, gpus: int, framework: str) -> None:
    """Of up to 125 layouts of each job among 16, which is what a search simulates."""
    predictor = predictor_of(model, cluster, job_of(128, 4096), framework=framework)
    weighed = []
    for base in _candidates(predictor, gpus, (1,)):
        tried = (msgspec.structs.replace(base, recompute=recompute) for recompute in RECOMPUTE)
        fitting = next((one for one in tried if predictor.fits(one)), None)
        if fitting is not None:
            weighed.append(fitting)
    weighed.sort(key=lambda one: rank(one, predictor.step_s(one)))
    events = [predictor.predict(layout, timeline=False).step_s for layout in weighed[:125]]
    assert events.index(min(events)) < 16
