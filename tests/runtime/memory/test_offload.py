"""When tensors leave the device and come back, and in which order the streams are told."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch

from backbeat.runtime.memory import offload
from backbeat.runtime.memory.offload import HostCopies, OffloadSchedule, PinnedPool, movable


def tensor(value: float = 1.0, size: int = 1024) -> torch.Tensor:
    return torch.full((size,), value)


def offloaded(schedule: OffloadSchedule, source: torch.Tensor):
    return schedule.offload(source, schedule.begin_range(), "block")


def test_a_tensor_comes_back_as_it_was_and_its_storage_is_moved_once():
    schedule = OffloadSchedule()
    schedule.begin_block()
    base = torch.arange(24.0).reshape(4, 6)
    views = [base, base.t(), base[1:3, 2:], base.view(torch.int32)]
    saved = [offloaded(schedule, view) for view in views]
    assert schedule.host_bytes == base.nbytes
    for _ in range(3):
        schedule.begin_block()
    for view, one in zip(views, saved, strict=True):
        found = one.tensor()
        assert torch.equal(found, view)
        assert found.stride() == view.stride()
        assert found.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_memory_is_free_after_as_many_blocks_as_the_lag(lag):
    for blocks in range(5):
        # A copy of a schedule has the same settings, and none of its buffers.
        schedule = copy.deepcopy(OffloadSchedule(lag=lag))
        schedule.begin_block()
        source = tensor()
        saved = offloaded(schedule, source)
        for _ in range(blocks):
            schedule.begin_block()
        assert (saved.tensor().data_ptr() != source.data_ptr()) == (blocks >= lag)


def test_tensors_come_back_as_many_units_early_as_is_said(monkeypatch):
    fetched = []
    to_device = HostCopies.to_device

    def logged(self, buffer, size, sent):
        fetched.append(buffer.data.view(torch.float32)[0].item())
        return to_device(self, buffer, size, sent)

    monkeypatch.setattr(HostCopies, "to_device", logged)
    schedule = OffloadSchedule(ahead=2)
    saved = []
    for range_number in range(1, 6):
        schedule.begin_block()
        saved.append(offloaded(schedule, tensor(float(range_number))))
    for range_number, expected in ((5, [5, 4, 3]), (4, [5, 4, 3, 2]), (3, [5, 4, 3, 2, 1]), (2, [5, 4, 3, 2, 1])):
        schedule.reached(range_number)
        assert fetched == expected
    assert [one.tensor()[0].item() for one in saved] == [1, 2, 3, 4, 5]
    assert len(fetched) == 5


def test_parts_that_are_written_into_one_by_one_leave_one_by_one():
    schedule = OffloadSchedule()
    schedule.begin_block()
    parts = torch.zeros(2, 6).unsafe_chunk(3, dim=1)
    saved = [offloaded(schedule, part.add_(number)) for number, part in enumerate(parts)]
    assert [part._version for part in parts] == [1, 1, 1]
    for _ in range(3):
        schedule.begin_block()
    for part, one in zip(parts, saved, strict=True):
        assert torch.equal(one.tensor(), part)


def test_an_address_used_again_is_another_tensor():
    schedule = OffloadSchedule(lag=1)
    found = []
    for value in range(8):
        schedule.begin_block()
        found.append(offloaded(schedule, tensor(value)))
    assert [one.tensor()[0].item() for one in found] == list(range(8))


def test_buffers_come_back_when_nobody_holds_the_tensor():
    schedule = OffloadSchedule(lag=1)
    for _ in range(10):
        schedule.begin_block()
        offloaded(schedule, tensor())
    assert schedule.host_bytes <= 3 * 4096


def test_a_pool_gives_the_smallest_that_fits_and_nothing_far_too_large():
    pool = PinnedPool(pinned=False)
    large, small = pool.take(1000), pool.take(600)
    pool.put_back(large)
    pool.put_back(small)
    assert pool.take(500) is small
    assert pool.take(400) is not large
    assert pool.total_bytes == 2000


def test_copies_of_a_schedule_start_empty():
    schedule = OffloadSchedule()
    schedule.begin_block()
    saved = offloaded(schedule, tensor())
    assert copy.deepcopy(schedule).host_bytes == 0
    assert schedule.host_bytes == 4096
    del saved


def test_small_and_odd_tensors_stay():
    assert not movable(torch.zeros(8))
    assert movable(torch.zeros(64 * 1024, dtype=torch.uint8))
    assert not movable(torch.zeros(256, 256).to_sparse())
    assert not movable(torch.empty(1 << 20, device="meta"))


class Stream:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for stream {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name} records {self.events}")
        return f"{self.name} {self.events}"


def test_the_streams_are_told_in_an_order_that_is_safe(monkeypatch):
    """A stand-in for a GPU: the calls, not the copies, are what is looked at."""
    log: list[str] = []
    compute = Stream("compute", log)

    class WithStreams(HostCopies):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._streams = Stream("out", log), Stream("in", log)

    monkeypatch.setattr(offload, "HostCopies", WithStreams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    schedule = OffloadSchedule(lag=1, ahead=1)
    schedule.begin_block()
    range_number = schedule.begin_range()
    saved = schedule.offload(tensor(3.0), range_number, "block")
    # The copy comes after what made the tensor.
    assert log == ["out waits for stream compute", "out records 1"]
    log.clear()
    schedule.begin_block()
    # The memory is released only after the copy.
    assert log == ["compute waits for out 1"]
    log.clear()
    schedule.reached(range_number)
    # The new memory may still be in use by the compute stream, and the host buffer must have been filled.
    assert log == ["in waits for stream compute", "in waits for out 1", "in records 1"]
    log.clear()
    assert saved.tensor()[0] == 3.0
    assert log == ["compute waits for in 1"]
    log.clear()
    saved.tensor()
    assert log == []
    del saved
    gc.collect()
    schedule.begin_block()
    offloaded(schedule, tensor(4.0))
    # The buffer was read by the copy back: it is not overwritten before that is done.
    assert log == ["out waits for stream compute", "out waits for in 1", "out records 2"]
    unused = offloaded(schedule, tensor(5.0))
    schedule.reached(range_number + 2)
    log.clear()
    del unused
    # Fetched in vain: the memory is free after the copy that still writes into it.
    assert log == ["compute waits for in 2"]


class Owner:
    """Whoever keeps a tensor."""


def test_what_a_kept_block_holds_is_not_offloaded_and_not_brought_back_twice():
    schedule = OffloadSchedule(lag=1)
    schedule.begin_block()
    owner, source = Owner(), tensor(size=1 << 15)
    schedule.keep(source, owner)
    saved = offloaded(schedule, source)
    assert schedule.host_bytes == 0
    assert saved.tensor().data_ptr() == source.data_ptr()
    # Kept by the block right after the one that offloads it.
    other = tensor(size=1 << 15)
    leaving = offloaded(schedule, other)
    schedule.keep(other, owner)
    for _ in range(4):
        schedule.begin_block()
    assert leaving.tensor().data_ptr() == other.data_ptr()
    # Once the owner has gone it is offloaded like any other.
    del owner
    gc.collect()
    before = schedule.host_bytes
    again = offloaded(schedule, source)
    assert schedule.host_bytes == before + source.nbytes
    del again


def test_a_kept_tensor_that_was_written_into_is_offloaded_like_any_other():
    schedule = OffloadSchedule(lag=1)
    schedule.begin_block()
    owner, source = Owner(), tensor(size=1 << 15)
    schedule.keep(source, owner)
    source.add_(1)
    saved = offloaded(schedule, source)
    assert schedule.host_bytes == source.nbytes
    assert torch.equal(saved.tensor(), source)
