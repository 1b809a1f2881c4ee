"""CUDA events as a clock, over events, a stream and a spin that are made up."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from backbeat.comm.clock import EventClock  # noqa: E402


class FakeEvent:
    now_s = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream
        self.at_s = FakeEvent.now_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at_s - self.at_s) * 1e3


class FakeStream:
    cuda_stream = 7


@pytest.fixture
def event_clock(monkeypatch: pytest.MonkeyPatch) -> tuple[EventClock, list[int], dict[str, int]]:
    """An EventClock over events, a stream and a spin of our own: a device of 2 GHz."""
    spins: list[int] = []
    handles = {"current": 7}

    def spin(cycles: int) -> None:
        spins.append(cycles)
        FakeEvent.now_s += cycles / 2e9

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: handles["current"], raising=False)
    monkeypatch.setattr(torch.cuda, "_sleep", spin, raising=False)
    return EventClock(torch.device("cuda", 0)), spins, handles


def test_a_spin_is_as_long_as_asked(event_clock: tuple[EventClock, list[int], dict[str, int]]) -> None:
    clock, spins, _ = event_clock
    clock.delay(0.01)
    assert spins[-1] == pytest.approx(0.01 * 2e9, rel=1e-6)
    calibrations = len(spins)
    clock.delay(0.02)
    assert len(spins) == calibrations + 1
    clock.delay(3600.0)
    assert spins[-1] == pytest.approx(0.25 * 2e9, rel=1e-6)
    clock.delay(0.0)
    assert len(spins) == calibrations + 2


def test_marks_go_to_the_stream_that_is_current(event_clock: tuple[EventClock, list[int], dict[str, int]]) -> None:
    clock, _, handles = event_clock
    clock.reserve(2)
    assert clock.mark().stream is FakeStream
    handles["current"] = 8
    assert clock.mark().stream is None
    # One more than was reserved.
    assert clock.mark() is not clock.mark()
