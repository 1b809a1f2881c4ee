"""One rank's part of an iteration: its compute slept or spun, its gradients really reduced.

A rank starts each iteration with a tiny all-reduce, so that all start together, and takes the time on its own clock;
the controller keeps the longest of all ranks. Messages leave from one thread, in plan order, when the last of their
gradients is ready. Nothing else of training is replayed: no copies into buckets and no host work of autograd.

A sharded plan is not replayed but run, and only its computation is spun or slept; so are layouts of tensor and pipeline
parallelism (`spun_steps`).
"""

from __future__ import annotations

import ctypes
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from backbeat.comm.communicators import Communicator
from backbeat.comm.machine import cuda
from backbeat.comm.spin import SpinRate, spin_rate, until
from backbeat.lab.jobs import LabJob, LayoutJob, RankResult, ReplayJob, SpunJob, TransferJob, Turn
from backbeat.measure.network.bench import max_over_ranks

if TYPE_CHECKING:
    from backbeat.lab.spun_steps import SpunStep

_PR_SET_TIMERSLACK = 29
# The host queues this much ahead of the GPU before an iteration begins, as it does in training.
_LEAD_S = 400e-6
# Before a step that torch runs, as long as the slowest host takes to queue all of it, and this much longer: the host of
# a training loop is an iteration ahead.
_LEAD_MARGIN = 1.5
_WARM_UP = 2
_WAIT_S = 120.0
# A sleeper this late has overslept; later than this it has waited for a collective.
_LATE_S = 100e-6


