"""Sharded plans: their file, what is refused in it, and where such a plan is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import backbeat as bb
import backbeat.model.schemas
from backbeat.model import Bucket, Mesh, ShardUnit
from backbeat.planners.planned import planned
from backbeat.steps.schedule import Schedule
from tests.problems import put

PLAN: dict[str, Any] = {
    "schema": "backbeat.plan/2",
    "strategy": "fsdp",
    "model": "llama",
    "workers": 8,
    "sharding": {
        "mesh": {"replicate": 1, "shard": 8},
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "reduce_scatter_buffers": 1,
        "separate_reduce_scatter": False,
        "units": [
            {"modules": ["layers.0", "layers.1"], "reshard": True, "prefetch": 1},
            {"modules": ["layers.2"], "reshard": False, "prefetch": 0},
        ],
    },
}


def load(tmp_path: Path, data: dict[str, Any]) -> bb.Plan:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    return bb.Plan.load(file)


def test_a_file_with_the_fields_of_the_format_loads_and_is_written_with_them_alone(tmp_path: Path) -> None:
    plan = load(tmp_path, PLAN)
    assert plan.sharding is not None
    assert plan.sharding.units[0] == ShardUnit(modules=("layers.0", "layers.1"), reshard=True, prefetch=1)
    assert plan.sharding.mesh == Mesh(replicate=1, shard=8)
    assert (plan.buckets, plan.communicators) == ((), 1)
    plan.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == PLAN
    assert bb.Plan.load(tmp_path / "again.json") == plan


def test_communicators_follow_from_the_sharding(tmp_path: Path) -> None:
    data = put(PLAN, "sharding.mesh", {"replicate": 2, "shard": 4})
    data["sharding"]["separate_reduce_scatter"] = True
    assert load(tmp_path, data).communicators == 3


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("sharding", ..., ["buckets is empty", "sharding"]),
        ("buckets", [{"gradients": ["a"], "communicator": 0}], ["not both"]),
        ("communicators", 2, ["communicators is 2", "uses 1", "leave communicators out"]),
        ("dynamic", {}, ["dynamic", "remove it"]),
        ("workers", 64, ["replicate(1) * shard(8) != workers(64)", "--gpus"]),
        ("sharding.mesh.shard", 0, ["shard", ">= 1"]),
        ("sharding.mesh.copies", 2, ["copies", "remove it"]),
        ("sharding.param_dtype", "int8", ["param_dtype", "int8"]),
        ("sharding.reduce_dtype", ..., ["missing required field `reduce_dtype`", "add it"]),
        ("sharding.reduce_scatter_buffers", 0, ["reduce_scatter_buffers", ">= 1"]),
        ("sharding.gradient_sync", "never", ["gradient_sync"]),
        ("sharding.units.0.modules", [], ["modules", "length >= 1"]),
        ("sharding.units.0.modules", [""], ["root", "remove the name"]),
        ("sharding.units.1.modules", ["layers.1"], ["units[1]", "already in units[0]", "remove one"]),
        ("sharding.units.1.modules", ["layers.0.mlp"], ["part of 'layers.0'", "units do not nest"]),
        ("sharding.units.0.prefetch", -1, ["prefetch", ">= 0"]),
        ("sharding.units.0.reshard", 8, ["reshard"]),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_do(tmp_path: Path, path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(bb.InputError) as refused:
        load(tmp_path, put(PLAN, path, value))
    for word in words:
        assert word in str(refused.value)


def test_a_plan_with_buckets_says_its_communicators() -> None:
    with pytest.raises(bb.InputError, match="communicators is missing: add it"):
        bb.Plan(strategy="s", model="m", buckets=(Bucket(gradients=("a",), communicator=0),))


def test_the_schema_asks_for_one_of_the_two_forms() -> None:
    schema = json.loads((Path(backbeat.model.schemas.__file__).parent / "plan.json").read_text())
    jsonschema.validate(PLAN, schema)
    buckets = {"communicators": 1, "buckets": [{"gradients": ["a"], "communicator": 0}]}
    for wrong in ({**PLAN, **buckets}, put(PLAN, "sharding", ...)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_where_buckets_are_needed_it_is_refused_with_the_line_to_use(tmp_path: Path) -> None:
    profile = bb.Profile.load("llama-1b-b2-bf16-h200")
    plan = planned(profile, bb.Network.load("ib400").at(workers=8), "fsdp")
    with pytest.raises(bb.InputError, match=r"'fsdp' shards parameters.*`fully_shard\(model, plan=plan, mesh=mesh\)`"):
        Schedule.of_plan(profile, plan)
