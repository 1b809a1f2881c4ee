"""Moving a calibration to another number of workers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.cost import Curve
from backbeat.cost.collectives import Collective, bus_bandwidth, seconds, steps, traffic
from backbeat.cost.curve import beside_traffic, stretched
from backbeat.cost.protocols import with_own_share
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.files import decode, encode
from backbeat.model.network_rows import WorkersRow
from tests.problems import affine, curve, networks

SIZES = np.array([0, 1, 7, 1024, 2**20, 10**8], dtype=float)
POINTS = [(1024, 1e-4), (65536, 2e-4), (2**20, 1.6e-3), (2**24, 2.5e-2), (2**26, 0.1)]


@pytest.mark.parametrize(("old", "new"), [(8, 16), (8, 4), (4, 2048), (2, 3)])
def test_a_ring_grows_by_hops_and_traffic(old: int, new: int) -> None:
    there = affine(1e-3, 1e-9, workers=old, topology=Topology(algorithm="ring")).at(workers=new)
    latency = 1e-3 * (new - 1) / (old - 1)
    slope = 1e-9 * ((new - 1) / new) / ((old - 1) / old)
    assert there.cost.time(SIZES) == pytest.approx(latency + slope * SIZES)
    assert there.workers == new


def test_a_tree_grows_with_the_logarithm() -> None:
    there = affine(1e-3, 1e-9, workers=4, topology=Topology(algorithm="tree")).at(workers=64)
    assert there.cost.time(SIZES) == pytest.approx(3e-3 + 1e-9 * SIZES)


def test_halving_doubling_has_a_trees_latency_and_a_rings_traffic() -> None:
    there = affine(1e-3, 1e-9, workers=4, topology=Topology(algorithm="halving-doubling")).at(workers=64)
    assert there.cost.time(SIZES) == pytest.approx(3e-3 + 1e-9 * (63 / 64) / (3 / 4) * SIZES)


@pytest.mark.parametrize("base", [affine(1e-3, 1e-9), curve(POINTS)])
@pytest.mark.parametrize("workers", [4, 16, 64, 2048])
def test_auto_takes_the_cheaper_at_every_size(base: Network, workers: int) -> None:
    there = base.at(workers=workers).cost
    sizes = SIZES[3:]  # below the first measured point a curve is flat, before and after moving
    latency, work = base.cost.isolated.latency(sizes), base.cost.isolated.transfer(sizes)
    ring = latency * (workers - 1) / 7 + work * ((workers - 1) / workers) / (7 / 8)
    tree = latency * np.log2(workers) / 3 + work * 8 / 7
    assert there.time(sizes) == pytest.approx(np.minimum(ring, tree), rel=2e-3)


@pytest.mark.parametrize("workers", [16, 64, 2048])
def test_between_measured_sizes_auto_changes_algorithm_where_the_two_cross(workers: int) -> None:
    base = curve(POINTS)
    known = base.cost.isolated.sizes
    latency, work = base.cost.isolated.latency(known), base.cost.isolated.transfer(known)
    ring = latency * (workers - 1) / 7 + work * ((workers - 1) / workers) / (7 / 8)
    tree = latency * np.log2(workers) / 3 + work * 8 / 7
    sizes = np.geomspace(known[0], known[-1], 200)
    cheaper = np.minimum(np.interp(sizes, known, ring), np.interp(sizes, known, tree))
    assert base.at(workers=workers).cost.time(sizes) == pytest.approx(cheaper, rel=1e-6)


def test_a_cluster_of_nodes_scales_only_what_crosses_them() -> None:
    inside = CollectiveTimes(alpha_s=2e-5, beta_s_per_byte=5e-12)
    base = affine(5e-5, 1e-10, workers=16, topology=Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside))
    four_nodes = base.at(workers=32).cost
    size = 10**8
    across = (2e-5 + 5e-12 * size, 3e-5 * 3 + 9.5e-11 * size * 1.5, 3e-5 * 2 + 9.5e-11 * size * 2)
    assert float(four_nodes.time(size)) == pytest.approx(across[0] + min(across[1:]), rel=1e-3)
    assert float(base.at(workers=8).cost.time(size)) == pytest.approx(2e-5 + 5e-12 * size)
    # Three hops of seven would be 8.6 us; NCCL's own latency and six steps are 10.2.
    assert float(base.at(workers=4).cost.time(size)) == pytest.approx(10.2e-6 + 5e-12 * 0.75 / 0.875 * size)


def test_gathers_among_nodes_of_several_gpus_are_rings() -> None:
    inside = CollectiveTimes(alpha_s=2e-5, beta_s_per_byte=5e-12)
    topology = Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside)
    gathers = CollectiveTimes(alpha_s=4e-5, beta_s_per_byte=1e-10)
    base = replace(affine(5e-5, 1e-10, workers=64, topology=topology), all_gather=gathers)
    there = base.at(workers=2048).all_gather
    assert there is not None
    assert float(there.curve.time(1)) == pytest.approx(4e-5 * 2047 / 63, rel=1e-3)


def test_a_node_joined_by_a_network_pays_both() -> None:
    node = affine(2e-5, 5e-12, workers=8, topology=Topology(gpus_per_node=8))
    between = affine(3e-5, 1e-10, workers=4)
    joined = node.joined_by(between)
    size = 10**8
    assert joined.workers == 32
    assert float(joined.cost.time(size)) == pytest.approx(5e-5 + 1.05e-10 * size, rel=1e-6)
    assert float(joined.at(workers=8).cost.time(size)) == pytest.approx(float(node.cost.time(size)))
    assert float(joined.at(workers=16).cost.time(size)) < float(joined.cost.time(size))
    with pytest.raises(InputError, match="leave --across out"):
        between.joined_by(node)
    with pytest.raises(InputError, match="what joins nodes"):
        node.joined_by(node)
    with pytest.raises(InputError, match="nodes of 8 GPUs of its own"):
        node.joined_by(Network.load("aws-p5"))
    four = node.joined_by(between, links=4)
    assert float(four.cost.time(size)) == pytest.approx(5e-5 + (5e-12 + 1e-10 / 4) * size, rel=1e-6)


def test_where_inside_and_across_overlap_the_slower_sets_the_pace() -> None:
    inside = CollectiveTimes(alpha_s=2e-5, beta_s_per_byte=5e-12)
    topology = Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside, pipelined=True)
    base = affine(5e-5, 8e-12, workers=16, topology=topology)
    size = 10**9
    ring = 2e-5 + 3 * 3e-5 + 8e-12 * 1.5 * size
    assert float(base.at(workers=32).cost.time(size)) == pytest.approx(ring, rel=1e-3)
    assert float(base.at(workers=32).cost.time(size)) > float(inside.curve.time(size))


def test_switches_that_reduce_take_as_long_on_any_number_of_nodes() -> None:
    base = affine(1e-4, 1e-10, workers=4, topology=Topology(algorithm="sharp"))
    assert base.at(workers=256).cost.time(SIZES) == pytest.approx(base.cost.time(SIZES))
    assert steps("all_reduce", "sharp", 64) == 1
    assert traffic("all_reduce", "nvls", 8) == 9 / 8
    assert traffic("all_gather", "nvls", 8) == traffic("all_gather", "ring", 8)
    nvls = affine(1e-5, 9 / 8 * 1e-11, workers=8, topology=Topology(algorithm="nvls", gpus_per_node=8))
    assert nvls.at(workers=4).all_reduce.beta_s_per_byte == pytest.approx(5 / 4 * 1e-11)


@given(networks(), st.integers(2, 5000), st.integers(2, 5000))
def test_the_way_does_not_matter_only_the_calibration(network: Network, one: int, two: int) -> None:
    assert network.at(workers=one).at(workers=two) == network.at(workers=two)
    assert network.at(workers=one).at(workers=network.workers) == network


@given(networks(), st.sampled_from([2, 4, 16, 256, 100_000]))
def test_moved_networks_are_sound(network: Network, workers: int) -> None:
    there = network.at(workers=workers)
    times = there.cost.time(np.geomspace(1, 1e9, 60))
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= -1e-12).all()


def test_contention_is_carried_along() -> None:
    rows = tuple(
        ConcurrencyPoint(bytes=2**22, messages=2, communicators=k, seconds=s) for k, s in ((1, 0.0125), (2, 0.009))
    )
    base = curve(POINTS, concurrency=rows)
    there = base.at(workers=128)
    assert there.cost.efficiency(2) == pytest.approx(base.cost.efficiency(2), rel=1e-2)
    assert there.cost.busy is not None
    ratio = base.cost.busy_time(2**22) / base.cost.time(2**22)
    assert there.cost.busy_time(2**22) / there.cost.time(2**22) == pytest.approx(ratio, rel=1e-2)


def test_one_worker_sends_nothing_and_teaches_nothing() -> None:
    assert affine(1e-3, 1e-9).at(workers=1).cost.time(SIZES).tolist() == [0.0] * len(SIZES)
    with pytest.raises(bb.InputError, match="calibrate with 2 workers or more"):
        affine(0.0, 0.0, workers=1).at(workers=4)
    with pytest.raises(bb.InputError, match="at least one worker"):
        affine(1e-3, 1e-9).at(workers=0)


def test_closed_forms() -> None:
    link = {"hop_s": 1e-6, "bits_per_s": 8e9}
    assert seconds("all_reduce", "ring", 4, 1e9, **link) == pytest.approx(6e-6 + 1.5)
    assert seconds("all_reduce", "tree", 4, 1e9, **link) == pytest.approx(4e-6 + 2.0)
    assert seconds("all_gather", "ring", 4, 1e9, **link) == pytest.approx(3e-6 + 0.75)
    assert seconds("reduce_scatter", "halving-doubling", 4, 1e9, **link) == pytest.approx(2e-6 + 0.75)
    assert seconds("broadcast", "tree", 4, 1e9, **link) == pytest.approx(2e-6 + 1.0)
    assert seconds("all_reduce", "ring", 1, 1e9, **link) == 0
    assert bus_bandwidth("all_reduce", 8, 1e9, 1.75) == pytest.approx(8e9)


def test_rows_of_a_cost_that_is_zero_are_kept() -> None:
    rows = tuple(ConcurrencyPoint(bytes=1000, messages=4, communicators=k, seconds=0.0) for k in (1, 2))
    assert affine(0.0, 0.0, concurrency=rows).at(workers=64).concurrency == rows
    partly = curve([(2000, 0.0), (2**20, 1e-3), (2**22, 4e-3)], concurrency=(*rows, row_at(2**20)))
    assert partly.at(workers=64).cost.busy is not None


def row_at(size: int) -> ConcurrencyPoint:
    return ConcurrencyPoint(bytes=size, messages=4, communicators=1, seconds=5e-3)


def test_a_number_of_workers_nobody_has_is_refused() -> None:
    with pytest.raises(bb.InputError, match="choose fewer"):
        affine(1e-3, 1e-9).at(workers=10**400)


def test_a_crossing_beyond_any_message_is_left_out() -> None:
    there = affine(1.0, 1e-13).at(workers=10**6)
    assert there.all_reduce.points is None
    assert float(there.cost.time(2**30)) == pytest.approx(np.log2(10**6) / 3, rel=0.01)


def test_a_collective_inside_a_node_is_its_part_of_the_all_reduce_there() -> None:
    inside = CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-11)
    node = Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside)
    rings, switches = (replace(node, inside_algorithm=shape) for shape in ("ring", "nvls"))
    whole = rings.inner("all_reduce")
    assert whole is not None
    assert whole.line == inside.curve.line
    assert Topology(gpus_per_node=8, inside=inside).inner("all_gather") is None
    for layout, latency, work in ((rings, 1 / 2, 1 / 2), (switches, 1 / 2, 7 / 9)):
        found = layout.inner("all_gather")
        assert found is not None
        for size in (0.0, 1e6, 1e9):
            assert found.at(size) == pytest.approx(latency * 1e-5 + work * 1e-11 * size)
            # Moved to a full node it is that; to half of one 3/4 of the bytes for 7/8, NCCL's own latency, and what
            # each GPU copies of its own share.
            assert layout.moved(found, "all_gather", 64, 8).at(size) == pytest.approx(found.at(size))
    half = rings.moved(inside.curve, "all_gather", 64, 4)
    own = with_own_share(4) / with_own_share(8)
    assert half.at(1e9) == pytest.approx(min(8.4e-6, 1e-5 / 2) + 6 / 7 * 1e-2 / 2 * own)
    alone = replace(node, gpus_per_node=1).inner("all_gather")
    assert alone is not None
    assert alone.at(1e9) == 0


def test_slower_links_leave_latencies_and_busy_ones_only_the_smallest_messages() -> None:
    measured = curve(POINTS).all_reduce.curve
    sizes = np.array([size for size, _ in POINTS], dtype=float)
    slower, crowd = stretched(measured, transfer=3.0), beside_traffic(measured, 3.0)
    assert slower.time(sizes) == pytest.approx(measured.latency(sizes) + 3 * measured.transfer(sizes))
    assert crowd.time(sizes) == pytest.approx(1e-4 + 3 * (measured.time(sizes) - 1e-4))
    for found in (slower, crowd):
        assert found.link_s_per_byte == pytest.approx(3 * measured.link_s_per_byte)
    assert beside_traffic(Curve.affine(1e-4, 1e-9), 3.0).line == pytest.approx((1e-4, 3e-9))


def test_fewer_gpus_of_a_node_take_what_was_measured_of_the_same_collective() -> None:
    cluster = Network.load("aws-p5")
    gathers = [cluster.at(workers=workers).all_gather for workers in (2, 4, 8)]
    size = float(2**32)
    rates = [
        traffic("all_gather", "ring", workers) * size * with_own_share(workers) / one.curve.at(size)
        for workers, one in zip((2, 4, 8), gathers, strict=True)
        if one is not None
    ]
    assert rates == pytest.approx([rates[-1]] * 3, rel=0.02)


def test_two_gpus_of_a_node_with_nvls_take_the_ring() -> None:
    cluster = Network.load("aws-p5")
    two, eight = (cluster.at(workers=workers).all_reduce.curve.at(float(2**32)) for workers in (2, 8))
    # NVLS sends 1 + 1/N bytes a byte at 309 GB/s, a ring 2(N - 1)/N at 370.
    assert two / eight == pytest.approx((1 / 370) / ((9 / 8) / 309), rel=0.02)


@given(networks(), st.sampled_from([2, 16, 64, 512, 2048]), st.sampled_from(["ring", "tree", "halving-doubling"]))
def test_a_moved_curve_keeps_the_slope_of_its_links_in_a_file_too(network: Network, new: int, algorithm: str) -> None:
    there = replace(network, topology=Topology(algorithm=algorithm)).at(workers=new)  # type: ignore[arg-type]
    grown = traffic("all_reduce", algorithm, new) / traffic("all_reduce", algorithm, network.workers)  # type: ignore[arg-type]
    wanted = network.all_reduce.curve.link_s_per_byte * grown
    assert there.all_reduce.curve.link_s_per_byte == pytest.approx(wanted)
    assert decode(encode(there), Network, where="a file").all_reduce.curve.link_s_per_byte == pytest.approx(wanted)


def test_messages_beyond_the_curve_take_no_less_on_more_workers() -> None:
    points = [(4096, 2e-5), (65536, 3e-5), (262144, 6e-5), (2**20, 3e-4), (2**22, 7e-4), (2**24, 1.2e-3), (2**26, 4e-3)]
    network = curve(points, workers=8, topology=Topology(algorithm="ring"))
    times = [network.at(workers=workers).cost.time(2.0**32) for workers in (8, 16, 64, 256, 2048)]
    assert times == sorted(times)


def test_a_few_gpus_of_a_large_nvlink_domain_wait_for_a_few() -> None:
    small, large = Network.load("dgx-b200").at(workers=8), Network.load("gb200-nvl72").at(workers=8)
    assert large.cost.time(8.0) == pytest.approx(small.cost.time(8.0), rel=0.5)
    assert large.all_gather is not None
    assert small.all_gather is not None
    assert large.all_gather.curve.at(8.0) == pytest.approx(small.all_gather.curve.at(8.0), rel=0.05)


HOP_S, LINK_S_PER_BYTE = 5e-6, 1e-11


def measured(collective: Collective, workers: int, largest: int, *, slower: float = 1.0) -> CollectiveTimes:
    """Points of a ring, up to the largest message."""
    hops, bytes_each = steps(collective, "ring", workers), traffic(collective, "ring", workers)
    sizes = [2**power for power in range(10, 31, 2) if 2**power <= largest]
    return CollectiveTimes(
        points=tuple((size, hops * HOP_S + bytes_each * size * LINK_S_PER_BYTE * slower) for size in sizes)
    )


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_larger_gathers_correct_an_all_reduce_alike_on_any_number_of_workers(
    algorithm: Literal["ring", "auto"],
) -> None:
    """All-reduces were measured up to 16 MiB, which buffers take in at twice the link's speed."""

    def row(workers: int) -> dict[str, CollectiveTimes]:
        halves = {name: measured(name, workers, 2**28) for name in ("all_gather", "reduce_scatter")}  # type: ignore[arg-type]
        return {"all_reduce": measured("all_reduce", workers, 2**24, slower=0.5), **halves}

    network = Network(
        name="x",
        workers=16,
        backend="nccl",
        topology=Topology(algorithm=algorithm),
        rows=(WorkersRow(workers=64, **row(64)),),
        **row(16),
    )
    times = [float(network.at(workers=workers).cost.time(2.0**32)) for workers in (15, 16, 17, 63, 64, 65)]
    assert times == sorted(times)
    assert times[-1] < times[0] * 1.1
    assert times[1] == pytest.approx(2 * 15 / 16 * 2**32 * LINK_S_PER_BYTE, rel=0.01)


