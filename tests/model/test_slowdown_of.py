"""Which slowdown holds, and what it does to predictions and plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import ComputeShares, Network, Profile, Slowdown, Topology
from backbeat.model.collective_times import ShardedTimes
from backbeat.model.files import bundled
from backbeat.model.slowdown import CHANNELS, RING_MEMORY, WORK_KINDS, SlowdownCurve, emulated, slowdown_of
from backbeat.planners.planned import planned, predicted
from backbeat.show.words.notes import worded
from tests.problems import affine, make_profile, networks, profiles

BUS = 2 * 7 / 8
shares = st.floats(0, 1).flatmap(
    lambda matmul: st.floats(0, 1 - matmul).map(
        lambda attention: ComputeShares(matmul=matmul, attention=attention, memory=1 - matmul - attention)
    )
)


def on_gpu(device: str = "NVIDIA H200", **fields: object) -> Profile:
    return replace(make_profile([10**7, 10**7], [1e-3, 2e-3]), device=device, **fields)


def on(transport: str | None, bus_gb_s: float = 50.0, **fields: object) -> Network:
    return affine(1e-5, BUS / (bus_gb_s * 1e9), topology=Topology(transport=transport), **fields)  # type: ignore[arg-type]


def test_what_was_measured_on_the_cluster_comes_first() -> None:
    network = on("nvlink", slowdown=Slowdown(matmul=1.5, memory=1.1))
    assert slowdown_of(on_gpu(), network).factor == 1.5
    half = ComputeShares(matmul=0.5, attention=0.0, memory=0.5)
    found = slowdown_of(on_gpu(compute_shares=half), network)
    assert found.factor == pytest.approx(1.3)
    assert "measured on this cluster" in found.origin
    assert slowdown_of(on_gpu("cpu"), network).factor == 1.5


def test_sharded_plans_take_what_was_measured_beside_their_own_collectives() -> None:
    own = ShardedTimes(slowdown=Slowdown(matmul=1.2))
    network = on("nvlink", slowdown=Slowdown(matmul=1.5), sharded=own)
    assert slowdown_of(on_gpu(), network).factor == 1.5
    assert slowdown_of(on_gpu(), network, sharded=True).factor == 1.2
    assert slowdown_of(on_gpu(), on("nvlink", slowdown=Slowdown(matmul=1.5)), sharded=True).factor == 1.5


def test_nothing_slows_down_where_nobody_says_what_carries_messages() -> None:
    assert slowdown_of(on_gpu(), on(None)).factor == 1
    assert slowdown_of(on_gpu("Intel(R) Xeon(R) CPU"), on("nvlink")).factor == 1
    assert slowdown_of(on_gpu(), on("nvlink").at(workers=1)).factor == 1
    for name in ("10gbe", "ib400", "nvlink-ib400"):
        assert slowdown_of(on_gpu(), bb.Network.load(name)).factor == 1


def test_emulated_by_transport() -> None:
    """The rows of the file, where its curve passes near them."""
    rows = {(row.sms, row.bus_bytes_per_s): row for row in emulated().rows}
    for transport, rate in (("infiniband", 50.0), ("efa", 50.0), ("nvlink", 370.0), ("sockets", 3.0)):
        row = rows[CHANNELS[transport].sms, rate * 1e9]
        found = slowdown_of(on_gpu(), on(transport, rate))
        assert found.factor == pytest.approx(row.matmul, abs=0.02)
        assert "emulated on an H200" in found.origin
    # The switch adds up, so that less memory moves for the same bandwidth.
    assert slowdown_of(on_gpu(), on("nvls", 370)).factor < slowdown_of(on_gpu(), on("infiniband", 370)).factor


def test_other_accelerators_by_their_shares_as_an_assumption() -> None:
    found = slowdown_of(on_gpu("NVIDIA A100-SXM4-80GB"), on("nvlink", 200))
    assert found.factor > slowdown_of(on_gpu(), on("nvlink", 200)).factor
    assert "scaled to the A100 by assumption" in found.origin


def test_one_node_of_a_cluster_talks_over_its_switch() -> None:
    network = bb.Network.load("dgx-h100")
    assert "infiniband" in slowdown_of(on_gpu(), network.at(workers=64)).origin
    assert "nvls" in slowdown_of(on_gpu(), network.at(workers=8)).origin


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), shares)
def test_more_taken_never_slows_down_less(one: float, two: float, moved: float, mix: ComputeShares) -> None:
    low, high = sorted((one, two))
    data = emulated()
    assert 1 <= data.slowdown(low, moved).of(mix) <= data.slowdown(high, moved).of(mix) * (1 + 1e-12)
    assert data.slowdown(moved, low).of(mix) <= data.slowdown(moved, high).of(mix) * (1 + 1e-12)


def test_the_course_passes_near_every_row() -> None:
    data = emulated()
    for row in data.rows:
        found = data.slowdown(row.sms / data.sms, RING_MEMORY * row.bus_bytes_per_s / data.memory_bytes_per_s)
        for kind in WORK_KINDS:
            assert getattr(found, kind) == pytest.approx(getattr(row, kind), abs=0.03)


@settings(max_examples=40)
@given(profiles(most=12), networks(), st.sampled_from([1.05, 1.3, 2.0]), st.sampled_from([None, 1, 2, 3]))
def test_best_is_never_slower_than_stock_ddp(
    profile: Profile, network: Network, factor: float, communicators: int | None
) -> None:
    network = replace(network, slowdown=Slowdown(matmul=factor))
    best = predicted(profile, network, "best", communicators=communicators)
    assert best.iteration_s <= predicted(profile, network, "ddp").iteration_s * (1 + 1e-9)


def test_a_prediction_says_what_contention_costs() -> None:
    profile, network = bb.Profile.load("llama-1b-b4-bf16-h200"), bb.Network.load("dgx-h100").at(workers=64)
    found = predicted(profile, network, "ddp")
    topology = replace(network.topology, transport=None)
    alone = predicted(profile, replace(network, topology=topology), "ddp")
    assert found.breakdown.contention_s > 0
    assert found.iteration_s > alone.iteration_s
    assert any("beside communication" in note for note in worded(found.notes))
    assert alone.breakdown.contention_s == 0


@settings(max_examples=40)
@given(profiles(most=30), networks(), st.sampled_from([1.05, 1.3, 2.0]))
def test_buckets_formed_at_run_time_are_those_of_the_plan(profile: Profile, network: Network, factor: float) -> None:
    network = replace(network, slowdown=Slowdown(matmul=factor))
    plan = planned(profile, network, "horovod")
    assert predicted(profile, network, plan).buckets == len(plan.buckets)


def test_a_slowdown_survives_its_file(tmp_path) -> None:
    network = on("efa", slowdown=Slowdown(matmul=1.2, attention=1.1))
    network.save(tmp_path / "network.json")
    assert Network.load(tmp_path / "network.json") == network
    assert network.at(workers=64).slowdown == network.slowdown
    for factor, rule in ((0.9, "1 or more"), (float("nan"), "finite")):
        with pytest.raises(InputError, match=f"matmul is {factor}: it must be .*{rule}"):
            Slowdown(matmul=factor)


def test_every_bundled_transport_is_known() -> None:
    for name in bundled(Network):
        transport = Network.load(name).topology.transport
        assert transport is None or transport in CHANNELS


def test_rows_that_lie_on_one_course_are_met() -> None:
    """1 + 2 x multiprocessors up to a tenth, then 1 x; and 0.5 x memory."""
    shares = np.array([(0.1, 0.1), (0.1, 0.3), (0.2, 0.1), (0.2, 0.5)])
    factors = [1.25, 1.35, 1.35, 1.55]
    course = SlowdownCurve.of(shares, factors)
    assert course.per_memory == pytest.approx(0.5)
    assert [course.at(*share) for share in shares.tolist()] == pytest.approx(factors)
    assert course.at(0.4, 0.0) == pytest.approx(1.5), "beyond the last the line goes on"
