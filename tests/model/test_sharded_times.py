"""All-gathers and reduce-scatters together, as a network file keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.collective_times import CollectivePair, ShardedTimes
from backbeat.model.slowdown import Slowdown
from tests.problems import affine


def pair(size: int, speed: float, communicators: int = 2) -> CollectivePair:
    return CollectivePair(bytes=size, communicators=communicators, seconds=1e-3, alone_s=speed * 1e-3)


def test_the_larger_sizes_say_how_fast_they_are_together() -> None:
    times = ShardedTimes(pairs=(pair(2**20, 3.0), pair(2**22, 1.2), pair(2**24, 1.3), pair(2**24, 0.9, 1)))
    assert times.speed(2) == pytest.approx(1.25)
    assert times.speed(1) == pytest.approx(0.9)
    assert ShardedTimes().speed(2) is None


def test_in_a_row_they_take_what_was_measured_and_never_longer_than_alone() -> None:
    assert ShardedTimes(pairs=(pair(2**24, 1.25, 1),)).in_a_row == pytest.approx(0.8)
    assert ShardedTimes(pairs=(pair(2**24, 0.9, 1),)).in_a_row == 1.0
    assert ShardedTimes(pairs=(pair(2**24, 1.25, 2),)).in_a_row == 1.0


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8))
def test_it_lies_between_what_was_measured(speeds: list[float]) -> None:
    found = ShardedTimes(pairs=tuple(pair(2**20 + index, speed) for index, speed in enumerate(speeds))).speed(2)
    assert found is not None
    assert min(speeds) * (1 - 1e-9) <= found <= max(speeds) * (1 + 1e-9)


def test_files_keep_it_and_other_numbers_of_workers_have_it(tmp_path: Path) -> None:
    times = ShardedTimes(pairs=(pair(2**24, 1.25),), slowdown=Slowdown(matmul=1.2))
    network = replace(affine(1e-5, 1e-9), sharded=times)
    network.save(tmp_path / "net.json")
    loaded = Network.load(tmp_path / "net.json")
    assert loaded.sharded == times
    assert loaded.at(workers=64).sharded == times


def test_a_time_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        CollectivePair(bytes=1, communicators=1, seconds=0.0, alone_s=1.0)
    with pytest.raises(InputError, match=r"alone_s is 0\.0: it must be above 0"):
        CollectivePair(bytes=1, communicators=1, seconds=1.0, alone_s=0.0)
