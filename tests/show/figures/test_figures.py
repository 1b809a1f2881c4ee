"""Each figure's structure says what the data says, draws no more than it should, and says what it left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model import LoadBand, Memory, Span
from backbeat.model.prediction import knee
from backbeat.planners.planned import planned, predicted
from backbeat.show.figures import canvas
from backbeat.show.figures.compared import draw_exposed, draw_measured, draw_memory_use, exposed_by_part, memory_kinds
from backbeat.show.figures.given import (
    bytes_arrived,
    bytes_ready,
    cost_curve,
    draw_cost_curve,
    draw_gradient_sizes,
    largest_gradients,
)
from backbeat.show.figures.scaling_curve import Scaling, draw_scaling
from backbeat.show.figures.timeline import draw_timeline, timeline
from backbeat.show.measured import Measured
from backbeat.show.notebook import prediction_figure
from backbeat.show.study import buckets_of, curve_workers, study
from tests.problems import affine, curve, make_profile, networks, profiles


def small() -> bb.Profile:
    sizes = [4000, 10**6, 2 * 10**6, 5 * 10**6, 10**5, 9 * 10**6]
    times = tuple(0.018 + 0.0001 * index for index in range(20))
    return make_profile(sizes, [1e-3, 3e-3, 4e-3, 8e-3, 9e-3, 12e-3], forward=6e-3, iteration_s=times)


def test_scaling_holds_every_prediction_its_band_and_its_knee() -> None:
    made = study(small(), affine(1e-3, 1e-9), [4, 64, 16], strategies=["optimal"])
    data = Scaling(made.curves)
    assert list(data.curves) == ["ddp", "optimal"]
    assert data.counts == [4, 16, 64]
    points = data.curves[data.best]
    for point, (workers, slow, fast) in zip(points, data.band, strict=True):
        assert workers == point.workers
        assert slow <= point.scaling_factor * (1 + 1e-9)
        assert slow <= fast
    perfect, *lines = draw_scaling(data, view="throughput")["data"]
    assert perfect["y"] == pytest.approx([count / small().single_s for count in (4, 16, 64)])
    drawn = {line["name"]: line["x"] for line in lines}
    assert drawn["ddp"] == drawn["optimal"] == [4, 16, 64]
    assert drawn.get("knee", [None]) == [knee(points)]


def test_the_band_of_a_plan_that_keeps_less_holds_its_curve() -> None:
    profile, network = bb.Profile.load("resnet50-b128-bf16-h200"), bb.Network.load("100gbe").at(workers=8)
    point = predicted(profile, network, planned(profile, network, "optimal", memory_bytes=3 * 10**9))
    ((_, slow, fast),) = Scaling({"small": [point]}).band
    assert slow < point.scaling_factor < fast < 0.9


def test_a_network_with_a_band_draws_it_instead_of_single_iterations() -> None:
    network = affine(1e-3, 1e-9, band=LoadBand(quiet=2.0, busy=0.5))
    data = Scaling(study(small(), network, [1, 4, 64], strategies=[]).curves)
    assert data.load_band
    alone, *others = data.band
    assert alone[1] == alone[2]
    for (_, slow, fast), point in zip(others, data.curves[data.best][1:], strict=True):
        assert slow < point.scaling_factor < fast
    assert data.range_percent[0] <= 100 * min(slow for _, slow, _ in data.band)
    names = [trace["name"] for trace in draw_scaling(data)["data"]]
    assert "ddp: busy to quiet cluster" in names


def test_without_iteration_times_there_is_no_band() -> None:
    made = study(make_profile([10**6], [1e-3]), affine(1e-3, 1e-9), [4, 8], strategies=[])
    assert Scaling(made.curves).band == []


@given(profiles(), networks(), st.integers(1, 12))
def test_a_timeline_never_draws_more_than_asked_and_loses_no_bytes(
    profile: bb.Profile, network: bb.Network, most: int
) -> None:
    plan = planned(profile, network, "wfbp")
    result = predicted(profile, network, plan)
    data = timeline("wfbp", result.timeline, buckets_of(plan, profile), most=most)
    assert len(data.transfers) <= most
    assert sum(bar.bytes for bar in data.transfers) == sum(span.bytes for span in result.timeline)
    assert sum(bar.buckets for bar in data.transfers) == len(profile.gradients)
    assert sum(bar.gradients for bar in data.transfers) == len(profile.gradients)
    assert sum(bar.buckets for bar in data.transfers if bar.buckets > 1) == data.merged
    assert data.end_s == max(span.end_s for span in result.timeline)
    assert all(bar.end_s >= bar.start_s for bar in data.bars)


def test_bars_name_their_gradients_and_buffers_do_not_shift_them() -> None:
    spans = [
        Span("communicator 0", "buffers", 0.0, 1.0, 5),
        Span("compute", "forward", 1.0, 2.0),
        Span("communicator 1", "a … b (2)", 2.0, 3.0, 10),
        Span("communicator 0", "c", 2.0, 4.0, 20),
    ]
    data = timeline("two", spans, [["a", "b"], ["c"]])
    assert data.lanes == ("compute", "communicator 0", "communicator 1")
    names = {bar.name: bar for bar in data.bars}
    assert names["a, b"].gradients == 2
    assert names["c"].bytes == 20
    assert names["buffers"].gradients == 0


def test_communicators_are_in_order_of_their_number() -> None:
    spans = [Span(f"communicator {number}", "x", 0.0, 1.0, 1) for number in (10, 2, 0)]
    assert timeline("", spans).lanes == ("communicator 0", "communicator 2", "communicator 10")


@given(profiles(), networks())
def test_exposed_parts_add_up_to_what_is_exposed(profile: bb.Profile, network: bb.Network) -> None:
    rows = {name: predicted(profile, network, name) for name in ("wfbp", "ddp", "optimal")}
    parts = exposed_by_part(rows.values())
    for index, label in enumerate(rows):
        total = sum(values[index] for values in parts.values())
        assert total == pytest.approx(rows[label].exposed_s, abs=1e-12)


@given(profiles(), st.integers(2, 10))
def test_gradients_left_out_are_counted(profile: bb.Profile, most: int) -> None:
    drawn = largest_gradients(profile, most)
    assert len(drawn) == min(most, len(profile.gradients))
    ready = [size for _, size in bytes_ready(profile, most)]
    assert ready[-1] == profile.total_bytes
    assert ready == sorted(ready)
    others = [one.bytes for one in profile.gradients if one not in drawn]
    assert min(one.bytes for one in drawn) >= max(others, default=0)


def test_arrived_bytes_reach_the_total() -> None:
    made = study(small(), affine(1e-3, 1e-9), [8], strategies=["optimal"])
    arrived = bytes_arrived(made.timeline("optimal"))
    assert arrived[-1][1] == small().total_bytes
    assert arrived == sorted(arrived)


def test_cost_curve_shows_measured_points_with_residuals_and_the_moved_line() -> None:
    points = [(1024, 1e-3), (2**20, 2e-3), (2**24, 18e-3)]
    data = cost_curve(curve(points, workers=8), 64)
    assert data.points == tuple(points)
    assert len(data.residuals) == 3
    assert [workers for workers, _, _ in data.lines] == [8, 64]
    assert all(moved >= own for own, moved in zip(data.lines[0][2], data.lines[1][2], strict=True))
    straight = cost_curve(affine(1e-3, 1e-9), 8)
    assert straight.points == ()
    assert straight.bytes_per_s == pytest.approx(1e9)
    assert len(straight.lines) == 1
    moved = cost_curve(curve(points, workers=8).at(workers=64), 64)
    assert moved == data


def test_memory_has_a_workspace_and_a_budget() -> None:
    memory = Memory(parameter_bytes=10, gradient_bytes=10, peak_bytes=50)
    assert memory_kinds(memory) == {"parameters": 10, "gradients": 10, "workspace": 30}
    marks = [note["text"] for note in draw_memory_use(memory, 40)["layout"]["annotations"]]
    assert marks == ["peak 50 B", "budget 40 B"]


def test_a_single_number_of_workers_becomes_a_curve() -> None:
    assert curve_workers([64]) == [4, 8, 16, 32, 64]
    assert curve_workers([3]) == [3]
    assert curve_workers([8, 4]) == [4, 8]


def test_every_drawing_is_a_plotly_figure() -> None:
    made = study(small(), curve([(1024, 1e-3), (2**20, 2e-3)]), [4, 8, 64], strategies=["optimal", "best"])
    best = made.timeline("best")
    drawings = [
        draw_scaling(Scaling(made.curves)),
        draw_scaling(Scaling(made.curves), view="throughput"),
        draw_timeline(best),
        draw_exposed(made.at_top),
        draw_gradient_sizes(small(), best),
        draw_cost_curve(cost_curve(made.network, 64)),
        draw_memory_use(Memory(parameter_bytes=10, peak_bytes=20), 15),
        draw_measured([Measured(label="a", origin="lab", workers=2, predicted_s=1.0, measured_s=1.1, high_s=1.2)]),
    ]
    for drawing in drawings:
        assert canvas.figure(drawing).data


@given(st.floats(-1, 2, allow_nan=False))
def test_shades_are_colours(share: float) -> None:
    colour = canvas.shade(share)
    assert len(colour) == 7
    assert math.isfinite(int(colour[1:], 16))


def test_names_in_drawings_are_escaped() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    data = timeline(hostile, [Span("communicator 0", hostile, 0.0, 1.0, 1)])
    assert "<img" not in str(draw_timeline(data))


def test_predictions_show_themselves_in_notebooks() -> None:
    result = predicted(small(), affine(1e-3, 1e-9), "ddp")
    page = result._repr_html_()
    assert f"{result.scaling_factor:.1%}" in page
    assert "<script" not in page
    assert "<img" not in page
    assert len(prediction_figure(result).data) >= 2
