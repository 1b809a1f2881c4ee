"""The bundled clusters that have a fabric."""

from __future__ import annotations

from itertools import pairwise

import pytest

import backbeat as bb
from backbeat.cost.collectives import bus_bandwidth
from backbeat.model.files import bundled

CLUSTERS = [name for name in bundled(bb.Network) if bb.Network.load(name).topology.fabric is not None]


def speed(network: bb.Network, size: int = 2**32) -> float:
    return bus_bandwidth("all_reduce", network.workers, size, float(network.all_reduce.curve.time([size])[0]))


def test_the_clusters_that_people_rent_are_there() -> None:
    assert {"aws-p4d", "aws-p5", "aws-p5en", "aws-p6-b200", "azure-nd-h100-v5", "gb200-nvl72"} <= set(CLUSTERS)
    assert {"gcp-a3-high", "gcp-a3-mega", "gcp-a3-ultra", "dgx-a100", "dgx-h100", "dgx-b200"} <= set(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_more_nodes_are_never_faster(name: str) -> None:
    network = bb.Network.load(name)
    node = network.topology.gpus_per_node
    speeds = [speed(network.at(workers=node * nodes)) for nodes in (1, 2, 3, 4, 12, 32, 128, 1000)]
    assert all(after <= before * 1.001 for before, after in pairwise(speeds))


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_quiet_cluster_is_at_least_as_fast_as_a_busy_one(name: str) -> None:
    network = bb.Network.load(name)
    there = network.at(workers=32 * network.topology.gpus_per_node)
    assert there.edges is not None
    quiet, busy = there.edges
    assert speed(quiet) >= speed(there) >= speed(busy)
    assert network.at(workers=network.topology.gpus_per_node).edges is None
