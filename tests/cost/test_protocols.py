"""NCCL's protocols by message size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.protocols import INFINIBAND, INFINIBAND_HOP_S, NicLatency, all_reduce_lines, fastest_s, rate_through


@given(st.integers(1, 512), st.sampled_from([4, 8, 72]), st.floats(1e3, 1e11), st.floats(1e8, 1e12))
def test_the_rate_that_one_size_shows_gives_that_size_again(nodes: int, gpus: int, sent: float, rate: float) -> None:
    lines = all_reduce_lines(nodes, gpus, INFINIBAND)
    seconds = fastest_s(lines, sent, rate)
    assert fastest_s(lines, sent, rate_through(lines, sent, seconds)) == pytest.approx(seconds)


@given(st.integers(2, 512), st.floats(1, 1e11))
def test_more_nodes_and_more_bytes_take_longer(nodes: int, sent: float) -> None:
    here, there = (fastest_s(all_reduce_lines(count, 8, INFINIBAND), sent, 4e11) for count in (nodes, 2 * nodes))
    assert here <= there
    assert here <= fastest_s(all_reduce_lines(nodes, 8, INFINIBAND), 2 * sent, 4e11)
    sharp = [all_reduce_lines(count, 8, INFINIBAND, sharp=True) for count in (nodes, 2 * nodes)]
    assert sharp[0] == sharp[1]


def test_infiniband_is_what_its_own_hop_gives() -> None:
    assert NicLatency.of(INFINIBAND_HOP_S) == INFINIBAND


def test_a_time_shorter_than_every_latency_is_taken_as_transfer() -> None:
    assert rate_through([(1e-3, 1.0)], 1e6, 1e-5) == pytest.approx(1e11)
