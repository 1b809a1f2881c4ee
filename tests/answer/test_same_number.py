"""One question has one number: by every route, in the table as alone, and of the plan that was made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.answer.answer import answered
from backbeat.answer.asked import Asked
from backbeat.model import Network, Plan, Prediction
from backbeat.model.architecture import BUNDLED
from backbeat.model.cluster import cluster_of

SHAPE, EXPERTS, RESNET, CLUSTER = "llama-3.2-1b", "mixtral-8x7b", "resnet50-b64-bf16-h200", "aws-p5en"


def told(found: Prediction) -> dict[str, Any]:
    names = ("step_s", "range_s", "peak_bytes", "fits", "batch", "micro_batches", "global_batch", "recompute", "mfu")
    return {name: getattr(found, name) for name in names} | {"mesh": dict(found.mesh)}


@pytest.mark.parametrize("way", ["ddp", "hsdp:8", "best", "tp=2", "tp+pp"])
def test_a_shape_and_a_cluster_by_name_object_and_file(tmp_path: Path, way: str) -> None:
    network = Network.load(CLUSTER)
    network.save(tmp_path / "cluster.json")
    found = told(Asked.of(SHAPE, CLUSTER).predict(way, 16))
    assert told(Asked.of(BUNDLED[SHAPE], CLUSTER).predict(way, 16)) == found
    for cluster in (network, tmp_path / "cluster.json", cluster_of(network, None), network.at(workers=16)):
        assert told(Asked.of(SHAPE, cluster).predict(way, 16)) == found


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        (SHAPE, {}),
        (SHAPE, {"global_batch": 100}),
        (SHAPE, {"global_batch": 8}),
        (SHAPE, {"recompute": "selective"}),
        (EXPERTS, {}),
        (RESNET, {"global_batch": 512}),
    ],
)
def test_every_row_is_what_its_way_alone_is(model: str, keywords: dict[str, Any]) -> None:
    asked = Asked.of(model, CLUSTER, **keywords)
    rows = answered(asked, [16]).rows
    assert len({row.way for row in rows}) == len(rows)
    for row in rows:
        alone = Asked.of(model, CLUSTER, **keywords).predict(row.way, 16, strict=False)
        assert told(alone) == told(row.prediction), row.way


@pytest.mark.parametrize("keywords", [{}, {"global_batch": 64}, {"memory": "40GB"}, {"recompute": "full"}])
@pytest.mark.parametrize("way", ["ddp", "fsdp", "best", "tp=2", "chunks=2+pp=2", "tp+pp"])
def test_a_plan_is_predicted_as_the_way_that_it_was_made_of(tmp_path: Path, way: str, keywords: dict[str, Any]) -> None:
    found = told(bb.predict(SHAPE, CLUSTER, way, gpus=16, **keywords))
    plan = bb.plan(SHAPE, CLUSTER, way, gpus=16, **keywords)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for one in (plan, tmp_path / "plan.json"):
        assert told(bb.predict(SHAPE, CLUSTER, one, gpus=16, **keywords)) == found


def test_a_plan_that_recomputes_nothing_is_followed() -> None:
    plan = bb.plan("llama-3-8b", CLUSTER, "ddp", gpus=16, recompute="none")
    found = bb.predict("llama-3-8b", CLUSTER, plan)
    assert (found.recompute, found.plan.memory) == ("none", None)  # type: ignore[union-attr]
    with pytest.raises(bb.InputError, match="the plan says it: none"):
        bb.predict("llama-3-8b", CLUSTER, plan, recompute="full")
    keeping = replace(plan, predicted=None)
    assert bb.predict("llama-3-8b", CLUSTER, keeping, recompute="none").step_s == found.step_s


@pytest.mark.parametrize("order", ["tp=2+pp=2+chunks=2", "chunks=2+pp=2+tp=2"])
def test_a_layouts_word_is_one_in_whatever_order(order: str) -> None:
    assert bb.plan(SHAPE, CLUSTER, order, gpus=16).strategy == "tp=2+pp=2+chunks=2"
