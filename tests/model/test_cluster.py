"""A cluster: what collectives take in groups of its ranks, how busy it is, and which GPUs it joins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.cluster import Cluster, cluster_of

NAMES = st.sampled_from(["10gbe", "dgx-h100", "aws-p5en", "nvlink-ib400", "gcp-a3-mega"])


@given(NAMES, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(0, 6), st.floats(1, 1e9))
def test_neighbours_that_fill_nodes_take_what_the_network_says(name: str, kind: str, power: int, size: float) -> None:
    cluster = Cluster(Network.load(name))
    workers = cluster.per_node * 2**power
    whole = cluster.curve(kind, workers).at(size)  # type: ignore[arg-type]
    assert cluster.collective_s(kind, size, workers) == pytest.approx(whole if workers > 1 else 0.0)  # type: ignore[arg-type]


@given(NAMES, st.sampled_from([2, 4, 8, 16, 64]), st.sampled_from([2, 4, 8]), st.floats(1, 1e9), st.floats(1, 10))
def test_copies_take_no_less_for_more_bytes_or_on_a_busy_day(
    name: str, shards: int, copies: int, size: float, factor: float
) -> None:
    network = Network.load(name).at(workers=shards * copies)
    cluster = Cluster.of(network)
    curve = cluster.group("all_reduce", copies, shards)
    assert 0 <= curve.at(size) <= curve.at(size * factor) * (1 + 1e-9)
    if (edges := cluster.edges) is not None and shards * copies > cluster.per_node:
        assert edges[0].collective_s("all_reduce", size, copies, shards) <= edges[1].collective_s(
            "all_reduce", size, copies, shards
        ) * (1 + 1e-9)


def test_a_cluster_is_as_busy_as_its_network() -> None:
    network = Network.load("aws-p5en")
    busy = Cluster.of(network.at(workers=64, load="busy"))
    assert busy.load == "busy"
    assert busy.edges is None
    assert busy.curve("all_gather") is busy.curve("all_gather", 64)
    assert busy.curve("all_reduce").at(1e9) > Cluster.of(network.at(workers=64)).curve("all_reduce").at(1e9)


def test_gpus_are_the_networks_or_those_named() -> None:
    quiet = Cluster(Network.load("dgx-h100"), contention=False)
    assert cluster_of(quiet) is quiet
    named = cluster_of(quiet, "a100")
    assert (named.accelerator.name, named.contention) == ("A100", False)
    unsaid = cluster_of(replace(Network.load("dgx-h100"), accelerator=None))
    assert unsaid.collective_s("all_reduce", 1e6, 16) > 0
    with pytest.raises(InputError, match="does not say what GPUs it joins"):
        _ = unsaid.accelerator
