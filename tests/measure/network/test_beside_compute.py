"""Computation beside all-reduces, on a device that exists on paper: what is measured is what it does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="calibration needs PyTorch")

from backbeat.comm.communicators import Communicator  # noqa: E402
from backbeat.measure.network import beside_compute  # noqa: E402
from backbeat.measure.network.beside_compute import beside_bytes, measure_slowdown, messages_beside  # noqa: E402

MESSAGE_S = 0.5e-3


class Paper:
    """A compute stream and a communicator. Work takes longer while the communicator has something to do."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.now = self.sending_until = 0.0

    def compute(self, seconds: float) -> None:
        beside = min(max(self.sending_until - self.now, 0.0), seconds * self.slowdown)
        self.now += beside + seconds - beside / self.slowdown

    def wait(self) -> None:
        self.now = max(self.now, self.sending_until)

    def all_reduce(self, message: torch.Tensor) -> Paper:
        self.sending_until = max(self.sending_until, self.now) + MESSAGE_S * (message.numel() > 1)
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Paper:
        return self.all_reduce(whole)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Paper:
        return self.all_reduce(whole)

    def all_reduce_max(self, message: torch.Tensor) -> Paper:
        return self


class PaperCuda:
    def __init__(self, paper: Paper) -> None:
        self.paper = paper

    def Event(self, enable_timing: bool = False) -> PaperEvent:  # noqa: N802
        return PaperEvent(self.paper)

    def _sleep(self, cycles: int) -> None:
        self.paper.now += cycles / 2e9


class PaperEvent:
    def __init__(self, paper: Paper) -> None:
        self.paper, self.at = paper, 0.0

    def record(self) -> None:
        self.at = self.paper.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PaperEvent) -> float:
        return (other.at - self.at) * 1e3


@pytest.mark.parametrize("workers", [None, 4], ids=["all-reduces", "gathers and scatters"])
@pytest.mark.parametrize("slowdown", [1.0, 1.25, 2.5])
def test_the_slowdown_of_the_device_is_found(
    slowdown: float, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = Paper(slowdown)
    monkeypatch.setattr(beside_compute, "cuda", PaperCuda(paper))
    works = [lambda seconds=seconds: paper.compute(seconds) for seconds in (3e-4, 7e-3, 1e-5)]
    monkeypatch.setattr(beside_compute, "_works", lambda device: works)
    communicator: Communicator = paper  # type: ignore[assignment]
    found = measure_slowdown(communicator, torch.device("cpu"), lambda size: MESSAGE_S, 1.0, workers=workers)
    assert [found.matmul, found.attention, found.memory] == [pytest.approx(slowdown)] * 3


@pytest.mark.parametrize("bytes_per_s", [1e7, 1e8, 1.2e9, 1e10, 1e12])
def test_messages_are_smaller_on_slow_links(bytes_per_s: float) -> None:
    size = beside_bytes(lambda size: 1e-4 + size / bytes_per_s)
    assert 1 << 20 <= size <= 64 << 20
    assert size == 1 << 20 or 1e-4 + size / bytes_per_s <= 10e-3
    assert size == 64 << 20 or 1e-4 + 2 * size / bytes_per_s > 10e-3


@pytest.mark.parametrize("message_s", [1e-6, 1e-4, 1.0])
def test_all_reduces_outlast_the_work(message_s: float) -> None:
    assert messages_beside(5e-3, message_s) * max(message_s, 1e-5) >= 4 * 5e-3
