"""Samples on a device, with a device and a host that exist on paper: what the host takes must stay out of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="calibration needs PyTorch")

from backbeat.comm.spin import SpinRate  # noqa: E402
from backbeat.measure.network import bench as bench_module  # noqa: E402
from backbeat.measure.network.bench import Bench  # noqa: E402
from backbeat.measure.network.case import Case  # noqa: E402

MESSAGE_S = 0.2e-3


class Paper:
    """A host whose every call takes a while, and a device that does what it is given, in order."""

    def __init__(self, host_s: float) -> None:
        self.host_s = host_s
        self.now = self.busy_until = 0.0

    def call(self) -> None:
        self.now += self.host_s

    def queue(self, seconds: float) -> None:
        self.call()
        self.busy_until = max(self.busy_until, self.now) + seconds

    def perf_counter(self) -> float:
        return self.now


class Event:
    paper: Paper

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.paper.queue(0.0)
        self.at = self.paper.busy_until

    def query(self) -> bool:
        self.paper.now = max(self.paper.now, self.at)
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Done:
    def wait(self) -> None:
        pass


class Communicator:
    def __init__(self, paper: Paper, connecting_s: float) -> None:
        self.paper, self.connecting_s = paper, connecting_s

    def all_reduce(self, message: torch.Tensor) -> Done:
        self.paper.now += self.connecting_s
        self.connecting_s = 0.0
        self.paper.queue(MESSAGE_S)
        return Done()

    all_reduce_max = all_reduce


@pytest.mark.parametrize("host_s", [5e-6, 80e-6, 2e-3])
@pytest.mark.parametrize("messages", [1, 8])
def test_a_slow_host_is_not_taken_for_a_slow_network(
    monkeypatch: pytest.MonkeyPatch, host_s: float, messages: int
) -> None:
    paper = Paper(host_s)
    bench = paper_bench(monkeypatch, paper)
    case = Case(bytes=1024, messages=messages)
    for _ in range(20):
        bench.largest_over_ranks([bench.sample(case)])
    late = bench.late
    found = bench.sample(case)
    assert found == pytest.approx(messages * MESSAGE_S, rel=1e-6)
    assert bench.late == late
    assert bench.pace_s >= host_s


def test_connecting_counts_neither_as_time_nor_as_the_hosts_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples would wait on the device for twice what connecting takes the host, and use up the budget."""
    bench = paper_bench(monkeypatch, Paper(5e-6), connecting_s=1.0)
    case = Case(bytes=1024, messages=2, communicators=2)
    with pytest.raises(RuntimeError, match="not connected"):
        bench.elapsed()
    bench.connect([case])
    assert (bench.elapsed(), bench.timed, bench.late) == (0.0, 0, 0)
    for _ in range(2):
        bench.largest_over_ranks([bench.sample(case)])
    assert bench.elapsed() < 0.01
    assert bench.pace_s < 1e-3
    # What it is worth: a bench that counts the first sample spins for as long as connecting took.
    other = paper_bench(monkeypatch, Paper(5e-6), connecting_s=1.0)
    for _ in range(2):
        other.largest_over_ranks([other.sample(case)])
    assert other.pace_s > 0.1


def paper_bench(monkeypatch: pytest.MonkeyPatch, paper: Paper, connecting_s: float = 0.0) -> Bench:
    monkeypatch.setattr(Event, "paper", paper, raising=False)
    monkeypatch.setattr(bench_module, "cuda", type("Cuda", (), {"Event": Event}))
    monkeypatch.setattr(bench_module, "time", paper)
    monkeypatch.setattr(bench_module, "spin_rate", lambda idle: SpinRate(1e9, 0.0))
    monkeypatch.setattr(SpinRate, "spin", lambda self, seconds: paper.queue(seconds) or seconds)
    links: list[Any] = [Communicator(paper, connecting_s) for _ in range(2)]
    bench = Bench(links, workers=2, device=torch.device("cpu"), timeout_s=1.0)
    bench.device = torch.device("cuda")
    monkeypatch.setattr(bench, "_room", torch.zeros)
    # Tensors stay where they are; only the clock is the device's.
    plain = torch.tensor
    monkeypatch.setattr(bench_module.torch, "tensor", lambda values, dtype, device=None: plain(values, dtype=dtype))
    return bench
