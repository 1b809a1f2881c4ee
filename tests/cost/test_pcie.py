"""Nodes without NVLink."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.pcie import PRESETS, lines, origin, reached
from backbeat.cost.protocols import INFINIBAND, NicLatency, all_reduce_lines
from backbeat.model.specification import Specification, across_named, latency_by


@given(st.sampled_from(PRESETS), st.integers(2, 16), st.sampled_from(["all_reduce", "all_gather"]))
def test_more_gpus_share_a_host(link: str, gpus: int, collective: str) -> None:
    assert reached(link, gpus + 1) <= reached(link, gpus)
    more, fewer = (lines(collective, count) for count in (gpus + 1, gpus))  # type: ignore[arg-type]
    assert all(one[0] > other[0] for one, other in zip(more, fewer, strict=True))


@pytest.mark.parametrize("slot", ["pcie3", "pcie4", "pcie5"])
def test_peer_to_peer_is_faster_than_the_hosts_memory(slot: str) -> None:
    assert reached(f"{slot}-p2p", 4) > 2 * reached(slot, 4)


def test_what_no_measurement_stands_behind_is_said() -> None:
    assert [link for link in PRESETS if "never checked here" not in origin(link)] == ["pcie3", "pcie4"]


@given(st.sampled_from(PRESETS), st.integers(2, 8), st.floats(1, 2**34))
def test_fewer_gpus_of_a_node_take_less(link: str, gpus: int, size: float) -> None:
    network = Specification(gpus_per_node=8, inside_link=link).network("node", [1])  # type: ignore[arg-type]
    part, whole = (network.at(workers=count).all_reduce.curve.at(size) for count in (gpus, 8))
    assert part <= whole * (1 + 1e-9)


@given(st.integers(2, 64), st.floats(5e-6, 1e-3))
def test_sockets_add_their_hops_to_what_nccl_takes_anyway(nodes: int, hop_s: float) -> None:
    through = all_reduce_lines(nodes, 4, latency_by("sockets", hop_s))
    assert all(one[0] >= other[0] for one, other in zip(through, all_reduce_lines(nodes, 4, INFINIBAND), strict=True))
    assert latency_by("efa", hop_s) == NicLatency.of(hop_s)


def test_a_processor_moves_only_so_much_through_sockets() -> None:
    slopes = [
        across_named(rate).at(workers=8).all_reduce.curve.link_s_per_byte for rate in ("40gbe", "100gbit", "400gbe")
    ]
    assert slopes[0] == pytest.approx(slopes[2])
    assert slopes[1] < slopes[0] / 3
