"""Tables of our own lab: what is committed of them is what the model says of the kept measurements."""

from __future__ import annotations

import json

import pytest

from validation import cases, own_docs
from validation.ask import Asker
from validation.run import needs_run
from validation.tables import training

OWN = [name for name in cases.names() if cases.table(name).own]
SOME = 12


@pytest.mark.parametrize("name", OWN)
def test_the_model_gives_the_committed_errors(name: str) -> None:
    """Of some rows of each route; the judge asks all."""
    table = cases.table(name)
    asker = Asker(table)
    known = {case.id: case for case in table.cases()}
    told = json.loads((table.folder / "errors.json").read_text())["rows"]
    for route in table.routes:
        rows = [row for row in told if row["route"] == route and not needs_run(route)]
        for row in rows[:: len(rows) // SOME + 1]:
            case = known[row["id"]]
            answer = asker.ask(case, route)
            if "error" in row and case.seconds is not None:
                assert answer.seconds / case.seconds - 1 == pytest.approx(row["error"], abs=1e-5), row["id"]
            if "memory" in row and case.memory_bytes is not None and answer.memory_bytes is not None:
                assert answer.memory_bytes / case.memory_bytes - 1 == pytest.approx(row["memory"], abs=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_every_row_that_can_be_asked_has_its_errors(name: str) -> None:
    table = cases.table(name)
    asker = Asker(table)
    told = {(row.case.id, row.route) for row in own_docs.rows(name)}
    wanted = {
        (case.id, route) for case in table.cases() for route in table.routes
        if not case.unasked and not needs_run(route) and asker.asks(case, route)
    }  # fmt: skip
    assert told >= wanted


def test_pages_state_percentiles_in_percent() -> None:
    assert own_docs.off([0.01, -0.02, None, 0.03]) == (3, 2.0, pytest.approx(2.9), 3.0)
    assert own_docs.whole(33.3) == "33 %"


def test_replays_on_more_nodes_know_the_calibration_of_fewer() -> None:
    every = {case.id: case for case in cases.table("lab").cases()}
    last = next(case for name, case in every.items() if name.startswith("lab/nccl-8n-10.0gbit/5/"))
    in_order = next(case for name, case in every.items() if name.startswith("simultaneous/nccl-4n-10.0gbit/3/"))
    assert last.network == in_order.own_network
    assert in_order.network is None


def test_equal_plans_of_one_job_are_one_case() -> None:
    ddp = {"strategy": "ddp", "buckets": [1]}
    best = {"strategy": "best", "buckets": [1]}
    assert training.runs({"plan": ddp}) == training.runs({"plan": {**ddp, "notes": ["x"]}})
    assert training.runs({"plan": ddp}) != training.runs({"plan": best})
    every = [case for case in cases.table("training").cases() if "with-slowdown" in case.id]
    assert len({(case.system, case.family, str(case.plan)) for case in every}) == len(every)
