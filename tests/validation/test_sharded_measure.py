"""The scripts that measure sharded plans: labs and settings by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("torch", reason="the lab needs torch")

from backbeat.errors import InputError
from backbeat.steps.predict import predict
from tests.lab.cases import network
from validation import cases, collect
from validation.ask import Asker


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    pytest.importorskip("pyroute2", reason="the lab needs pyroute2")
    return importlib.import_module("validation.sharded.measure")


def test_labs_by_name(measure: ModuleType) -> None:
    plain = measure.setting_of("4:16gbit", "nccl", 1.0)
    assert (plain.nodes, plain.ranks_per_node, plain.rate_bits) == (4, 1, 16e9)
    nodes = measure.setting_of("2x2:5gbit:25gbit", "nccl", 1.0)
    assert (nodes.nodes, nodes.ranks_per_node, nodes.rate_bits, nodes.inside_bits) == (2, 2, 5e9, 25e9)
    assert "hsdp" in measure.settings_for(nodes)
    with pytest.raises(InputError, match="is no lab"):
        measure.setting_of("four:16gbit", "nccl", 1.0)


def test_every_setting_is_a_plan_that_can_be_predicted(measure: ModuleType) -> None:
    setting = measure.setting_of("4:16gbit", "nccl", 1.0)
    plans = {name: measure.plan_for(name, measure.tiny(), network(), setting) for name in measure.SETTINGS}
    units = {name: [len(unit.modules) for unit in plan.sharding.units] for name, plan in plans.items()}
    assert units["pairs"] == [2, 2]
    assert units["fsdp"] == [1, 1, 1, 1]
    assert not any(unit.reshard for unit in plans["zero2"].sharding.units)
    assert plans["bf16-reduce"].sharding.reduce_dtype == "bf16"
    assert {unit.prefetch for unit in plans["prefetch2"].sharding.units} == {2}
    assert all(predict(measure.tiny(), network(), plan).iteration_s > 0 for plan in plans.values())


def test_what_was_measured_is_not_measured_again(measure: ModuleType, tmp_path: Path) -> None:
    setting = measure.setting_of("4:16gbit", "nccl", 1.0)
    record = measure.opened(tmp_path / "lab.json", setting)
    record["cases"].append({"session": 0, "model": "tiny", "setting": "fsdp", "series_s": [[1.0] * 3] * 2})
    collect.save(tmp_path / "lab.json", record)
    assert json.loads((tmp_path / "lab.json").read_text()) == json.loads(json.dumps(record))
    assert "fsdp" not in measure.left(record, ["tiny"], setting)["tiny"]


@pytest.mark.parametrize(
    ("ranks_per_node", "number", "median", "p95", "worst"),
    [(1, 42, 0.015, 0.045, 0.05), (2, 12, 0.025, 0.045, 0.055)],
)
def test_predictions_of_the_recorded_cases_stay_as_good(
    ranks_per_node: int, number: int, median: float, p95: float, worst: float
) -> None:
    """Measured on 4 and 8 NCCL nodes, and on 2 of 2 ranks; `validation/sharded/README.md` has the figures."""
    table = cases.table("sharded")
    asker, off = Asker(table), []
    for case in table.cases():
        if case.id.startswith("spun/") and ("nx" in case.cluster) == (ranks_per_node > 1):
            off.append(abs(asker.ask(case, "profile, calibrated").seconds / (case.seconds or 0.0) - 1))
    assert len(off) == number
    assert np.median(off) < median
    assert np.quantile(off, 0.95) < p95
    assert max(off) < worst
