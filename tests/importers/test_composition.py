"""One network from several measurements of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from backbeat.cost.collectives import bus_bandwidth
from backbeat.errors import InputError
from backbeat.importers import nccl_tests
from backbeat.importers.bandwidth_table import load_table
from backbeat.importers.composition import compose_networks, read_network
from backbeat.model import Fabric, Network, Topology
from backbeat.model.slowdown import Slowdown
from tests.problems import affine

LONG = """nodes,size,bus_bandwidth,p5,p95,collective
1,256MB,436.0,422.3,461.5,all_reduce
2,256MB,361.7,302.3,436.1,AllReduce
4,256MB,160.1,44.5,219.1,all-reduce
2,256MB,184.6,,,AllGather
"""
WIDE = """collective,size,metric,nodes_1,nodes_2,nodes_4
AllReduce,256MB,mean_or_median_GBps(plotted line),436.0,361.7,160.1
AllReduce,256MB,p95_GBps,461.5,436.1,219.1
AllReduce,256MB,p5_GBps,422.3,302.3,44.5
AllGather,256MB,mean_or_median_GBps(plotted line),,184.6,
"""


def nccl_log(hosts: int, per_host: int, microseconds: float) -> str:
    devices = [
        f"#  Rank {rank:2d} Group  0 Pid {rank} on node{rank // per_host} device {rank % per_host} [0x00] H100"
        for rank in range(hosts * per_host)
    ]
    head = "#       size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong"
    rows = [
        f"{size} {size // 4} float sum -1 {time:.2f} 1.0 1.9 0 {time:.2f} 1.0 1.9 0"
        for size in (2**20, 2**24, 2**28)
        for time in [microseconds * (1 + size / 2**20)]
    ]
    return "\n".join(["# nccl-tests all_reduce_perf", *devices, head, *rows, ""])


def bus(network: Network, workers: int, size: int = 256_000_000) -> float:
    time_s = float(network.at(workers=workers).cost.time(size))
    return bus_bandwidth("all_reduce", workers, size, time_s) / 8e9


def read_table(folder: Path, text: str, gpus_per_node: int) -> Network:
    (folder / "t.csv").write_text(text)
    return load_table(folder / "t.csv", gpus_per_node=gpus_per_node)


@pytest.mark.parametrize("text", [LONG, WIDE])
def test_a_table_gives_its_own_bandwidths_and_its_percentiles_become_the_band(tmp_path: Path, text: str) -> None:
    network = read_table(tmp_path, text, gpus_per_node=8)
    for nodes, published in ((1, 436.0), (2, 361.7), (4, 160.1)):
        assert bus(network, 8 * nodes) == pytest.approx(published)
    four = network.at(workers=32).band
    assert four is not None
    assert (four.quiet, four.busy) == pytest.approx((219.1 / 160.1, 44.5 / 160.1))
    assert network.all_gather is not None
    assert network.at(workers=32).edges is not None
    assert any("other sizes" in note for note in network.notes)
    assert bus(network, 32, 2**24) < 90 < bus(network, 32)


def test_figures_that_are_no_bandwidth_are_left_out_and_repeats_count_by_their_median(tmp_path: Path) -> None:
    text = "metric,size,nodes_2\nstd,256MB,0\nmean,256MB,361.7\np99,256MB,440\nstd_dev,256MB,21\n"
    network = read_table(tmp_path, text, gpus_per_node=8)
    assert bus(network, 16) == pytest.approx(361.7)
    assert any("left out: p99, std, std_dev" in note for note in network.notes)
    repeated = "nodes,size,bus_bandwidth\n2,256MB,300\n2,256MB,310\n2,256MB,20\n"
    assert bus(read_table(tmp_path, repeated, gpus_per_node=8), 16) == pytest.approx(300)
    with pytest.raises(InputError, match="p5 310, p95 350 and a mean of 300 GB/s, which is not between them"):
        read_table(tmp_path, "metric,size,nodes_2\np5,256MB,310\np95,256MB,350\nmean,256MB,300\n", gpus_per_node=8)


@pytest.mark.parametrize("metric", ["Bus bandwidth (GB/s)", "bus_bandwidth", "busbw", "Bandwidth", "avg", "p50"])
def test_the_kind_of_figure_is_read_however_it_is_written(tmp_path: Path, metric: str) -> None:
    network = read_table(tmp_path, f"metric,size,nodes_2\n{metric},256MB,300\n", gpus_per_node=8)
    assert bus(network, 16) == pytest.approx(300)


def test_of_a_mean_and_a_median_the_median_counts(tmp_path: Path) -> None:
    network = read_table(tmp_path, "metric,size,nodes_2\nmean,256MB,300\np50,256MB,200\n", gpus_per_node=8)
    assert bus(network, 16) == pytest.approx(200)
    assert any("the median where" in note for note in network.notes)


def test_a_table_of_other_figures_alone_is_refused_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metric is algbw, time_us throughout: lines of bus bandwidth"):
        read_table(tmp_path, "metric,size,nodes_2\nalgbw,256MB,300\ntime_us,256MB,20\n", gpus_per_node=8)


def test_a_table_with_several_sizes_gives_a_curve(tmp_path: Path) -> None:
    text = "workers,size,bus_bandwidth\n16,1MB,20\n16,16MB,100\n16,256MB,300\n"
    network = read_table(tmp_path, text, gpus_per_node=8)
    assert network.workers == 16
    assert network.band is None
    assert network.notes == ()
    for size, published in ((10**6, 20), (16 * 10**6, 100), (256 * 10**6, 300)):
        assert bus(network, 16, size) == pytest.approx(published)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "columns nodes"),
        ("nodes,size,bus_bandwidth\n1,1MB,3\n", "on two GPUs or more"),
        ("nodes,size,bus_bandwidth\nmany,1MB,3\n", "line 2: nodes is 'many'"),
        ("nodes,size,bus_bandwidth\n2,1MB,fast\n", "not a bus bandwidth"),
        ("nodes,size,bus_bandwidth\n2,1MB,-3\n", "not a bus bandwidth"),
        ("nodes,size,bus_bandwidth\n2,large,3\n", "line 2: 'large' is not a size"),
        ("nodes,size,bus_bandwidth\n2,,3\n", "line 2"),
        ("nodes,size,bus_bandwidth,collective\n2,1MB,3,scan\n", "collective is 'scan'"),
        ("nodes,size,p5\n2,1MB,3\n", "has no bus_bandwidth"),
    ],
)
def test_tables_that_say_too_little_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_table(tmp_path, text, gpus_per_node=1)


def test_logs_of_one_two_and_four_nodes_become_rows(tmp_path: Path) -> None:
    for nodes, microseconds in ((1, 10.0), (2, 20.0), (4, 50.0)):
        (tmp_path / f"{nodes}.txt").write_text(nccl_log(nodes, 8, microseconds))
    network = compose_networks("logs", [read_network(str(tmp_path / f"{nodes}.txt")) for nodes in (4, 1, 2)])
    assert network.workers == 16
    assert [row.workers for row in network.rows] == [8, 32]
    assert network.topology.gpus_per_node == 8
    assert network.topology.inside == network.at(workers=8).all_reduce
    assert float(network.at(workers=32).cost.time(2**28)) == pytest.approx(50e-6 * 257)
    assert "4.txt" in str(network.source)
    beyond = network.at(workers=64)
    assert beyond.moved_from is not None
    assert beyond.moved_from.used == (32,)
    fallen = compose_networks("logs", [network], fabric=Fabric(kind="cloud")).at(workers=64)
    assert float(fallen.cost.time(2**28)) > float(beyond.cost.time(2**28))


def test_gpus_of_a_node_that_are_given_are_not_called_guessed(tmp_path: Path) -> None:
    log = nccl_log(2, 8, 20.0).splitlines()
    (tmp_path / "16.txt").write_text("\n".join(line for line in log if "Rank" not in line))
    imported = nccl_tests.load(tmp_path / "16.txt", workers=16)
    assert nccl_tests.NODES_GUESSED in imported.notes
    assert compose_networks("same", [imported]).notes == imported.notes
    given = compose_networks("given", [imported], gpus_per_node=8)
    assert given.nodes == 2
    assert [note for note in imported.notes if note not in given.notes] == [nccl_tests.NODES_GUESSED]


def test_calibrations_of_one_cluster_are_joined(tmp_path: Path) -> None:
    for workers in (16, 32):
        topology = Topology(gpus_per_node=8, transport="infiniband")
        slowdown = Slowdown(matmul=1.2) if workers == 32 else None
        one = affine(1e-4, workers * 1e-11, workers=workers, topology=topology, slowdown=slowdown, accelerator="h100")
        one.save(tmp_path / f"{workers}.json")
    network = compose_networks("both", [read_network(str(tmp_path / f"{workers}.json")) for workers in (32, 16)])
    assert network.workers == 16
    assert network.at(workers=32).all_reduce.beta_s_per_byte == 32e-11
    assert network.topology.algorithm == "auto"
    assert network.topology.transport == "infiniband"
    assert network.slowdown == Slowdown(matmul=1.2)
    assert network.accelerator == "h100"
    with pytest.raises(InputError, match="both have 16 workers"):
        compose_networks("twice", [network, network.at(workers=64)])


def test_measurements_inside_one_node_alone_are_those_of_most_gpus() -> None:
    few, all_of_them = (affine(1e-5, 1e-11, workers=workers, topology=Topology(gpus_per_node=8)) for workers in (2, 8))
    network = compose_networks("node", [all_of_them, few])
    assert network.workers == 8
    assert [row.workers for row in network.rows] == [2]
    assert network.one_node


def test_a_table_is_read_with_the_nodes_and_latencies_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(LONG)
    near, far = (read_network(str(tmp_path / "t.csv"), gpus_per_node=4, hop_s=hop_s) for hop_s in (1e-6, 1e-4))
    assert (near.workers, near.topology.gpus_per_node) == (8, 4)
    assert float(far.cost.time(8)) > float(near.cost.time(8))


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_network(str(tmp_path / "missing.txt"))
    (tmp_path / "t.csv").write_text(LONG)
    with pytest.raises(InputError, match="--gpus-per-node"):
        read_network(str(tmp_path / "t.csv"))
