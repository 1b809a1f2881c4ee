"""What encoded groups cost."""

from __future__ import annotations

import msgspec
import pytest

import backbeat as bb
from backbeat.model import CollectiveTimes, Encoding, Group, Plan
from backbeat.simulate.encoded import Wire, payload_bytes, selection_bytes
from tests.problems import affine, make_profile

TOPK = Encoding(kind="topk", density=0.01)


def two_groups(first: Encoding | None, second: Encoding | None) -> Plan:
    groups = (
        Group(gradients=("g0",), channel=0, encoding=first),
        Group(gradients=("g1",), channel=0, encoding=second),
    )
    return Plan(strategy="custom", model="test", channels=1, groups=groups)


def test_one_percent_of_a_million_elements() -> None:
    # 10,000 values and places of 16 bits, and 16 ends of blocks.
    assert float(payload_bytes(1_000_000, TOPK)) == 10_000 * 6 + 16 * 4
    assert float(payload_bytes(1_000_000, Encoding(kind="topk", density=0.01, values="bf16"))) == 10_000 * 4 + 64
    # So sparse that 16-bit places would need more for their ends than they save.
    assert float(payload_bytes(10_000_000, Encoding(kind="topk", density=1e-6))) == 10 * 8
    assert float(payload_bytes(1_000_000, Encoding(kind="randomk", density=0.01))) == 40_000
    assert float(payload_bytes(1_000_000, Encoding(kind="int8"))) == 1_000_000
    assert float(payload_bytes(1_000_000, Encoding(kind="powersgd", rank=4))) == 4 * 2 * 4 * 1000


def test_a_gather_is_the_measured_one_or_half_an_all_reduce() -> None:
    network = affine(2e-3, 4e-9, workers=4)
    sent = float(payload_bytes(1_000_000, TOPK))
    assert float(Wire.of(network).time(1_000_000, TOPK)) == pytest.approx(1e-3 + 2e-9 * 4 * sent)
    assert Wire.of(network).derived
    measured = msgspec.structs.replace(network, all_gather=CollectiveTimes(alpha_s=5e-3, beta_s_per_byte=1e-9))
    assert float(Wire.of(measured).time(1_000_000, TOPK)) == pytest.approx(5e-3 + 1e-9 * 4 * sent)
    assert not Wire.of(measured).derived


def test_a_tree_swaps_log2_times() -> None:
    network = affine(14e-3, 7e-9, workers=8)
    tree = Encoding(kind="topk", density=0.01, aggregate="tree")
    sent = float(payload_bytes(1_000_000, tree))
    # A ring on 8 has 14 hops and moves 14/8 of the bytes.
    assert float(Wire.of(network).time(1_000_000, tree)) == pytest.approx(3 * (1e-3 + 4e-9 * sent))


def test_encoding_delays_what_comes_after_it() -> None:
    profile = make_profile([4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=1e-8)
    network = affine(2e-3, 0.0)
    # 40 ms each on the compute stream; the first leaves at 0.14, the second at 0.28, for 1 ms.
    result = bb.predict(profile, network, two_groups(TOPK, TOPK))
    spans = [span for span in result.timeline if span.lane == "channel 0"]
    assert [span.start_s for span in spans] == pytest.approx([0.14, 0.28])
    assert result.iteration_s == pytest.approx(0.281)
    assert result.exposed_s == pytest.approx(0.081)
    parts = result.breakdown
    assert parts.startup_s + parts.bandwidth_s + parts.waiting_s == pytest.approx(result.exposed_s)
    # A dense group behind an encoded one is later too, and takes a whole all-reduce.
    assert bb.predict(profile, network, two_groups(TOPK, None)).iteration_s == pytest.approx(0.242)


def test_each_encoded_group_costs_something_by_itself() -> None:
    profile = make_profile(
        [4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=1e-8, compression_s_per_group=5e-3
    )
    result = bb.predict(profile, affine(2e-3, 0.0), two_groups(TOPK, TOPK))
    spans = [span for span in result.timeline if span.lane == "channel 0"]
    assert [span.start_s for span in spans] == pytest.approx([0.145, 0.29])
    assert result.iteration_s == pytest.approx(0.291)


def test_what_the_selection_takes_is_what_it_allocates() -> None:
    exact = Encoding(kind="topk", density=0.01, select="exact")
    # Blocks of 8: candidates of 12 bytes, eight for each that is sent, and what is sent of them.
    assert selection_bytes(1_000_000, exact) == 12 * 8 * 10_000 + 12 * 10_000
    assert selection_bytes(1_000_000, msgspec.structs.replace(exact, select="sampled")) == 2_000_000 + 240_000
    assert selection_bytes(1_000_000, Encoding(kind="randomk", density=0.01)) == 0


def test_without_encodings_it_is_the_recursion() -> None:
    profile = make_profile([4_000_000, 4_000_000], [0.1, 0.2], compression_s_per_byte=0.0)
    network = affine(2e-3, 1e-8)
    dense = bb.predict(profile, network, two_groups(None, None))
    free = bb.predict(profile, network, two_groups(None, Encoding(kind="randomk", density=1.0)))
    assert free.iteration_s == pytest.approx(dense.iteration_s)


def test_what_is_not_measured_is_said() -> None:
    notes = bb.predict(make_profile([4000], [0.1]), affine(1e-3, 1e-9), bb.Plan(
        strategy="custom", model="test", channels=2, groups=(Group(gradients=("g0",), channel=1, encoding=TOPK),)
    )).notes  # fmt: skip
    assert any("compression" in note for note in notes)
    assert any("derived" in note for note in notes)
    assert any("one channel" in note for note in notes)
