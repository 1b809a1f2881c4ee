"""When each gradient arrived, when each bucket left and was back; and `model.report()`, which compares predictions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from backbeat.model import Plan, PlanPrediction
from backbeat.report.tables.bucket_table import BucketReport, Report

if TYPE_CHECKING:
    from backbeat.runtime.reduce.reducer import Reducer


@dataclass(slots=True, kw_only=True)
class TimedStep:
    """One backward, in seconds from its start."""

    ready_s: dict[int, float] = field(default_factory=dict)
    """By parameter."""
    launched_s: dict[int, float] = field(default_factory=dict)
    """By bucket, in launch order."""
    done_s: dict[int, float] = field(default_factory=dict)
    computed_s: float = 0.0
    """When the last gradient arrived."""
    ended_s: float = 0.0
    """When the step was over: every bucket back."""
    iteration_s: float | None = None
    """From the end of the step before to the end of this one, where both were seen."""
    since_forward_s: float | None = None
    """From the step's forward to its end, likewise."""

    @property
    def exposed_s(self) -> float:
        """Communication left after the last gradient."""
        return max(self.ended_s - self.computed_s, 0.0)


class Recorder:
    """Times steps on the host's clock, or with events on the device's."""

    def __init__(self, device: torch.device, keep: int = 64) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._keep = keep
        self._steps: list[TimedStep | dict[str, Any]] = []
        """Times, or the marks that they will be told from once the device has passed them."""
        self._marks: dict[str, Any] = {}
        self._open = False
        self._before: Any = None
        """The end of the step before."""
        self._forward: Any = None

    def mark_step_end(self) -> None:
        """A step is over, and the next one will be timed."""
        self._before, self._forward = self._now(), None

    def forward_begins(self) -> None:
        if self._forward is None:
            self._forward = self._now()

    def begin(self, sync: bool) -> None:
        self._open = sync
        self._marks = {"begin": self._now(), "ready": {}, "launched": {}, "done": {}}

    def gradient(self, index: int) -> None:
        if self._open:
            self._marks["ready"][index] = self._now()

    def launched(self, index: int, work: Any) -> None:
        if not self._open:
            return
        self._marks["launched"][index] = self._now()
        done = self._marks["done"]
        if not self._cuda and hasattr(work, "get_future"):
            # The worker thread that finished the collective writes the time down.
            work.get_future().add_done_callback(lambda _: done.setdefault(index, time.perf_counter()))

    def end(self) -> None:
        if not self._open:
            return
        self._marks["end"] = self._now()
        self._marks["before"], self._before = self._before, None
        self._marks["forward"], self._forward = self._forward, None
        # Marks on the device hold memory of the driver: none is kept for longer than it takes to read.
        self._steps = [*map(self._passed, self._steps), self._marks][-self._keep :]
        self._open = False

    def steps(self) -> list[TimedStep]:
        """Every step measured so far."""
        if self._cuda and self._steps:
            torch.cuda.synchronize(self._device)
        self._steps = [self._passed(one) for one in self._steps]
        return [one if isinstance(one, TimedStep) else self._resolve(one) for one in self._steps]

    def clear(self) -> None:
        self._steps.clear()

    def _passed(self, one: TimedStep | dict[str, Any]) -> TimedStep | dict[str, Any]:
        # On the host the end of a step says nothing about buckets that are back later.
        if isinstance(one, TimedStep) or not self._cuda or not one["end"].query():
            return one
        try:
            return self._resolve(one)
        except RuntimeError:
            # Another stream has not passed its marks.
            return one

    def _resolve(self, marks: dict[str, Any]) -> TimedStep:
        begin, end = marks["begin"], marks["end"]
        ready = self._times(begin, marks["ready"])
        ended = self._since(begin, end)
        before, forward = marks["before"], marks["forward"]
        return TimedStep(
            ready_s=ready,
            launched_s=self._times(begin, marks["launched"]),
            done_s=self._times(begin, marks["done"]),
            computed_s=max(ready.values(), default=ended),
            ended_s=ended,
            iteration_s=None if before is None else self._since(before, end),
            since_forward_s=None if forward is None else self._since(forward, end),
        )

    def _times(self, begin: Any, marks: dict[int, Any]) -> dict[int, float]:
        # A copy: the thread that finishes a collective may write to it at this moment.
        return {index: self._since(begin, mark) for index, mark in dict(marks).items()}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, begin: Any, mark: Any) -> float:
        if not self._cuda:
            return float(mark - begin)
        return max(float(begin.elapsed_time(mark)) * 1e-3, 0.0)


def make_report(reducer: Reducer) -> Report:
    """How a reducer's buckets ran: those that run now, by their own prediction and by steps that ran under them."""
    tuner = reducer.tuner
    known = tuner.running if tuner is not None else None
    plan = reducer.running_plan
    recorded = reducer.recorder.steps() or (known.timed if known is not None else ())
    timed = [found for found in recorded if len(found.launched_s) == len(reducer.buckets)]
    forecast = plan.predicted if plan is not None and plan.predicted is not None else PlanPrediction()
    predicted = _predicted(plan)
    buckets = []
    for index, bucket in enumerate(reducer.buckets):
        gradients = tuple(reducer.managed.names[member] for member in bucket.members)
        begin, end = predicted.get(frozenset(gradients), (None, None))
        buckets.append(
            BucketReport(
                gradients=gradients,
                communicator=bucket.spec.communicator,
                bytes=bucket.bytes,
                predicted_launch_s=begin,
                predicted_done_s=end,
                launched_s=median(one.launched_s.get(index) for one in timed),
                done_s=median(one.done_s.get(index) for one in timed),
            )
        )
    exposed = median(found.exposed_s for found in timed)
    iteration = known.iteration_s if known is not None else None
    return Report(
        strategy=reducer.partition.strategy,
        state=tuner.state if tuner is not None else "running",
        steps=reducer.steps,
        buckets=tuple(buckets),
        predicted_iteration_s=forecast.iteration_s,
        predicted_exposed_s=forecast.exposed_s,
        iteration_s=iteration if iteration is not None else median(found.iteration_s for found in timed),
        exposed_s=exposed if exposed is not None else (known.exposed_s if known is not None else None),
        late_buckets=reducer.runner.context.late_buckets,
        history=tuple(tuner.history) if tuner is not None else (),
        notes=_notes(plan, reducer.communicators.size),
    )


def _predicted(plan: Plan | None) -> dict[frozenset[str], tuple[float, float]]:
    """Predicted launch and completion of each of the plan's buckets, by its gradients."""
    if plan is None or plan.predicted is None:
        return {}
    times = zip(plan.predicted.launch_s, plan.predicted.done_s, strict=False)
    return {frozenset(bucket.gradients): found for bucket, found in zip(plan.buckets, times, strict=False)}


def _notes(plan: Plan | None, ranks: int) -> tuple[str, ...]:
    if plan is None or plan.predicted is None or plan.workers in (None, ranks):
        return ()
    return (f"what is predicted is for {plan.workers} ranks, as the plan was made; this job has {ranks}",)


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
