"""What drawings hold: every row, every range, every lane, and names as text."""

from __future__ import annotations

import pytest

import backbeat as bb
from backbeat.answer.answer import Answer, answered
from backbeat.answer.asked import Asked
from backbeat.show.figures.compared import draw_exposed, draw_memory, draw_steps, exposed_by_part
from backbeat.show.figures.given import cost_curve, draw_cost_curve, draw_gradient_sizes
from backbeat.show.figures.scaling_curve import HAND_CURVE, Scaling, draw_scaling
from backbeat.show.figures.timeline import draw_timeline, draw_two, timeline
from backbeat.show.steps_traced import traced
from tests.show.hostile import hostile_network, hostile_profile


@pytest.fixture(scope="module")
def found() -> Answer:
    return answered(Asked.of("resnet50-b64-bf16-h200", "10gbe"), [8, 16], ["ddp", "best", "fsdp"])


def test_every_row_has_a_bar_with_its_range(found: Answer) -> None:
    rows = found.rows_at(16)
    (trace,) = draw_steps(rows, found.taken)["data"]
    assert trace["x"] == [row.step_s * 1e3 for row in rows]
    assert trace["error_x"]["array"] == pytest.approx([(row.range_s[1] - row.step_s) * 1e3 for row in rows])


def test_memory_adds_up_to_the_peak(found: Answer) -> None:
    rows = [row for row in found.rows_at(16) if row.memory is not None and row.memory.by_kind]
    drawing = draw_memory(found.rows_at(16))
    if drawing is None:
        assert not rows
        return
    sums = [sum(trace["x"][index] for trace in drawing["data"]) for index in range(len(rows))]
    assert sums == pytest.approx([(row.peak or 0) / 1e9 for row in rows], rel=1e-3)


def test_an_axis_of_shares_starts_at_nothing_and_the_knee_is_drawn(found: Answer) -> None:
    data = Scaling.of(found)
    assert data.best == HAND_CURVE
    drawing = draw_scaling(data)
    assert drawing["layout"]["yaxis"]["range"][0] == 0
    assert {one.gpus for one in data.curves[HAND_CURVE]} == {1, 2, 4, 8, 16}
    marked = draw_scaling(Scaling(data.curves, data.best, 4))
    assert "knee" in [trace["name"] for trace in marked["data"]]
    assert draw_scaling(data, view="throughput")["data"][0]["name"] == "perfect"


def test_waits_are_those_of_the_breakdown(found: Answer) -> None:
    rows = found.rows_at(16)
    parts = exposed_by_part(row.prediction for row in rows)
    assert len(draw_exposed(rows)["data"]) == len(parts)
    assert all(value >= 0 for values in parts.values() for value in values)


def test_a_timeline_has_its_lanes_and_two_stand_below_each_other(found: Answer) -> None:
    steps = traced([row.prediction for row in found.rows_at(16)[:2]], found.asked.profile)
    first, second = (timeline(title, spans, buckets) for title, spans, buckets in steps)
    assert first.lanes[0] == "compute"
    assert max(bar.end_s for bar in first.bars) == first.end_s
    lanes = draw_two(first, second)["layout"]["yaxis"]["categoryarray"]
    assert len(lanes) == len(first.lanes) + len(second.lanes)
    assert len(timeline("few", steps[0][1], steps[0][2], most=2).transfers) <= 4
    assert draw_timeline(first)["layout"]["xaxis"]["range"][1] == pytest.approx(first.end_s * 1020)


def test_what_a_prediction_starts_from_is_drawn() -> None:
    profile, network = bb.Profile.load("resnet50-b64-bf16-h200"), bb.Network.load("10gbe")
    one = bb.predict(profile, network, "ddp", gpus=16)
    (title, spans, buckets) = traced([one], profile)[0]
    drawing = draw_gradient_sizes(profile, timeline(title, spans, buckets))
    assert len(drawing["data"][0]["x"]) == len(profile.gradients)
    assert [workers for workers, _, _ in cost_curve(network, 64).lines] == [8, 64]
    assert draw_cost_curve(cost_curve(network, 64))["data"]


def test_names_are_text() -> None:
    hostile = answered(Asked.of(hostile_profile(), hostile_network()), [8], ["ddp", "best"])
    (title, spans, buckets) = traced([hostile.taken.prediction], hostile.asked.profile)[0]
    assert "<script>" not in str(draw_timeline(timeline(title, spans, buckets)))
