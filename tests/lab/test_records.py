from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backbeat.errors import InputError
from backbeat.lab import plans
from backbeat.lab.plans import shorthand
from backbeat.lab.records import Case, Compute, Place, Record, extrapolated, load, outcomes
from backbeat.model import CollectiveTimes
from backbeat.simulate import predict
from tests.lab.cases import network, profile


def record(nodes: int = 4) -> Record:
    cluster = network(nodes)
    (choice,) = plans.parse(["equal:3"])
    plan = plans.build(choice, profile(), cluster)
    return Record(
        setting=f"gloo-{nodes}n",
        backend="gloo",
        nodes=nodes,
        bandwidth_bits=1e9,
        dilation=1.0,
        sessions=(
            Place(
                network=cluster,
                timings=[{"bytes": 1024, "median_s": 1e-3}],
                calibration_s=1.0,
                machine="a machine",
                kernel="6",
                date="2026-01-01",
                versions={"torch": "2"},
                command="backbeat validate",
            ),
        ),
        models={"small": Compute.of(profile())},
        cases=(
            Case(
                session=0,
                model="small",
                plan="equal:3",
                channels=1,
                groups=shorthand(plan),
                series_s=[[0.05, 0.051], [0.052, 0.9]],
                predicted_s=0.05,
            ),
        ),
    )


def test_records_are_read_as_they_were_written(tmp_path: Path):
    record().save(tmp_path / "one.json")
    (tmp_path / "summary.json").write_text("{}")
    assert load(tmp_path) == [record()]


def test_cases_are_predicted_anew_from_the_record_alone():
    (one,) = outcomes(record())
    (choice,) = plans.parse(["equal:3"])
    expected = predict(profile(), network(), plans.build(choice, profile(), network()))
    assert one.predicted_s == pytest.approx(expected.iteration_s)
    assert one.measured_s == pytest.approx(0.0515)
    assert one.repeat > 1


def test_more_nodes_are_predicted_from_fewer():
    (moved,) = extrapolated([record(4), record(8)])
    assert moved.nodes == 8
    (choice,) = plans.parse(["equal:3"])
    plan = plans.build(choice, profile(), network(8))
    assert moved.predicted_s == pytest.approx(predict(profile(), network(4).at(workers=8), plan).iteration_s)


def test_what_was_measured_is_not_measured_again():
    from backbeat.lab.validate import pending

    choices = plans.parse(["equal:3", "wfbp"])
    (left,) = pending(record(), ["small"], choices)
    assert left[0] == "small"
    assert [choice.name for choice in left[1]] == ["wfbp"]
    assert pending(record(), ["small"], choices[:1]) == []


def test_an_offset_is_taken_off_every_time_of_a_calibration():
    plain = record()
    shifted = msgspec.structs.replace(
        plain, sessions=tuple(msgspec.structs.replace(place, offset_s=1e-4) for place in plain.sessions)
    )
    before, after = plain.sessions[0].network, shifted.calibration(0)
    assert float(after.cost.time(10**6)) == pytest.approx(float(before.cost.time(10**6)) - 1e-4)
    curve = msgspec.structs.replace(before, all_reduce=CollectiveTimes(points=((1024, 2e-4), (2048, 3e-4))))
    place = msgspec.structs.replace(plain.sessions[0], network=curve, offset_s=1e-4)
    assert place.repaired.all_reduce.points == ((1024, pytest.approx(1e-4)), (2048, pytest.approx(2e-4)))
    assert outcomes(shifted)[0].predicted_s < outcomes(plain)[0].predicted_s


def test_another_session_can_stand_in_for_a_calibration():
    plain = record()
    slow = msgspec.structs.replace(plain.sessions[0], offset_s=-5e-3)
    replaced = msgspec.structs.replace(plain.sessions[0], replaced_by=len(plain.sessions), why="it was short")
    both = msgspec.structs.replace(plain, sessions=(replaced, *plain.sessions[1:], slow))
    assert both.calibration(0) == slow.repaired
    assert outcomes(both)[0].predicted_s > outcomes(plain)[0].predicted_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: {"sessions": [{**one["sessions"][0], "replaced_by": 9}]}, "replaced_by is 9"),
        (lambda one: {"cases": [{**one["cases"][0], "session": 9}]}, "session is 9"),
        (lambda one: {"models": {}}, "which models does not have"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message: str):
    raw = msgspec.to_builtins(record())
    with pytest.raises((InputError, msgspec.ValidationError), match=message):
        msgspec.convert({**raw, **change(raw)}, Record)
