"""Launch-bound or device-bound, on a device that is made up: it works behind the host through a queue, as GPUs do."""

from __future__ import annotations

from collections import deque
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backbeat.comm.clock import Clock
from backbeat.measure.model import observation
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.launch_bound import LaunchBound, LaunchTimes, _one_by_one
from backbeat.measure.model.observation import Figures, measure_training
from backbeat.measure.model.profiler import _launch_bound_note, host_fields
from backbeat.measure.model.training_step import Training
from backbeat.model import Block
from backbeat.runtime.memory import apply

CPU = torch.device("cpu")


class MadeUpDevice(Clock):
    """A clock whose host and device times are counted, not measured."""

    asynchronous = True

    def __init__(self, mark_s: float, queue: int = 1000) -> None:
        self.host = 0.0
        self.device = 0.0
        self.delays: list[float] = []
        self._mark_s = mark_s
        self._queue = queue
        self._pending: deque[float] = deque()

    def work(self, host_s: float, device_s: float) -> None:
        self.host += host_s
        while self._pending and self._pending[0] <= self.host:
            self._pending.popleft()
        if len(self._pending) >= self._queue:
            self.host = self._pending.popleft()
        self.device = max(self.device, self.host) + device_s
        self._pending.append(self.device)

    def mark(self) -> float:
        self.work(self._mark_s, 0.0)
        return self.device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def host_s(self) -> float:
        return self.host

    def delay(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.work(0.0, seconds)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Any, weight: Any, work: Any, host_s: float, device_s: float) -> Any:
        context.given = work, host_s, device_s
        work(host_s, device_s)
        return inputs * weight

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        work, host_s, device_s = context.given
        work(2 * host_s, 2 * device_s)
        return gradient, gradient.sum(), None, None, None


