"""The two halves of an all-reduce, where a network has not measured them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backbeat.model import CollectiveTimes, Topology
from backbeat.model.cluster import Cluster
from tests.problems import affine, curve

ALPHA, BETA = 1e-4, 1e-9
NODE: dict[str, Any] = {
    "algorithm": "hierarchical",
    "gpus_per_node": 8,
    "inside_algorithm": "nvls",
    "inside": CollectiveTimes(alpha_s=ALPHA, beta_s_per_byte=BETA),
}


@pytest.mark.parametrize(
    ("workers", "topology", "latency", "work"),
    [
        (8, {"algorithm": "ring"}, 1 / 2, 1 / 2),
        (8, {"algorithm": "auto"}, 1 / 2, 1 / 2),
        # A switch that adds saves the all-reduce bytes: it sends 9/8 of the vector each way, a gather 7/8.
        (8, {"algorithm": "nvls", "gpus_per_node": 8}, 1 / 2, 7 / 9),
        (8, NODE, 1 / 2, 7 / 9),
        # Switches between nodes take one latency and send the vector once; a gather is a ring of 4 nodes, or of 2.
        (4, {"algorithm": "sharp"}, 3, 3 / 4),
        (16, {**NODE, "across_algorithm": "sharp"}, 1, 1 / 2),
        (16, {**NODE, "across_algorithm": "ring"}, 1 / 2, 1 / 2),
    ],
)
def test_a_half_takes_half_unless_switches_reduce(
    workers: int, topology: dict[str, Any], latency: float, work: float
) -> None:
    network = affine(ALPHA, BETA, workers=workers, topology=Topology(**topology))
    gather, scatter = Cluster.of(network).curve("all_gather"), Cluster.of(network).curve("reduce_scatter")
    for size in (0.0, 1e5, 1e8, 1e10):
        assert gather.at(size) == pytest.approx(latency * ALPHA + work * BETA * size)
        assert scatter.at(size) == gather.at(size)


def test_a_half_of_few_gpus_is_that_of_the_ring_which_is_faster_there() -> None:
    two = affine(ALPHA, BETA, workers=8, topology=Topology(**NODE)).at(workers=2)
    for size in (1e5, 1e8, 1e10):
        assert Cluster.of(two).curve("all_gather").at(size) == pytest.approx(two.cost.isolated.at(size) / 2)


def test_what_was_measured_comes_first_and_never_beats_its_link() -> None:
    # A small message that an idle link let through: 1e6 bytes at 1 GB/s take a millisecond in a row.
    points = ((1e3, 1e-4), (1e6, 5e-4), (1e8, 1e-1), (2e8, 2e-1))
    network = msgspec.structs.replace(
        affine(ALPHA, BETA, workers=8), all_gather=CollectiveTimes(points=tuple((int(x), y) for x, y in points))
    )
    gather, scatter = Cluster.of(network).curve("all_gather"), Cluster.of(network).curve("reduce_scatter")
    assert gather.at(1e3) == pytest.approx(1e-4)
    assert gather.at(1e6) == pytest.approx(1e-3)
    assert gather.at(2e8) == pytest.approx(2e-1)
    assert scatter.at(1e8) == pytest.approx((ALPHA + BETA * 1e8) / 2)


def test_of_a_measured_all_reduce_latency_and_transfer_are_taken_apart() -> None:
    points = [(1024, 2e-5), (2**20, 4e-5), (2**26, 4e-4), (2**28, 1.5e-3)]
    network = curve(points, topology=Topology(algorithm="nvls", gpus_per_node=8))
    whole, found = network.cost.isolated, Cluster.of(network).curve("all_gather")
    for size, _ in points:
        assert found.at(size) == pytest.approx(float(whole.latency(size) / 2 + whole.transfer(size) * 7 / 9))