def test_smaller_gathers_do_not_correct_an_all_reduce() -> None:
    halves = {name: measured(name, 16, 2**26, slower=1.5) for name in ("all_gather", "reduce_scatter")}  # type: ignore[arg-type]
    network = Network(
        name="x",
        workers=16,
        backend="nccl",
        topology=Topology(algorithm="ring"),
        all_reduce=measured("all_reduce", 16, 2**30),
        rows=(WorkersRow(workers=64, all_reduce=measured("all_reduce", 64, 2**30)),),
        **halves,
    )
    times = [float(network.at(workers=workers).cost.time(2.0**32)) for workers in (16, 17, 64, 65)]
    assert times == pytest.approx([2 * (n - 1) / n * 2**32 * LINK_S_PER_BYTE for n in (16, 17, 64, 65)], rel=0.01)


def test_a_moved_curve_has_no_points_that_its_slope_says_already() -> None:
    points = [
        (4096, 3e-5),
        (65536, 5e-5),
        (2**18, 9e-5),
        (2**20, 2e-4),
        (2**22, 5e-4),
        (2**24, 1.4e-3),
        (2**26, 4.6e-3),
    ]
    network = curve(points, workers=8, topology=Topology(algorithm="ring"))
    there = network.at(workers=9)
    assert there.all_reduce.points is not None
    assert [size for size, _ in there.all_reduce.points] == [size for size, _ in points]
    # More traffic, more seconds a byte, also of the line that merging by the published rules goes by.
    assert there.cost.isolated.line[1] > network.cost.isolated.line[1]