class Layer(nn.Module):
    def __init__(self, clock: MadeUpDevice, host_s: float, device_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._arguments = clock.work, host_s, device_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Kernel.apply(inputs, self.weight, *self._arguments)
        return result


def take_figures(
    clock: MadeUpDevice,
    host_s: float,
    layers: list[float],
    accumulation: int = 1,
    ranks: Any = None,
) -> Figures:
    """A chain of layers, each one submission of `host_s` and its own time on the device; backward takes twice that."""
    model = nn.Sequential(*(Layer(clock, host_s, device_s) for device_s in layers))
    training = Training(
        model=model,
        batch=torch.ones(2),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        device=CPU,
        precision="fp32",
        accumulation=accumulation,
        scaler=None,
        clock=clock,
    )
    options = MeasureOptions(iterations=8, warmup=2, apply_memory=apply, ranks=ranks)
    return measure_training(training, options)


def own_shares(layers: list[float]) -> dict[int, float]:
    """When each gradient is ready on a device that never waits."""
    total = sum(layers)
    return {index: sum(layers[index:]) / total for index in range(len(layers))}


def assert_own(figures: Figures, layers: list[float]) -> None:
    assert figures.hooked.ready == pytest.approx(own_shares(layers), rel=1e-6)
    assert figures.hooked.forward == pytest.approx(
        {index: seconds / sum(layers) for index, seconds in enumerate(layers)}, rel=1e-6
    )
    assert figures.overhead == pytest.approx(1.0, abs=1e-6)


def test_a_slow_device_needs_no_head_start() -> None:
    clock = MadeUpDevice(mark_s=0.2)
    layers = [3.0, 4.0, 5.0, 3.0, 6.0, 3.0]
    figures = take_figures(clock, 1.0, layers)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == "device-bound"
    assert clock.delays == []
    assert_own(figures, layers)


def test_ranks_do_alike_and_a_host_that_is_disturbed_does_not_count() -> None:
    """This host takes 0.9 of an iteration, the others 0.45: hooks would not make a device wait."""
    clock = MadeUpDevice(mark_s=0.0)
    layers = [1.0, 1.0, 1.0]
    ranks = SimpleNamespace(wait_for_others=lambda: None, gather_some=lambda what, value: [value, value / 2, value / 2])
    figures = take_figures(clock, 0.9, layers, ranks=ranks)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == "device-bound"
    assert clock.delays == []
    assert figures.launch_bound.host_s == pytest.approx(0.9 * 9 / 2)


@pytest.mark.parametrize(("quickest", "kind"), [(0.5, "device-bound"), (0.7, "close to launch-bound")])
def test_the_quickest_launch_decides_and_the_usual_one_is_kept(
    quickest: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of an iteration; each part has its own quickest and its own median."""
    layers = [1.0, 1.0, 1.0]
    shares = [quickest, 0.8, 0.8, 0.95, 3.0]
    launched = [LaunchTimes(9 * share, 0.0, 0.0) for share in shares]
    monkeypatch.setattr(observation, "launch_times", lambda training, begin=None: launched)
    figures = take_figures(MadeUpDevice(mark_s=0.0), 0.01, layers)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == kind
    assert figures.launch_bound.host_s == pytest.approx(9 * 0.8)
    parts = [LaunchTimes(1.0, 5.0, 2.0), LaunchTimes(3.0, 4.0, 9.0), LaunchTimes(2.0, 6.0, 3.0)]
    assert LaunchTimes.each(min, parts) == LaunchTimes(1.0, 4.0, 2.0)
    assert LaunchTimes.each(median, parts) == LaunchTimes(2.0, 5.0, 3.0)


def test_where_hooks_would_make_the_device_wait_it_is_given_a_head_start() -> None:
    clock = MadeUpDevice(mark_s=0.6)
    layers = [0.5, 0.5, 1.5, 1.5, 1.0, 1.0, 1.0, 0.5, 1.2, 1.3] * 3
    figures = take_figures(clock, 0.8, layers)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == "close to launch-bound"
    assert clock.delays
    assert max(clock.delays) <= 2 * 0.8 * len(layers) + 1
    assert_own(figures, layers)
    assert "head start" in _launch_bound_note(figures.launch_bound)


def test_without_it_the_shares_would_be_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpDevice, "delay", lambda self, seconds: None)
    layers = [0.2] * 20 + [2.2] * 10
    figures = take_figures(MadeUpDevice(mark_s=1.5), 0.8, layers)
    assert figures.overhead > 1.05
    worst = max(abs(figures.hooked.ready[index] - share) for index, share in own_shares(layers).items())
    assert worst > 0.05


def test_a_slow_host_sets_the_pace_of_the_hooked_iterations_too() -> None:
    clock = MadeUpDevice(mark_s=0.01)
    layers = [1.0, 0.1, 0.4, 0.7] * 5
    figures = take_figures(clock, 2.0, layers)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == "launch-bound"
    assert figures.launch_bound.device_s == pytest.approx(3 * sum(layers))
    # Submissions are evenly spaced whatever the device does in between.
    count = len(layers)
    assert figures.hooked.ready == pytest.approx(
        {index: (count - index) / count for index in range(count)}, abs=1.5 / count
    )
    note = _launch_bound_note(figures.launch_bound)
    assert note.startswith("launch-bound: the host usually submits an iteration in")
    assert "head start" in note


def test_accumulation_gives_the_head_start_to_the_watched_micro_batch_only() -> None:
    layers = [1.0, 1.5, 0.5, 1.0] * 5
    once, thrice = MadeUpDevice(mark_s=0.3), MadeUpDevice(mark_s=0.3)
    take_figures(once, 0.8, layers)
    figures = take_figures(thrice, 0.8, layers, accumulation=3)
    assert figures.launch_bound is not None
    assert figures.launch_bound.kind == "close to launch-bound"
    assert len(thrice.delays) == len(once.delays)
    assert_own(figures, layers)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(0.5, 3.0), min_size=4, max_size=12),
    st.floats(0.05, 4.0),
    st.floats(0.0, 0.5),
    st.sampled_from([40, 1000]),
)
def test_shares_are_the_devices_own_unless_it_waits_in_plain_iterations(
    layers: list[float], host_s: float, mark_s: float, queue: int
) -> None:
    clock = MadeUpDevice(mark_s, queue)
    figures = take_figures(clock, host_s, layers)
    assert figures.launch_bound is not None
    if figures.launch_bound.kind == "device-bound":
        # Hooks may add to the host's time, which is at most 0.6 of the device's without them.
        if host_s * 3 * len(layers) + mark_s * (len(layers) + 8) < 0.9 * 3 * sum(layers):
            assert figures.overhead < 1.3
    elif figures.launch_bound.kind == "close to launch-bound":
        assert figures.hooked.ready == pytest.approx(own_shares(layers), abs=0.06)
    else:
        assert figures.launch_bound.host_s >= 0.6 * figures.launch_bound.iteration_s


class Saving(Layer):
    """Saves a tensor for backward, so that there is something to recompute."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).sin()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_recomputing_every_block_is_timed_on_the_host(monkeypatch: pytest.MonkeyPatch, accumulation: int) -> None:
    layers = [1.0, 1.5, 0.5, 1.0]
    monkeypatch.setitem(globals(), "Layer", Saving)
    figures = take_figures(MadeUpDevice(mark_s=0.3), 0.8, layers, accumulation)
    assert figures.launch_bound is not None
    # Each forward is submitted once more, and nothing else; copies take this host no time.
    assert figures.launch_bound.recompute_s == pytest.approx(0.8 * len(layers))
    assert figures.launch_bound.fetch_s == pytest.approx(0.8 * len(layers))
    for block in figures.chain.blocks:
        assert (block.host_forward_s, block.host_backward_s) == pytest.approx((0.8, 1.6))


def test_inputs_that_would_take_long_to_pin_are_not_offloaded_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Layer", Saving)
    monkeypatch.setattr("backbeat.measure.model.launch_bound._MOST_PINNED_BYTES", 8)
    figures = take_figures(MadeUpDevice(mark_s=0.3), 0.8, [1.0, 1.5, 0.5])
    assert figures.launch_bound is not None
    assert figures.launch_bound.recompute_s is not None
    assert figures.launch_bound.fetch_s is None


def test_only_a_launch_bound_profile_says_what_the_device_takes_alone() -> None:
    for kind, device_s in (("launch-bound", 0.7), ("close to launch-bound", None)):
        bound = LaunchBound(kind, host_s=1.0, iteration_s=1.1, device_s=0.7, recompute_s=0.2)  # type: ignore[arg-type]
        assert host_fields(bound).get("device_s") == device_s
        assert host_fields(bound)["host_recompute_s"] == 0.2
        assert "host_fetch_s" not in host_fields(bound)


class Counting(Saving):
    """Writes into a buffer in forward, so that it cannot run twice."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


def test_blocks_that_cannot_be_recomputed_are_profiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [3.0, 4.0, 5.0, 3.0]
    monkeypatch.setitem(globals(), "Layer", Counting)
    figures = take_figures(MadeUpDevice(mark_s=0.2), 1.0, layers)
    assert figures.chain.blocks
    assert figures.launch_bound is not None
    assert figures.launch_bound.recompute_s is None
    assert_own(figures, layers)


def test_a_block_that_writes_into_its_input_goes_with_the_one_before() -> None:
    def block(name: str, **fields: bool) -> Block:
        return Block(
            name=name, forward_s=0.0, backward_s=0.0, input_bytes=0, output_bytes=0, saved_bytes=0,
            forward_peak_bytes=0, backward_peak_bytes=0, **fields,
        )  # fmt: skip

    found = _one_by_one(
        [
            block("relu", changes_input=True),
            block("a"),
            block("b", changes_input=True),
            block("c", changes_input=True, chained=False),
            block("d"),
        ]
    )
    assert [segment.blocks for segment in found] == [("a", "b"), ("d",)]


def test_the_note_says_what_the_host_takes() -> None:
    note = _launch_bound_note(LaunchBound("device-bound", 0.010, 0.040, None))
    assert note == "device-bound: the host usually submits an iteration in 10 ms, 25% of the 40 ms it takes"
