"""What compressed buckets cost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.cost.message import message_bytes, selection_bytes
from backbeat.model import Bucket, CollectiveTimes, Compression, Plan
from backbeat.planners.planned import predicted
from backbeat.show.words.notes import worded
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import CompressedCost, Schedule
from tests.problems import affine, make_profile

TOPK = Compression(density=0.01)


def two_groups(first: Compression | None, second: Compression | None) -> Plan:
    buckets = (
        Bucket(gradients=("g0",), communicator=0, compression=first),
        Bucket(gradients=("g1",), communicator=0, compression=second),
    )
    return Plan(strategy="custom", model="test", communicators=1, buckets=buckets)


def test_a_gather_is_the_measured_one_or_half_an_all_reduce() -> None:
    network = affine(2e-3, 4e-9, workers=4)
    sent = float(message_bytes(1_000_000, TOPK.density))
    fp32 = make_profile([4], [0.1])
    assert float(CompressedCost(network, fp32).time(4_000_000, TOPK)) == pytest.approx(1e-3 + 2e-9 * 4 * sent)
    measured = replace(network, all_gather=CollectiveTimes(alpha_s=5e-3, beta_s_per_byte=1e-9))
    assert float(CompressedCost(measured, fp32).time(4_000_000, TOPK)) == pytest.approx(5e-3 + 1e-9 * 4 * sent)


def test_encoding_delays_what_comes_after_it() -> None:
    profile = make_profile([4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=1e-8)
    network = affine(2e-3, 0.0)
    # 40 ms each on the compute stream; the first leaves at 0.14, the second at 0.28, for 1 ms.
    result = predicted(profile, network, two_groups(TOPK, TOPK))
    spans = [span for span in result.timeline if span.lane == "communicator 0"]
    assert [span.start_s for span in spans] == pytest.approx([0.14, 0.28])
    assert result.iteration_s == pytest.approx(0.281)
    assert result.exposed_s == pytest.approx(0.081)
    parts = result.breakdown
    assert parts.latency_s + parts.bandwidth_s + parts.waiting_s == pytest.approx(result.exposed_s)
    # A dense bucket after a compressed one is later too, and takes a whole all-reduce.
    assert predicted(profile, network, two_groups(TOPK, None)).iteration_s == pytest.approx(0.242)


def test_each_compressed_bucket_costs_something_by_itself() -> None:
    profile = make_profile(
        [4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=1e-8, compression_s_per_bucket=5e-3
    )
    result = predicted(profile, affine(2e-3, 0.0), two_groups(TOPK, TOPK))
    spans = [span for span in result.timeline if span.lane == "communicator 0"]
    assert [span.start_s for span in spans] == pytest.approx([0.145, 0.29])
    assert result.iteration_s == pytest.approx(0.291)


def test_what_the_selection_takes_is_what_it_allocates() -> None:
    # Blocks of 8: candidates of 12 bytes, eight for each that is sent, and what is sent of them.
    assert selection_bytes(1_000_000, TOPK.density) == 12 * 8 * 10_000 + 12 * 10_000
    assert selection_bytes(0, TOPK.density) == 0


def test_without_encodings_it_is_the_recursion() -> None:
    profile = make_profile([4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=0.0)
    network = affine(2e-3, 1e-8)
    dense = predicted(profile, network, two_groups(None, None))
    schedule, _ = Schedule.of_plan(profile, two_groups(None, None))
    times = CompressedCost(network, profile).times(schedule.sizes, [None, None])
    flow, _ = BucketTravel(schedule, profile.backward_s, [0.0, 0.0]).on(times)
    assert profile.forward_s + flow.end_s + profile.update_s == pytest.approx(dense.iteration_s)


def test_what_is_not_measured_is_said() -> None:
    plan = bb.Plan(
        strategy="custom", model="test", communicators=2,
        buckets=(Bucket(gradients=("g0",), communicator=1, compression=TOPK),),
    )  # fmt: skip
    profile, network = make_profile([4000], [0.1]), affine(1e-3, 1e-9)
    notes = worded(predicted(profile, network, plan).notes)
    assert any("compression" in note for note in notes)
    assert any("derived" in note for note in notes)
    assert any("one communicator" in note for note in notes)
    measured = replace(network, all_gather=CollectiveTimes(alpha_s=5e-3, beta_s_per_byte=1e-9))
    assert not any("derived" in note for note in worded(predicted(profile, measured, plan).notes))