def replay(
    player: Player, jobs: Sequence[LabJob], turns: Sequence[Turn], factor: Callable[[], float]
) -> list[RankResult]:
    """Warm every job up once, with its messages' finish times noted, then take the turns."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        results = []
        for job in jobs:
            finishes: list[float] = []
            player.play(job, factor(), finishes)
            results.append(RankResult(series=([], []), finishes=finishes))
        for turn in turns:
            for _ in range(turn.iterations):
                results[turn.job].series[turn.series].append(player.play(jobs[turn.job], factor()))
    finally:
        player.forget()
        if collecting:
            gc.enable()
    return results


class Player(ABC):
    """Plays jobs on one rank. The models of those that torch runs are made when they are first played."""

    def __init__(self, communicators: Sequence[Communicator], device: torch.device) -> None:
        self._communicators = communicators
        self._device = device
        self._flat = torch.zeros(0, device=device)
        self._tiny = torch.zeros(1, device=device)
        self._steps: dict[SpunJob, SpunStep] = {}
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}

    def play(self, job: LabJob, factor: float, finishes: list[float] | None = None) -> float:
        """Seconds of one iteration; `finishes` gets when each message was done, after backward started."""
        if isinstance(job, ReplayJob):
            return self._replay(job, factor, finishes)
        if job not in self._steps:
            self._steps[job] = self._made(job)
        return self._run(job, self._steps[job], factor)

    def forget(self) -> None:
        """Free what was made for jobs."""
        self._steps.clear()
        gc.collect()

    @abstractmethod
    def _replay(self, job: ReplayJob, factor: float, finishes: list[float] | None) -> float: ...

    @abstractmethod
    def _run(self, job: SpunJob, step: SpunStep, factor: float) -> float: ...

    def _views(self, job: ReplayJob) -> list[torch.Tensor]:
        """One flat buffer, cut into the job's messages; zeros, so that sums stay what they are."""
        elements = [max(1, -(-message.bytes // 4)) for message in job.messages]
        if self._flat.numel() < sum(elements):
            self._flat = torch.empty(0, device=self._device)
            self._flat = torch.empty(sum(elements), device=self._device).fill_(0.0)
        return list(self._flat[: sum(elements)].split(elements))

    def _made(self, job: SpunJob) -> SpunStep:
        from backbeat.lab.spun_steps import LayoutStep, ShardedStep, TransferStep

        if isinstance(job, LayoutJob):
            return LayoutStep(job, self._device)
        if isinstance(job, TransferJob):
            return TransferStep(job, self._device)
        from backbeat.runtime.sharded.shard import mesh_of

        assert job.plan.sharding is not None
        sizes = (job.plan.sharding.mesh.replicate, job.plan.sharding.mesh.shard)
        # Every mesh of two dimensions makes communicators of its own.
        if sizes not in self._meshes:
            self._meshes[sizes] = mesh_of(job.plan, job.plan.sharding, None)
        return ShardedStep(job, self._device, self._meshes[sizes])


class SleepingPlayer(Player):
    """On a CPU: compute is slept, so that ranks sharing few cores do not take them from the network's threads."""

    def __init__(self, communicators: Sequence[Communicator], stock: Communicator) -> None:
        super().__init__(communicators, torch.device("cpu"))
        self._stock = stock
        # The kernel may wake a sleeper up to 50 µs late unless told otherwise.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def _replay(self, job: ReplayJob, factor: float, finishes: list[float] | None) -> float:
        views = self._views(job)
        self._communicators[0].all_reduce(self._tiny).wait()
        start = time.perf_counter()
        backward = start + job.forward_s * factor
        works = []
        done: dict[int, float] = {}
        for index, (message, view) in enumerate(zip(job.messages, views, strict=True)):
            _sleep_until(backward + message.ready_s * factor)
            communicator = self._stock if job.stock else self._communicators[message.communicator]
            works.append(communicator.all_reduce(view))
            if finishes is not None:
                # The thread of gloo's that finished it writes the time down.
                works[-1].get_future().add_done_callback(partial(_note_time, done, index))
        _sleep_until(backward + job.backward_s * factor)
        for work in works:
            work.wait()
        ended = time.perf_counter()
        if finishes is not None:
            finishes += [done.get(index, ended) - backward for index in range(len(works))]
        # Nothing happens during the update: it is added, not slept.
        return ended - start + job.update_s * factor

    def _run(self, job: SpunJob, step: SpunStep, factor: float) -> float:
        self._communicators[0].all_reduce(self._tiny).wait()
        start = reached = time.perf_counter()

        def compute(seconds: float) -> None:
            nonlocal reached
            reached = max(reached, time.perf_counter() - _LATE_S) + seconds * factor
            _sleep_until(reached)

        step.run(compute)
        return time.perf_counter() - start


def _note_time(done: dict[int, float], index: int, _future: Any) -> None:
    done[index] = time.perf_counter()


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class SpinningPlayer(Player):
    """On a GPU: compute spins on one multiprocessor in the current stream, so that each rank has its own share."""

    def __init__(self, communicators: Sequence[Communicator], device: torch.device) -> None:
        super().__init__(communicators, device)
        self._leads: dict[SpunJob, float] = {}
        self._probe = cuda.Stream(device)
        self._start, self._end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self.rate = spin_rate()

    def _replay(self, job: ReplayJob, factor: float, finishes: list[float] | None) -> float:
        views = self._views(job)
        spin = self._begin()
        spin.until(job.forward_s * factor)
        works = []
        for message, view in zip(job.messages, views, strict=True):
            spin.until((job.forward_s + message.ready_s) * factor)
            works.append(self._communicators[message.communicator].all_reduce(view))
        spin.until((job.forward_s + job.backward_s) * factor)
        seen = [self._seen(work) for work in works] if finishes is not None else []
        for work in works:
            work.wait()
        self.rate.spin(job.update_s * factor)
        return self._ended(finishes, seen, job.forward_s * factor)

    def _run(self, job: SpunJob, step: SpunStep, factor: float) -> float:
        known = job in self._leads
        # The first steps set streams up and learn the order of units.
        for _ in range(0 if known else _WARM_UP):
            step.run(lambda seconds: None)
        spin = self._begin(self._leads.get(job, _LEAD_S))
        queueing = time.perf_counter()
        computed = 0.0

        def compute(seconds: float) -> None:
            nonlocal computed
            computed += seconds * factor
            spin.until(computed)

        step.run(compute)
        queued_s = time.perf_counter() - queueing
        seconds = self._ended(None, (), 0.0)
        if not known:
            (slowest_s,) = max_over_ranks(self._communicators[0], [queued_s], self._tiny.device, _WAIT_S)
            self._leads[job] = slowest_s * _LEAD_MARGIN
        return seconds

    def forget(self) -> None:
        super().forget()
        self._leads.clear()

    def _begin(self, lead_s: float = _LEAD_S) -> _Spin:
        """All ranks together."""
        spin = _Spin(self.rate)
        self._communicators[0].all_reduce(self._tiny).wait()
        self.rate.spin(lead_s)
        self._start.record()
        return spin

    def _ended(self, finishes: list[float] | None, seen: Sequence[Any], backward_s: float) -> float:
        """How long the iteration took; `finishes` gets when each event was, from the start of backward."""
        self._end.record()
        until(self._end, _WAIT_S)
        if finishes is not None:
            self._probe.synchronize()
            finishes += [float(self._start.elapsed_time(event)) * 1e-3 - backward_s for event in seen]
        return float(self._start.elapsed_time(self._end)) * 1e-3

    def _seen(self, work: Any) -> Any:
        event = cuda.Event(enable_timing=True)
        with cuda.stream(self._probe):
            work.wait()
            event.record()
        return event


class _Spin:
    """Kernels that keep the stream busy until given moments. What one takes too long is taken off the next."""

    def __init__(self, rate: SpinRate) -> None:
        self._rate = rate
        self._reached_s = 0.0

    def until(self, moment_s: float) -> None:
        left = moment_s - self._reached_s
        if left > self._rate.overhead_s:
            self._reached_s += self._rate.spin(left)
