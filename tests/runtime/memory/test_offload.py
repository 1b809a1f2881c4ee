"""When tensors leave the device and come back, and in which order the streams are told."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from backbeat.runtime.memory.offload import Line, Tape, movable  # noqa: E402
from backbeat.runtime.memory.pinned import HostPool  # noqa: E402


def tensor(value: float = 1.0, size: int = 1024) -> torch.Tensor:
    return torch.full((size,), value)


def test_a_tensor_comes_back_as_it_was():
    tape = Tape()
    tape.begin_block()
    base = torch.arange(24.0).reshape(4, 6)
    views = [base, base.t(), base[1:3, 2:], base.view(torch.int32)]
    sent = [tape.send(view, tape.begin_unit(), "block") for view in views]
    assert len({id(away.parcel) for away in sent}) == 1
    for _ in range(3):
        tape.begin_block()
    for view, away in zip(views, sent, strict=True):
        found = away.tensor()
        assert torch.equal(found, view)
        assert found.stride() == view.stride()
        assert found.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


def test_the_device_copy_leaves_at_the_second_block_after_and_comes_back_two_units_early():
    tape = Tape(lag=2, ahead=2)
    parcels = []
    for place in range(5):
        tape.begin_block()
        parcels.append(tape.send(tensor(place), tape.begin_unit(), "block").parcel)
        assert [parcel._source is not None for parcel in parcels] == [number > place - 2 for number in range(place + 1)]
    tape.reached(5)
    assert [parcel._source is None for parcel in parcels] == [True] * 5
    assert [parcel._target is not None for parcel in parcels] == [False, False, True, True, True]
    tape.reached(4)
    assert parcels[1]._target is not None
    assert parcels[0]._target is None
    tape.reached(3)
    assert parcels[0]._target is not None


def test_what_is_used_before_it_has_left_is_not_copied_back():
    tape = Tape()
    tape.begin_block()
    source = tensor()
    away = tape.send(source, tape.begin_unit(), "block")
    assert away.tensor().data_ptr() == source.data_ptr()


def test_an_address_used_again_is_another_tensor():
    tape = Tape(lag=1)
    found = []
    for value in range(8):
        tape.begin_block()
        found.append(tape.send(tensor(value), tape.begin_unit(), "block"))
    assert [away.tensor()[0].item() for away in found] == list(range(8))


def test_buffers_come_back_when_nobody_holds_the_parcel():
    tape = Tape(lag=1)
    for _ in range(10):
        tape.begin_block()
        away = tape.send(tensor(), tape.begin_unit(), "block")
        del away
    assert tape.host_bytes <= 3 * 4096
    assert tape.waiting <= 1


def test_a_pool_gives_the_smallest_that_fits_and_nothing_far_too_large():
    pool = HostPool(pinned=False)
    large, small = pool.take(1000), pool.take(600)
    pool.give(large)
    pool.give(small)
    assert pool.take(500) is small
    assert pool.take(400) is not large
    assert pool.total_bytes == 2000


def test_copies_of_a_tape_start_empty():
    tape = Tape(lag=3, ahead=1)
    tape.begin_block()
    away = tape.send(tensor(), tape.begin_unit(), "block")
    twin = copy.deepcopy(tape)
    assert (twin.waiting, twin.host_bytes, twin._settings) == (0, 0, (3, 1))
    assert tape.waiting == 1
    del away


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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    line = Line(torch.device("cpu"))
    line._streams = Stream("out", log), Stream("in", log)
    tape = Tape(lag=1, ahead=1)
    tape._lines[torch.device("cpu")] = line
    tape.begin_block()
    unit = tape.begin_unit()
    away = tape.send(tensor(3.0), unit, "block")
    # The copy comes after what made the tensor.
    assert log == ["out waits for stream compute", "out records 1"]
    log.clear()
    tape.begin_block()
    # The memory is given up only behind the copy.
    assert log == ["compute waits for out 1"]
    log.clear()
    tape.reached(unit)
    # The new memory may still be in use by the compute stream, and the host buffer must have been filled.
    assert log == ["in waits for stream compute", "in waits for out 1", "in records 1"]
    log.clear()
    assert away.tensor()[0] == 3.0
    assert log == ["compute waits for in 1"]
    log.clear()
    away.tensor()
    assert log == []
    del away
    gc.collect()
    tape.begin_block()
    tape.send(tensor(4.0), tape.begin_unit(), "block")
    # The buffer was read by the copy back: it is not overwritten before that is done.
    assert log == ["out waits for stream compute", "out waits for in 1", "out records 2"]
    unused = tape.send(tensor(5.0), tape.begin_unit(), "block")
    tape.reached(unit + 2)
    log.clear()
    del unused
    # Fetched in vain: the memory is free behind the copy that still writes into it.
    assert log == ["compute waits for in 2"]


class Owner:
    """Whoever keeps a tensor."""


def test_what_a_kept_block_holds_is_not_sent_and_not_brought_back_twice():
    tape = Tape(lag=1)
    tape.begin_block()
    owner, source = Owner(), tensor(size=1 << 15)
    tape.keeps(source, owner)
    away = tape.send(source, tape.begin_unit(), "block")
    assert tape.host_bytes == 0
    assert away.tensor().data_ptr() == source.data_ptr()
    # Kept by the block right behind the one that sends it.
    other = tensor(size=1 << 15)
    sent = tape.send(other, tape.begin_unit(), "block")
    tape.keeps(other, owner)
    for _ in range(4):
        tape.begin_block()
    assert sent.tensor().data_ptr() == other.data_ptr()
    # Once the owner has gone, or the tensor has been written into, it is sent as any other.
    del owner
    gc.collect()
    assert tape._kept == {}
    before = tape.host_bytes
    kept = tape.send(source, tape.begin_unit(), "block")
    assert tape.host_bytes == before + source.numel() * 4
    del kept
