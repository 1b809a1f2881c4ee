"""Ranking layouts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from backbeat.importers.config_json import read_architecture
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import cluster_of
from backbeat.model.layout import Layout, job_of
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.planners.layout_ways import RECOMPUTE, LayoutWays, rank
from backbeat.steps.predict_layout import predict_layout, predictor_of

JOB: dict[str, Any] = {"global_batch": 128, "sequence": 4096}


def ways(
    model: Architecture | str, cluster: Any, gpus: int, *, global_batch: int, sequence: int, precision: str = "bf16",
    parts: dict[str, Any] | None = None, **options: Any,
) -> LayoutWays:  # fmt: skip
    job = job_of(global_batch, sequence, precision)
    return LayoutWays(predictor=predictor_of(model, cluster, job, **options), gpus=gpus, parts=parts)


def search(*asked: Any, most: int = 10, **options: Any) -> list[Prediction]:
    return ways(*asked, **options).ranked(most)


@pytest.mark.parametrize("model", ["llama-3-70b", pytest.param("mixtral-8x7b", marks=pytest.mark.long)])
def test_ranked_layouts_fit_use_all_gpus_and_repeat(model: str) -> None:
    found = search(model, "dgx-h100", 64, **JOB)
    assert 0 < len(found) <= 12
    for part in ("tp", "pp"):
        assert any(part in one.mesh for one in found), "the best with it is always there"
    assert all(one.fits != "no" and one.gpus == 64 for one in found)
    steps = [one.step_s for one in found]
    assert steps == sorted(steps)
    assert found == search(model, "dgx-h100", 64, **JOB)
    assert found[0].step_s == predict_layout(model, "dgx-h100", found[0].layout, **JOB).step_s
    assert not any(one.timeline for one in found)


def test_no_layout_that_is_tried_by_hand_beats_the_search() -> None:
    best = search("llama-3-8b", "dgx-h100", 16, **JOB)[0]
    for text in ("dp=8+tp=2+micro=2", "dp=8+tp=2+micro=1", "dp=4+tp=4+micro=2", "dp=8+pp=2+micro=1"):
        one = predict_layout("llama-3-8b", "dgx-h100", text, **JOB)
        assert one.fits == "no" or one.step_s >= best.step_s


@pytest.mark.parametrize(("model", "sequence"), [("llama-3.2-1b", 8192), ("llama-3-8b", 4096)])
def test_the_search_ranks_what_trying_everything_ranks(model: str, sequence: int) -> None:
    """On four GPUs: every way to share them, size of a micro-batch, number of chunks and recomputation. A way stands
    once, with its fastest micro-batch."""
    job, there = job_of(16, sequence), cluster_of("dgx-h100")
    known = read_architecture(model)
    found = []
    for tp, pp, cp, micro, chunks in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4, 8), range(1, 9)):
        dp = 4 // (tp * pp * cp)
        if dp == 4 or dp * tp * pp * cp != 4 or known.layers % (pp * chunks) or cp * 4096 > max(sequence, 4096):
            continue
        for recompute in RECOMPUTE:
            layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, chunks=chunks, recompute=recompute)
            if impossible(known, layout, job, 4) is not None:
                continue
            one = predict_layout(known, there, layout, global_batch=16, sequence=sequence, band=False)
            if one.fits != "no":
                found.append(one)
                break
    ranked = search(known, there, 4, global_batch=16, sequence=sequence, most=5)[:5]
    fastest: dict[Layout, Prediction] = {}
    for one in sorted(found, key=lambda one: one.step_s):
        assert one.layout is not None
        fastest.setdefault(replace(one.layout, micro_batch=1, recompute="none"), one)
    best = list(fastest.values())[:5]
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
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_asked_of_a_prediction_is_asked_of_the_search(options: dict[str, Any]) -> None:
    small = read_architecture(
        {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "experts": 4, "experts_per_token": 2,
         "expert_ffn": 1024}
    )  # fmt: skip
    job: dict[str, Any] = {"global_batch": 8, "sequence": 2048}
    plain, best = (search(small, "dgx-h100", 2, most=1, **job, **each)[0] for each in ({}, options))
    found = predict_layout(small, "dgx-h100", best.layout, **job, **options)
    assert (best.step_s, best.breakdown, best.memory) == (found.step_s, found.breakdown, found.memory)
    assert best.step_s != plain.step_s


def test_parts_of_a_word_are_kept_and_the_rest_is_searched() -> None:
    found = search("llama-3-8b", "dgx-h100", 16, parts={"tp": None, "pp": "2", "zero": "2"}, most=3, **JOB)
    assert {(one.layout.pp, one.layout.zero) for one in found if one.layout} == {(2, 2)}
    assert all(one.mesh["tp"] > 1 for one in found)


def test_where_nothing_fits_the_layout_that_takes_least_is_told() -> None:
    (least,) = search("llama-3-405b", "dgx-h100", 8, **JOB)
    assert (least.fits, least.recompute) == ("no", "full")


def test_a_framework_without_the_interleaved_schedule_is_not_told_to_use_it() -> None:
    with_chunks, without = (
        search("llama-3-70b", "dgx-h100", 64, framework=framework, **JOB) for framework in ("megatron", "nanotron")
    )
    assert any(one.layout and one.layout.chunks > 1 for one in with_chunks)
    assert all(one.layout and one.layout.chunks == 1 for one in without)


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
    asked = ways(model, cluster, gpus, framework=framework, **JOB)
    predictor = asked.predictor
    weighed = sorted(asked.fitting, key=lambda one: rank(one, predictor.step_s(one)))
    events = [predictor.predict(layout, timeline=False).step_s for layout in weighed[:125]]
    assert events.index(min(events)) < 16


@pytest.mark.parametrize("schedule", [None, "zero-bubble", "gpipe"])
def test_the_least_time_of_a_layout_is_never_more_than_its_time(schedule: str | None) -> None:
    parts = None if schedule is None else {"pp": None, "schedule": schedule}
    asked = ways("llama-3-8b", "dgx-h100", 32, global_batch=64, sequence=4096, parts=parts, framework="torchtitan")
    found = asked.fitting
    assert found
    assert all(asked.predictor.least_s(one) <= asked.predictor.step_s(one) for one in found)
    ordered = sorted(found, key=lambda one: rank(one, asked.predictor.step_s(one)))
    assert list(asked._ordered(found, asked.predictor.step_s)) == ordered
