"""When each gradient of a step arrived, and when each bucket left and was back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class TimedStep:
    """One backward, in seconds from its start."""

    number: int = 0
    """Which of the synchronised backwards."""
    began_s: float = 0.0
    """When the host began it, by `time.perf_counter`."""
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
    """Times steps on the host's clock, or with events on the device's.

    `comm.clock` hands events out again and again, and waits for the device to read them. Here some steps in hundreds
    are timed for as long as a job runs: events go once the device has passed them, and only who asks for times waits.
    """

    def __init__(self, device: torch.device, keep: int = 64) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._keep = keep
        self._steps: list[TimedStep | dict[str, Any]] = []
        """Times, or the marks that they are computed from once the device has passed them."""
        self._last = 0
        """The number of the last step that was timed."""
        self._cleared = 0
        """Steps up to this number are history."""
        self._marks: dict[str, Any] | None = None
        """Of the step under way, if it is timed."""
        self._before: Any = None
        """The end of the step before."""
        self._forward: Any = None

    def mark_step_end(self) -> None:
        """A step is over, and the next one will be timed."""
        self._before, self._forward = self._now(), None

    def forward_begins(self) -> None:
        if self._forward is None:
            self._forward = self._now()

    def begin(self, number: int, *, sync: bool) -> None:
        self._marks = None
        if sync:
            self._last = number
            marks: dict[str, Any] = {"number": number, "host": time.perf_counter(), "begin": self._now()}
            self._marks = {**marks, "ready": {}, "launched": {}, "done": {}}

    def gradient(self, index: int) -> None:
        if self._marks is not None:
            self._marks["ready"][index] = self._now()

    def launched(self, index: int, work: Any) -> None:
        if self._marks is None:
            return
        self._marks["launched"][index] = self._now()
        done = self._marks["done"]
        if not self._cuda and hasattr(work, "get_future"):
            # The worker thread that finished the collective writes the time down.
            work.get_future().add_done_callback(lambda _: done.setdefault(index, time.perf_counter()))

    def end(self) -> None:
        if self._marks is None:
            return
        self._marks.update(end=self._now(), before=self._before, forward=self._forward)
        # Marks on the device hold memory of the driver: none is kept for longer than it takes to read.
        self._steps = [*map(self._resolved_if_passed, self._steps), self._marks][-self._keep :]
        self._marks = self._before = self._forward = None

    def steps(self) -> list[TimedStep]:
        """Every step measured since `clear`."""
        return [one for one in self.history() if one.number > self._cleared]

    def history(self) -> list[TimedStep]:
        """Those before, too."""
        if self._cuda and self._steps:
            torch.cuda.synchronize(self._device)
        self._steps = list(map(self._resolved_if_passed, self._steps))
        return [one if isinstance(one, TimedStep) else self._resolve(one) for one in self._steps]

    def clear(self) -> None:
        """Other buckets run from the next step on, or other steps are asked for."""
        self._cleared = self._last

    def _resolved_if_passed(self, one: TimedStep | dict[str, Any]) -> TimedStep | dict[str, Any]:
        """The step's times once the device has passed its marks; until then its marks."""
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
            number=marks["number"],
            began_s=marks["host"],
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


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None where there is none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
