"""Timing collectives so that every rank gets the same numbers.

A sample is the time from all ranks having the data ready to all ranks having the result. Ranks are lined up by a tiny
all-reduce, each takes the time on its own clock, and the longest of them counts: no clock is compared with another.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from backbeat.comm.communicators import Communicator
from backbeat.comm.machine import cuda
from backbeat.comm.spin import SpinRate, spin_rate, until
from backbeat.errors import MeasurementError, first_line
from backbeat.measure.network.case import Case

_ELEMENT_BYTES = 4
# The first of them lines the ranks up, the others bring all to the same state: threads awake, links warm.
_ALIGN = 3
# In training the host runs ahead of the device. In a sample it starts with it, and what it has not queued in time would
# count as communication, on every rank, since all wait for the slowest. So the device first spins, on all ranks equally
# long, and by this margin longer than the slowest host needs; until that is known, for this long per collective.
_FIRST_PACE_S = 300e-6
_PACE_SAMPLES = 16
_LEAD_MARGIN = 2.0
_RESOLUTION_S = 1e-6


class Bench:
    """Times cases over a set of communicators."""

    def __init__(
        self,
        communicators: Sequence[Communicator],
        *,
        workers: int,
        device: torch.device,
        timeout_s: float,
        idle: bool = True,
    ) -> None:
        """`idle`: the device does nothing else; False in a job that trains, where no time is spent to wake it."""
        self.workers = workers
        self.device = device
        self._communicators = communicators
        self._idle = idle
        self._timeout_s = timeout_s
        self._tiny = torch.zeros(1, device=device)
        self._rooms = {kind: torch.zeros(0, device=device) for kind in ("whole", "shard")}
        self._begun = math.nan
        self._paces: deque[float] = deque(maxlen=_PACE_SAMPLES)
        self.pace_s = _FIRST_PACE_S
        """What the slowest rank's host needs to queue one collective."""
        self.timed = 0
        self.late = 0
        """Samples on a device, and those of them in which this host was still queueing when the spin ended."""

    def connect(self, cases: Iterable[Case]) -> None:
        """Run each case once, and start the clock: connecting takes a communicator up to a second, which is no part of
        the budget, nor of a host's pace."""
        for case in cases:
            self.sample(case)
        self._paces.clear()
        self.timed = self.late = 0
        self._begun = time.perf_counter()

    def sample(self, case: Case) -> float:
        """This rank's own time of one run. Pass it through `largest_over_ranks` before anything is decided by it."""
        with explained(str(case)):
            launch = self._launcher(case)
            if self.device.type == "cuda":
                return self._sample_cuda(launch, case.messages * (2 if case.paired else 1))
            # Gradients are written just before they leave: without this, what the cache holds depends on the last case.
            self._rooms["whole"][: max(1, case.bytes * case.messages // _ELEMENT_BYTES)].fill_(0.0)
            for _ in range(_ALIGN):
                self._communicators[0].all_reduce(self._tiny).wait()
            start = time.perf_counter()
            for work in launch():
                work.wait()
            return time.perf_counter() - start

    def largest_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The element-wise largest over all ranks: the same on every rank, so that all take the same decisions."""
        with explained("agreeing on times"):
            pace = statistics.median(self._paces) if self._paces else _FIRST_PACE_S
            *agreed, self.pace_s = max_over_ranks(self._communicators[0], [*values, pace], self.device, self._timeout_s)
            return agreed

    def elapsed(self) -> float:
        """Seconds since the bench was connected, on this rank's clock."""
        if math.isnan(self._begun):
            raise RuntimeError("the bench is not connected: call connect() before anything is timed against a budget")
        return time.perf_counter() - self._begun

    def _sample_cuda(self, launch: Callable[[], list[Any]], messages: int) -> float:
        rate, start, end = self._device_clock
        for _ in range(_ALIGN):
            self._communicators[0].all_reduce(self._tiny).wait()
        queueing = time.perf_counter()
        # A device that is idle would start its clock at once, and wait for the host's next call on it.
        rate.spin(_LEAD_MARGIN * self.pace_s)
        start.record()
        lead_s = rate.spin(_LEAD_MARGIN * self.pace_s * (messages + 1))
        for work in launch():
            work.wait()
        end.record()
        queued_s = time.perf_counter() - queueing
        self.timed += 1
        self.late += queued_s > lead_s
        self._paces.append(queued_s / (messages + 1))
        until(end, self._timeout_s)
        return max(float(start.elapsed_time(end)) * 1e-3 - lead_s, _RESOLUTION_S)

    @cached_property
    def _device_clock(self) -> tuple[SpinRate, Any, Any]:
        """Made once: an event of its own can take a host longer than a small message takes the network."""
        return spin_rate(idle=self._idle), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)

    def _launcher(self, case: Case) -> Callable[[], list[Any]]:
        elements = max(1, math.ceil(case.bytes / _ELEMENT_BYTES))
        communicators = self._communicators[: case.communicators]
        if case.collective in ("all_gather", "reduce_scatter"):
            # All-gathers on the first communicator, reduce-scatters on the last; a pair's have memory of their own.
            kinds, per_rank = 2 if case.paired else 1, math.ceil(elements / self.workers)
            wholes = self._room(kinds * per_rank * self.workers).chunk(kinds)
            shards = self._room(kinds * per_rank, "shard").chunk(kinds)
            gather = partial(communicators[0].all_gather, wholes[0], shards[0])
            scatter = partial(communicators[-1].reduce_scatter, shards[-1], wholes[-1])
            turn = [gather, scatter] if case.paired else [gather if case.collective == "all_gather" else scatter]
            return lambda: [send() for _ in range(case.messages) for send in turn]
        room = self._room(elements * case.messages)
        if case.collective == "broadcast":
            return lambda: [communicators[0].broadcast(room[:elements])]
        pieces = [room[index * elements : (index + 1) * elements] for index in range(case.messages)]
        return lambda: [
            communicators[index % case.communicators].all_reduce(piece) for index, piece in enumerate(pieces)
        ]

    def _room(self, elements: int, kind: str = "whole") -> torch.Tensor:
        if self._rooms[kind].numel() < elements:
            # Written once, so that no sample pays for the first touch of a page; zeros, so that sums stay finite.
            self._rooms[kind] = torch.empty(elements, device=self.device).fill_(0.0)
        return self._rooms[kind][:elements]


def max_over_ranks(
    communicator: Communicator, values: Sequence[float], device: torch.device, timeout_s: float
) -> list[float]:
    """The element-wise largest over all ranks."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    communicator.all_reduce_max(shared).wait()
    until_idle(device, timeout_s)
    return [float(value) for value in shared.tolist()]


def until_idle(device: torch.device, timeout_s: float) -> None:
    """Wait until a GPU has done what its stream holds; on a CPU, what was called is done."""
    if device.type == "cuda":
        done = cuda.Event()
        done.record()
        until(done, timeout_s)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What goes wrong inside becomes one line that says where it happened and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MeasurementError(f"out of memory at {what}: measure smaller messages with --sizes") from error
    except (RuntimeError, TimeoutError) as error:
        raise MeasurementError(
            f"calibration stopped at {what}, nothing was written: a worker died or cannot be reached "
            f"({first_line(error)}); look at its log and start all workers again"
        ) from error
