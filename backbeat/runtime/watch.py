"""A running job, watched: a few steps in fifty are timed on every rank, and rank 0 tells what they show.

    watch = Watch(model, log="watch.jsonl")        # model: backbeat's DistributedDataParallel; keep the watch

`backbeat watch watch.jsonl` shows the file in a terminal. `to` takes functions that get each sample on rank 0:
`runtime/integrations/watching.py` has some for TensorBoard and Weights & Biases, and callbacks for Lightning and the
Hugging Face Trainer. Alerts go to the logger `backbeat.runtime` too.
"""

from __future__ import annotations

import logging
import os
import statistics
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from backbeat.errors import InputError
from backbeat.report.drift import Drift, StepSample
from backbeat.runtime.reduce.timing import Recorder, median

if TYPE_CHECKING:
    from backbeat.model import Plan
    from backbeat.runtime.reduce.timing import TimedStep

logger = logging.getLogger("backbeat.runtime")

EVERY = 50
TOGETHER = 3
"""Steps timed for one sample, the last ones before it is taken."""
FEWEST = 2 * TOGETHER
FIGURES = 5
"""What a rank tells of its steps."""


class Watch:
    """Samples one wrapped model's steps for as long as it is kept. Every rank makes one, with the same `every`."""

    def __init__(
        self,
        model: Any,
        *,
        every: int = EVERY,
        log: str | os.PathLike[str] | None = None,
        to: Sequence[Callable[[StepSample], None]] = (),
    ) -> None:
        """log: a file that rank 0 appends a line of JSON to for each sample. to: functions called with it on rank 0."""
        if every < FEWEST:
            raise InputError(f"every is {every}: it must be {FEWEST} steps or more, of which {TOGETHER} are timed")
        reducer: Any = getattr(model, "reducer", None)
        if not hasattr(reducer, "recorder"):
            raise InputError(
                f"a {type(model).__name__} cannot be watched: give backbeat.runtime's DistributedDataParallel, with "
                "reducer='backbeat', that has been built"
            )
        self._reducer: Any = weakref.proxy(reducer)
        self._every = every
        self._log = None if log is None else Path(log)
        self._to = tuple(to)
        self._recorder = Recorder(reducer.device, keep=TOGETHER)
        self._drift = Drift()
        self.last: StepSample | None = None
        """The newest sample, on rank 0."""
        reducer.watch = weakref.WeakMethod(self._after_step)

    def _after_step(self) -> None:
        """At the end of each synchronised backward, on every rank alike."""
        reducer = self._reducer
        if reducer.steps % self._every == 0:
            timed = self._recorder.steps()
            self._recorder.clear()
            self._sample([one for one in timed if one.iteration_s is not None])
        context = reducer.runner.context
        if -(reducer.steps + 1) % self._every < TOGETHER and context.recorder is None:
            # Nobody else times the next step.
            self._recorder.follows()
            context.recorder = self._recorder

    def _sample(self, timed: Sequence[TimedStep]) -> None:
        communicators = self._reducer.communicators
        figures = torch.zeros(communicators.size, FIGURES, dtype=torch.float64, device=communicators.device)
        own = self._figures(timed)
        figures[communicators.rank] = torch.tensor(own, dtype=torch.float64)
        communicators[0].all_reduce(figures).wait()
        rows: list[list[float]] = figures.tolist()
        # A rank that ran out of data, or timed nothing, has no time of its own.
        if communicators.rank != 0 or any(row[0] <= 0 for row in rows):
            return
        sample = _over_ranks(self._reducer.steps, rows)
        sample = msgspec.structs.replace(sample, **self._predicted())
        alerts = self._drift.after(sample)
        self.last = sample = msgspec.structs.replace(sample, alerts=alerts)
        self._tell(sample)

    def _figures(self, timed: Sequence[TimedStep]) -> list[float]:
        if not timed:
            return [0.0] * FIGURES
        found = (
            median((one.iteration_s or 0.0) - one.exposed_s for one in timed),
            median(one.iteration_s for one in timed),
            median(one.exposed_s for one in timed),
            median(one.ended_s - min(one.launched_s.values(), default=one.ended_s) for one in timed),
            median(_transfer_s(one) for one in timed),
        )
        return [value or 0.0 for value in found]

    def _predicted(self) -> dict[str, float | None]:
        """What the plan promised for this number of ranks."""
        reducer = self._reducer
        plan: Plan | None = reducer.tuner.plan if reducer.tuner is not None else reducer.settings.plan
        if plan is None or plan.predicted is None or plan.workers not in (None, reducer.communicators.size):
            return {}
        predicted = plan.predicted
        spans = [done - launch for launch, done in zip(predicted.launch_s, predicted.done_s, strict=False)]
        if len(spans) != len(reducer.buckets):
            transfer = None
        else:
            transfer = sum(spans) if reducer.device.type == "cpu" else spans[-1]
        return {
            "predicted_iteration_s": predicted.iteration_s,
            "predicted_exposed_s": predicted.exposed_s,
            "predicted_transfer_s": transfer,
        }

    def _tell(self, sample: StepSample) -> None:
        for alert in sample.alerts:
            logger.warning("step %d: %s", sample.step, alert)
        tells = [*self._to, *([self._write] if self._log is not None else [])]
        for tell in tells:
            try:
                tell(sample)
            except Exception as error:
                # What only shows the job must not end it.
                logger.warning("step %d is not shown: %s: %s", sample.step, type(error).__name__, error)

    def _write(self, sample: StepSample) -> None:
        assert self._log is not None
        with self._log.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")


def _transfer_s(step: TimedStep) -> float:
    """All transfers where the end of each is known, otherwise, on a GPU, the last one."""
    if len(step.done_s) == len(step.launched_s):
        return sum(step.done_s[index] - launched for index, launched in step.launched_s.items())
    return step.ended_s - max(step.launched_s.values(), default=step.ended_s)


def _over_ranks(step: int, rows: Sequence[Sequence[float]]) -> StepSample:
    """One sample from every rank's figures. Who waits least for the others sees what communication itself takes."""
    own, iteration, exposed, span, transfer = zip(*rows, strict=True)
    least = min(range(len(rows)), key=lambda rank: exposed[rank])
    return StepSample(
        step=step,
        own_s=tuple(own),
        iteration_s=statistics.median(iteration),
        exposed_s=exposed[least],
        span_s=span[least],
        transfer_s=min(transfer) or None,
    )
