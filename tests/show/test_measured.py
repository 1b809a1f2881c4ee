"""What was measured, read from the lab's results and from traces of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.answer.answer import answered
from backbeat.answer.asked import Asked
from backbeat.errors import InputError
from backbeat.planners.planned import planned, predicted
from backbeat.show.measured import finished_spans, read_lab, read_trace
from backbeat.show.pages.report_page import report
from tests.problems import affine, make_profile


@pytest.fixture
def profile() -> bb.Profile:
    return make_profile([10**6] * 6, [1e-3 * index for index in range(1, 7)], forward=3e-3)


def lab_file(path: Path, profile: bb.Profile) -> Path:
    """As `backbeat lab -o` writes it, for a lab that runs exactly as predicted."""
    network = affine(1e-3, 1e-9, workers=2)
    rows = []
    for strategy in ("wfbp", "optimal"):
        plan = planned(profile, network, strategy)
        result = predicted(profile, network, plan, broadcast_buffers=False)
        ends = [span.end_s - profile.forward_s for span in result.timeline if span.lane != "compute"]
        rows.append(
            {
                "strategy": strategy,
                "plan": strategy,
                "communicators": plan.communicators,
                "buckets": len(plan.buckets),
                "launches": [[len(bucket.gradients), bucket.communicator] for bucket in plan.buckets],
                "measured_s": result.iteration_s,
                "predicted_s": result.iteration_s,
                "single_s": result.single_s,
                "error": 0.0,
                "series_s": [[result.iteration_s] * 5, [result.iteration_s] * 5],
                "finishes_s": ends,
            }
        )
    data = {
        "schema": "backbeat.lab/1",
        "nodes": 2,
        "backend": "gloo",
        "profile": profile.name,
        "dilation": 1.0,
        "stragglers": {},
        "network": {"schema": network.schema, **msgspec.to_builtins(network)},
        "rows": rows,
    }
    path.write_text(json.dumps(data))
    return path


def test_lab_rows_become_measured_and_predicted_timelines(tmp_path: Path, profile: bb.Profile) -> None:
    rows = read_lab(lab_file(tmp_path / "lab.json", profile), profile)
    assert [row.label for row in rows] == ["wfbp", "optimal"]
    for row in rows:
        assert row.error == pytest.approx(0)
        assert row.iterations == 10
        assert row.low_s == row.measured_s == row.high_s
        ends = [span.end_s for span in row.predicted_spans]
        assert [span.end_s for span in row.measured_spans] == pytest.approx(ends)
    made = answered(Asked.of(profile, affine(1e-3, 1e-9)), [4, 8], ["optimal", "ddp"])
    labels = [title for one in rows for title, _, _ in one.traced()]
    assert [label.split(":")[0] for label in labels] == ["predicted", "measured"] * 2
    page = report(made, measured=rows)
    assert "Predicted against measured" in page
    assert "2 plans were measured" in page


def test_another_profile_keeps_the_numbers_and_draws_no_timeline(tmp_path: Path, profile: bb.Profile) -> None:
    path = lab_file(tmp_path / "lab.json", replace(profile, name="another"))
    rows = read_lab(path, profile)
    assert all(not row.measured_spans and not row.predicted_spans for row in rows)
    assert all(row.error == pytest.approx(0) for row in rows)


def test_launches_name_the_groups_exactly(tmp_path: Path, profile: bb.Profile) -> None:
    path = lab_file(tmp_path / "lab.json", profile)
    data = json.loads(path.read_text())
    row = {"plan": "equal:2", "launches": [[2, 0], [4, 1]], "communicators": 2, "finishes_s": [5e-3, 8e-3]}
    data["rows"] = [{**data["rows"][0], **row}]
    path.write_text(json.dumps(data))
    (row,) = read_lab(path, profile)
    assert row.buckets == (("g0", "g1"), ("g2", "g3", "g4", "g5"))
    assert [span.lane for span in row.measured_spans[3:]] == ["communicator 0", "communicator 1"]
    assert row.measured_spans[3].start_s == pytest.approx(3e-3 + 2e-3)


def test_units_keep_the_numbers_and_draw_no_timeline(tmp_path: Path, profile: bb.Profile) -> None:
    path = lab_file(tmp_path / "lab.json", profile)
    data = json.loads(path.read_text())
    del data["rows"][1]["buckets"], data["rows"][1]["series_s"]
    data["rows"][1] |= {"units": 2, "launches": [[3, 1], [3, 0]]}
    path.write_text(json.dumps(data))
    buckets, without = read_lab(path, profile)
    assert buckets.measured_spans
    assert not without.measured_spans
    assert without.error == pytest.approx(0)
    assert without.low_s == without.measured_s == without.high_s


def test_finishes_that_do_not_fit_the_plan_draw_nothing(profile: bb.Profile) -> None:
    plan = planned(profile, affine(1e-3, 1e-9), "single")
    assert finished_spans(profile, plan, [1.0, 2.0]) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("{", "cut short"),
        ("[1]", "one JSON object, this holds a list"),
        ('{"schema": "backbeat.plan/1"}', "schema is 'backbeat.plan/1'"),
        ('{"schema": "backbeat.lab/1", "nodes": 2}', "missing required field"),
        ('{"schema": "backbeat.lab/1", "nodes": 2, "profile": "x", "rows": [], "network": {}}', "network"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, profile: bb.Profile, text: str, message: str) -> None:
    path = tmp_path / "lab.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_lab(path, profile)
    with pytest.raises(InputError, match="no such file"):
        read_lab(tmp_path / "none.json", profile)


def event(name: str, kind: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": length, "pid": 0, "tid": 7, "args": args}


def test_a_trace_shows_its_last_step_with_kernels_joined_and_collectives_on_lanes(tmp_path: Path) -> None:
    events = []
    for step in range(3):
        low = 10_000 * step
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", low, 9_000),
            event("gemm", "kernel", low + 100, 500, stream=7),
            event("gemm", "kernel", low + 605, 500, stream=7),
            event("gemm", "kernel", low + 4_000, 500, stream=7),
            event("ncclDevKernel_AllReduce", "kernel", low + 1_000, 3_000, stream=9, **{"Group size": 4}),
            event("ncclDevKernel_AllReduce", "kernel", low + 2_000, 3_000, stream=10, **{"Group size": 4}),
        ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    row = read_trace(path)
    assert row.workers == 4
    computing = [span for span in row.measured_spans if span.lane == "compute"]
    assert [(round(span.start_s * 1e6), round(span.end_s * 1e6)) for span in computing] == [(100, 1105), (4000, 4500)]
    assert [span.lane for span in row.measured_spans if span.lane != "compute"] == ["communicator 0", "communicator 1"]
    made = answered(Asked.of(make_profile([10**6], [1e-3]), affine(1e-3, 1e-9)), [4], ["ddp"])
    assert "measured: trace trace trace.json" in report(made, measured=[row])


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match="holds no operators"):
        read_trace(path)


def test_without_profiler_steps_an_iteration_lies_between_optimizer_steps(tmp_path: Path) -> None:
    events = [event("Optimizer.step#SGD.step", "user_annotation", 10_000 * step, 1_000) for step in range(3)]
    events += [event("gemm", "kernel", 10_000 * step + 3_000, 500, stream=7) for step in range(3)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    row = read_trace(path)
    assert row.measured_s == 0
    assert [span.start_s for span in row.measured_spans] == pytest.approx([2e-3])
