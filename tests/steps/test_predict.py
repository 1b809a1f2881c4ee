"""A whole iteration: what is added up, what limits it, and that no plan beats the bound."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import CollectiveTimes, Fabric, LoadBand, Network, Profile, Source, Topology, WorkersRow
from backbeat.model.batches import at_batch, join
from backbeat.model.framework import FRAMEWORKS
from backbeat.model.prediction import knee
from backbeat.model.slowdown import Slowdown
from backbeat.planners import SHARDED, STRATEGIES
from backbeat.planners.planned import planned, predicted
from backbeat.show.words.notes import worded
from backbeat.steps.predict import predict
from tests.problems import affine, curve, make_profile, networks, profiles

TWO = make_profile([10**6, 10**6], [1e-3, 2e-3], forward=1e-3)
NETWORK = affine(1e-3, 1e-9)


def alone(profile: Profile, communicators: int = 1) -> bb.Plan:
    return bb.Plan.from_buckets(
        profile, [[gradient.name] for gradient in profile.gradients], communicators=communicators
    )


def test_the_iteration_adds_up() -> None:
    result = predicted(TWO, NETWORK, alone(TWO))
    assert result.iteration_s == pytest.approx(1e-3 + 5e-3)
    assert result.single_s == pytest.approx(3e-3)
    assert result.scaling_factor == pytest.approx(0.5)
    assert result.exposed_s == pytest.approx(3e-3)
    assert result.samples_per_s == pytest.approx(8 / 6e-3)
    lanes = [(span.lane, span.name, span.start_s, span.end_s, span.bytes) for span in result.timeline]
    assert lanes[3:] == [
        ("communicator 0", "g0", pytest.approx(2e-3), pytest.approx(4e-3), 10**6),
        ("communicator 0", "g1", pytest.approx(4e-3), pytest.approx(6e-3), 10**6),
    ]
    assert [row[1] for row in lanes[:3]] == ["forward", "backward", "update"]


def test_only_the_last_micro_batch_overlaps() -> None:
    one, four = (predicted(TWO, NETWORK, alone(TWO), accumulation=k) for k in (1, 4))
    assert four.iteration_s == pytest.approx(one.iteration_s + 3 * 3e-3)
    assert four.exposed_s == pytest.approx(one.exposed_s)
    assert four.samples_per_s == pytest.approx(4 * 8 / four.iteration_s)
    with pytest.raises(bb.InputError, match="accumulation is 0"):
        predicted(TWO, NETWORK, "wfbp", accumulation=0)


def test_buffers_are_broadcast_before_forward() -> None:
    profile = make_profile([10**6], [1e-3], buffer_bytes=10**6)
    plan = alone(profile)
    with_buffers = predicted(profile, NETWORK, plan)
    without = predicted(profile, NETWORK, plan, broadcast_buffers=False)
    # Half the latency of the all-reduce, and its traffic of 2·7/8 reduced to 1.
    assert with_buffers.iteration_s - without.iteration_s == pytest.approx(0.5e-3 + 1e-3 / 1.75)
    measured = affine(1e-3, 1e-9, broadcast=CollectiveTimes(alpha_s=0.0, beta_s_per_byte=3e-9))
    assert predicted(profile, measured, plan).breakdown.buffers_s == pytest.approx(3e-3)


def test_stragglers_are_waited_for_and_banded() -> None:
    times = tuple(np.random.default_rng(0).normal(3e-3, 1e-4, 30).tolist())
    profile = make_profile([10**6], [1e-3], iteration_s=times)
    few, many = (predicted(profile, NETWORK.at(workers=n), "single") for n in (8, 4096))
    assert 0 < few.breakdown.stragglers_s < many.breakdown.stragglers_s
    assert few.band is not None
    assert many.band is not None
    assert few.band.p10_s < few.iteration_s < few.band.p90_s
    assert many.band.extrapolated
    assert not few.band.extrapolated
    assert any("slowest of 4096" in note for note in worded(many.notes))
    assert predicted(TWO, NETWORK, "single").band is None


@pytest.mark.parametrize(
    ("profile", "network", "strategy", "bottleneck"),
    [
        (make_profile([100] * 200, np.linspace(1e-3, 5e-3, 200).tolist()), affine(1e-3, 1e-11), "wfbp", "latency"),
        (make_profile([10**8] * 4, [1e-3, 2e-3, 3e-3, 4e-3]), affine(1e-5, 1e-9), "optimal", "bandwidth"),
        (make_profile([10**6] * 4, [1e-3, 2e-3, 3e-3, 9e-3]), affine(1e-6, 1e-9), "single", "waiting"),
        (make_profile([10**3] * 4, [1e-3, 2e-3, 3e-3, 9e-3], forward=0.1), affine(1e-6, 1e-9), "ddp", "compute"),
    ],
)
def test_it_says_what_limits_scaling(profile: Profile, network: Network, strategy: str, bottleneck: str) -> None:
    assert predicted(profile, network, strategy).bottleneck == bottleneck


@settings(max_examples=60)
@given(profiles(), networks(), st.sampled_from(sorted(set(STRATEGIES) - SHARDED)))
def test_the_parts_add_up_and_the_bound_holds(profile: Profile, network: Network, strategy: str) -> None:
    result = predicted(profile, network, strategy)
    parts = result.breakdown
    total = parts.latency_s + parts.bandwidth_s + parts.waiting_s + parts.stragglers_s + parts.buffers_s
    assert total == pytest.approx(result.exposed_s, rel=1e-6, abs=1e-9)
    assert result.iteration_s >= result.bound_s * (1 - 1e-9)
    assert result.iteration_s >= result.single_s - 1e-12


@settings(max_examples=200)
@given(profiles(most=10), networks(), st.data())
def test_no_plan_beats_the_bound(profile: Profile, network: Network, data: st.DataObject) -> None:
    """Any bucketing, in any launch order, on up to three communicators."""
    names = [gradient.name for gradient in profile.gradients]
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    buckets = [[name for name, label in zip(names, labels, strict=True) if label == wanted] for wanted in set(labels)]
    buckets = data.draw(st.permutations(buckets))
    plan = bb.Plan.from_buckets(profile, buckets, communicators=data.draw(st.integers(1, 3)))
    result = predicted(profile, network, plan)
    assert result.iteration_s >= result.bound_s * (1 - 1e-9)


def test_one_worker_communicates_nothing() -> None:
    result = predicted(TWO, NETWORK.at(workers=1), "ddp")
    assert result.iteration_s == result.single_s
    assert result.scaling_factor == 1


def test_notes_say_what_is_extrapolated_or_left_out() -> None:
    plan = planned(TWO, NETWORK, "wfbp")
    assert predicted(TWO, NETWORK, plan).notes == ()
    moved = predicted(TWO, NETWORK.at(workers=64), plan)
    assert moved.extrapolated
    assert any("extrapolated from 8" in note for note in worded(moved.notes))
    assert any("made for 8 workers, this is 64" in note for note in worded(moved.notes))
    small = curve([(1024, 1e-4), (2048, 2e-4)])
    assert any("largest message measured" in note for note in worded(predicted(TWO, small, plan).notes))
    jittery = replace(NETWORK, notes=("jitter over 20%",))
    assert "network affine: jitter over 20%" in worded(predicted(TWO, jittery, plan).notes)
    part = bb.Plan.from_buckets(TWO, [["g1"]])
    result = predicted(TWO, NETWORK, part)
    assert result.buckets == 2
    assert any("g0" in note for note in worded(result.notes))


def test_the_knee_is_where_added_workers_stop_paying() -> None:
    profile = make_profile([10**5] * 20, np.linspace(1e-3, 20e-3, 20).tolist())
    ring = affine(1e-3, 1e-10, topology=Topology(algorithm="ring"))
    points = [predicted(profile, ring.at(workers=n), "single") for n in (2, 4, 8, 16, 32, 64, 128, 256, 512)]
    bend = knee(points)
    assert bend is not None
    found = next(point for point in points if point.workers == bend)
    after = next(point for point in points if point.workers > bend)
    added = (after.samples_per_s - found.samples_per_s) / (after.workers - found.workers)
    assert added < 0.5 / after.single_s
    assert knee([predicted(TWO, affine(0, 0), "single")]) is None


def test_batches_between_two_that_were_measured() -> None:
    small = make_profile([100, 100], [1e-3, 2e-3], forward=1e-3)
    large = replace(make_profile([100, 100], [4e-3, 8e-3], forward=4e-3), batch_size=4)
    middle = at_batch(join(small, large), 2)
    assert middle.batch_size == 2
    assert middle.forward_s == pytest.approx(2e-3)
    assert middle.ready.tolist() == pytest.approx([2e-3, 4e-3])
    assert any("extrapolated" in note for note in at_batch(join(small, large), 16).notes)


def test_iteration_times_are_of_all_micro_batches_measured() -> None:
    times = tuple(np.random.default_rng(3).gamma(20, 1e-3, 60).tolist())
    one = replace(TWO, iteration_s=times)
    four = replace(one, accumulation=4)
    waits = {k: predicted(one, NETWORK, "wfbp", accumulation=k).breakdown.stragglers_s for k in (1, 4)}
    assert predicted(four, NETWORK, "wfbp").breakdown.stragglers_s == pytest.approx(waits[1])
    assert waits[4] == pytest.approx(2 * waits[1])
    fewer = predicted(four, NETWORK, "wfbp", accumulation=1).breakdown.stragglers_s
    assert fewer == pytest.approx(waits[1] / 2)


def test_a_profile_that_computes_nothing_has_its_knee_at_the_start() -> None:
    nothing = replace(make_profile([100], [0.0]), update_s=0.0)
    found = knee([predicted(nothing, affine(1e-3, 1e-9).at(workers=n), "single") for n in (4, 8)])
    assert found == 1


def test_the_knee_is_counted_from_one_worker() -> None:
    profile, network = bb.Profile.load("llama-1b-b4-bf16-h200"), bb.Network.load("100gbe")
    points = [predicted(profile, network.at(workers=n), "ddp") for n in (8, 16, 32)]
    assert points[0].workers * points[0].scaling_factor < 1
    assert knee(points) == knee(points[:1]) == 1
    assert knee([predicted(profile, network.at(workers=1), "ddp"), *points]) == 1


def test_a_plan_of_another_model_is_refused_whatever_it_holds() -> None:
    blocks = bb.Profile.load("resnet152-b256-bf16-h200")
    network = bb.Network.load("1gbe").at(workers=4)
    plan = planned(blocks, network, "compressed", density=0.01, memory_bytes=30 * 10**9)
    assert plan.memory is not None
    assert plan.compressed
    with pytest.raises(bb.InputError, match=r"does not have.*made for 'resnet152'"):
        predicted(bb.Profile.load("bert-base-b32-bf16-h200"), network, plan)


def test_one_worker_is_not_extrapolated() -> None:
    result = predicted(TWO, NETWORK.at(workers=1), "single")
    assert not result.extrapolated
    assert result.iteration_s == result.single_s


def test_one_worker_computes_and_refuses_a_plan_that_is_not_its_own() -> None:
    result = predicted(TWO, NETWORK.at(workers=1), "single", accumulation=2)
    assert {span.lane for span in result.timeline} == {"compute"}
    assert result.timeline[-1].end_s == pytest.approx(result.iteration_s)
    other = planned(make_profile([1, 1, 1], [0.0, 0.0, 0.0]), NETWORK, "single")
    with pytest.raises(bb.InputError, match="does not have"):
        predicted(TWO, NETWORK.at(workers=1), other)


def test_a_network_without_a_band_gives_none() -> None:
    assert predicted(TWO, NETWORK, "ddp").network_band is None
    assert predicted(TWO, NETWORK, "ddp").on_busy == predicted(TWO, NETWORK, "ddp")


@given(profiles(), st.sampled_from([1.0, 1.5, 4.0]), st.sampled_from([1.0, 0.8, 0.2]))
def test_the_band_of_a_network_reaches_the_prediction(profile: Profile, quiet: float, busy: float) -> None:
    network = affine(1e-4, 1e-9, band=LoadBand(quiet=quiet, busy=busy))
    found = predicted(profile, network, "ddp")
    if quiet == busy:
        assert found.network_band is None
        return
    band = found.network_band
    assert band is not None
    assert band.quiet_s <= found.iteration_s <= band.busy_s
    assert band.busy_scaling_factor == pytest.approx(found.single_s / band.busy_s)
    there = predicted(profile, network.at(workers=8, load="busy"), "ddp")
    assert there.network_band is None
    assert there.iteration_s == pytest.approx(band.busy_s)
    on_busy = found.on_busy
    assert on_busy.samples_per_s == pytest.approx(there.samples_per_s)
    assert on_busy.exposed_s == pytest.approx(there.exposed_s)


def test_a_step_may_lie_beyond_the_band_and_further_where_compute_is_computed() -> None:
    network = affine(1e-4, 1e-9, band=LoadBand(quiet=1.5, busy=0.5))
    for origin, margin in (("measured", 0.05), ("analytic", 0.15)):
        band = predicted(replace(TWO, source=Source(method=origin)), network, "ddp").network_band
        assert band is not None
        assert band.shortest_s == pytest.approx(band.quiet_s * (1 - margin))
        assert band.longest_s == pytest.approx(band.busy_s * (1 + margin))


def test_a_fabric_gives_a_band_between_nodes_alone() -> None:
    topology = Topology(
        algorithm="hierarchical",
        gpus_per_node=8,
        inside=CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-11),
        fabric=Fabric(kind="cloud"),
    )
    network = affine(1e-4, 1e-9, workers=16, topology=topology)
    assert predicted(TWO, network.at(workers=8), "single").network_band is None
    few, many = (predicted(TWO, network.at(workers=n), "single").network_band for n in (16, 512))
    assert few is not None
    assert many is not None
    assert many.busy_s / many.quiet_s > few.busy_s / few.quiet_s


def test_notes_say_what_lies_between_rows_and_what_beyond() -> None:
    row = WorkersRow(workers=64, all_reduce=CollectiveTimes(points=((2**10, 1e-3), (2**20, 3e-3))))
    network = affine(1e-3, 1e-9, rows=(row,))
    exact, between, beyond = (predicted(TWO, network.at(workers=n), "single") for n in (64, 16, 128))
    assert not any("workers" in note for note in worded(exact.notes))
    assert any("lie between those at 8 and 64" in note for note in worded(between.notes))
    assert any("extrapolated from 64" in note for note in worded(beyond.notes))
    assert beyond.extrapolated
    assert any("largest message measured" in note for note in worded(exact.notes))


def test_what_a_memory_plan_does_not_keep_is_a_loss_and_may_limit_a_job() -> None:
    profile, network = Profile.load("resnet50-b128-bf16-h200"), Network.load("nvlink-ib400").at(workers=8)
    kept = predicted(profile, network, "optimal")
    small = predicted(profile, network, planned(profile, network, "optimal", memory_bytes=3 * 10**9))
    assert (kept.bottleneck, small.bottleneck) == ("compute", "memory")
    assert small.scaling_factor == pytest.approx(kept.single_s / small.iteration_s)
    assert small.exposed_s < 0.02 * (small.single_s - kept.single_s)
    assert any("not kept of activations costs 11.1 ms" in note for note in worded(small.notes))
    assert not any("not kept" in note for note in worded(kept.notes))


@pytest.mark.parametrize("way", ["ddp", "wfbp", "horovod", "compressed", "fsdp", "hsdp:8"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_edges_of_a_band_are_what_is_predicted_there(way: str, accumulation: int) -> None:
    profile = bb.Profile.load("bert-base-b64-bf16-adamw-h200")
    network = bb.Network.load("aws-p5en").at(workers=64)
    choices = {"communicators": 2} if way == "wfbp" else {}
    plan = planned(profile, network, way, **choices)
    found = predicted(profile, network, plan, accumulation=accumulation)
    assert found.network_band is not None
    for load, seconds, edge in (("quiet", found.network_band.quiet_s, min), ("busy", found.network_band.busy_s, max)):
        there = predicted(profile, network.at(workers=64, load=load), plan, accumulation=accumulation)
        assert seconds == pytest.approx(edge(there.iteration_s, found.iteration_s), rel=1e-9)


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_the_edges_of_a_frameworks_band_are_what_is_predicted_there(framework: str) -> None:
    profile = bb.Profile.load("bert-base-b64-bf16-adamw-h200")
    network = bb.Network.load("aws-p5en").at(workers=64)
    found = predicted(profile, network, framework=framework)
    assert found.network_band is not None
    busy = predicted(profile, network.at(workers=64, load="busy"), framework=framework)
    assert found.network_band.busy_s == pytest.approx(busy.iteration_s, rel=1e-9)


@settings(max_examples=40)
@given(
    profiles(most=12),
    networks(),
    st.sampled_from(["ddp", "wfbp", "asc-wfbp", "fsdp", "hsdp:4"]),
    st.sampled_from([None, 1.3]),
)
def test_the_gap_by_cause_adds_up(profile: Profile, network: Network, strategy: str, slowdown: float | None) -> None:
    if slowdown is not None:
        network = replace(network, slowdown=Slowdown(matmul=slowdown))
    plan = planned(profile, network, strategy)
    found, plain = (predict(profile, network, plan, gap_parts=asked) for asked in (True, False))
    assert plain.gap_parts is None
    assert replace(found, gap_parts=None) == plain
    parts = msgspec.structs.astuple(found.gap_parts)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.iteration_s - found.bound_s, abs=1e-9)
    if slowdown is None:
        assert found.gap_parts.contention_s == pytest.approx(0.0, abs=1e-12)


def test_the_gap_is_told_by_cause() -> None:
    """Three messages of 1 ms latency and 1 ms on the link, ready together: 6 ms on one communicator. As many
    communicators as messages take 1 + 3 ms; a single message takes 1 + 3 ms, and nothing is faster."""
    profile = make_profile([10**6] * 3, [0.0] * 3, backward=0.0)
    network = affine(1e-3, 1e-9)
    found = predict(profile, network, planned(profile, network, "wfbp"), gap_parts=True)
    assert found.iteration_s - found.bound_s == pytest.approx(2e-3)
    assert found.gap_parts.communicators_s == pytest.approx(2e-3)
    assert found.gap_parts.plan_s == pytest.approx(0.0, abs=1e-9)


def test_computation_slowed_down_is_contention() -> None:
    """Backward of 4 s, messages of 1 s at 1 and 2 s: computation loses half of the 2 s that they take."""
    profile = make_profile([1, 1], [1.0, 2.0], backward=4.0)
    network = replace(affine(1.0, 0.0), slowdown=Slowdown(matmul=2.0))
    found = predict(profile, network, planned(profile, network, "wfbp"), gap_parts=True)
    assert found.gap_parts.contention_s == pytest.approx(found.iteration_s - found.bound_s)