def test_few_gpus_of_a_measured_domain_do_not_beat_the_latency_of_nccl() -> None:
    inside = CollectiveTimes(points=tuple((2**power, 25e-6 + 2.3e-12 * 2**power) for power in range(10, 33, 3)))
    gather = CollectiveTimes(points=tuple((2**power, 50e-6 + 1.5e-12 * 2**power) for power in range(10, 33, 3)))
    domain = Topology(algorithm="hierarchical", gpus_per_node=72, inside=inside, inside_algorithm="nvls")
    network = Network(name="x", workers=72, all_reduce=inside, all_gather=gather, topology=domain)
    for workers in (2, 4, 8):
        there = network.at(workers=workers)
        assert there.all_gather is not None
        assert 6.6e-6 < there.all_gather.curve.at(1024.0) < 12e-6
        assert 6.6e-6 < there.cost.time(1024.0) < 16e-6


def cluster_of_16(**rows: Any) -> Network:
    """All-reduces up to 16 MiB that buffers take in at twice the link's speed, and larger gathers."""
    halves = {name: measured(name, 16, 2**28) for name in ("all_gather", "reduce_scatter")}  # type: ignore[arg-type]
    all_reduce = measured("all_reduce", 16, 2**24, slower=0.5)
    ring = Topology(algorithm="ring")
    return Network(name="x", workers=16, backend="nccl", topology=ring, all_reduce=all_reduce, **halves, **rows)


def test_rows_without_gathers_are_corrected_by_those_of_others() -> None:
    network = cluster_of_16(rows=(WorkersRow(workers=64, all_reduce=measured("all_reduce", 64, 2**24, slower=0.5)),))
    times = [float(network.at(workers=workers).cost.time(2.0**32)) for workers in (16, 32, 64, 128)]
    assert times == pytest.approx([2 * (n - 1) / n * 2**32 * LINK_S_PER_BYTE for n in (16, 32, 64, 128)], rel=0.02)


def test_what_joins_nodes_is_corrected_as_it_is_alone() -> None:
    inside = CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-12)
    node = Network(name="node", workers=8, all_reduce=inside, topology=Topology(gpus_per_node=8))
    across = cluster_of_16()
    alone, joined = across.cost.time(2.0**32), node.joined_by(across).cost.time(2.0**32)
    assert joined == pytest.approx(alone + inside.curve.time(2.0**32), rel=0.01)
