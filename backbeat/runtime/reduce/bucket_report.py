"""What `model.report()` tells: for each bucket, what was predicted and what was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.model import PlanPrediction
from backbeat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backbeat.model import Plan
    from backbeat.runtime.reduce.reducer import Reducer

Times = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket; times count from the start of backward. None where nothing was measured or predicted."""

    gradients: tuple[str, ...]
    communicator: int
    bytes: int
    predicted_launch_s: float | None = None
    predicted_done_s: float | None = None
    launched_s: float | None = None
    done_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the buckets run, predicted against measured."""

    strategy: str
    state: str
    steps: int
    buckets: tuple[BucketReport, ...]
    predicted_iteration_s: float | None = None
    predicted_exposed_s: float | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None
    late_buckets: int = 0
    """Buckets sent a second time because a gradient came late."""
    history: tuple[str, ...] = ()
    """What the tuner did, in order."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {self.state}, {self.steps} steps, {len(self.buckets)} buckets",
            f"iteration  predicted {_time(self.predicted_iteration_s)}  measured {_time(self.iteration_s)}",
            f"exposed    predicted {_time(self.predicted_exposed_s)}  measured {_time(self.exposed_s)}",
            _HEADING,
        ]
        lines.extend(_row(index, bucket) for index, bucket in enumerate(self.buckets))
        lines.extend(f"* {note}" for note in self.notes)
        lines.extend(self.history)
        return "\n".join(lines)


_HEADING = "bucket  communicator      bytes  launch predicted / measured  done predicted / measured  gradients"


def _row(index: int, bucket: BucketReport) -> str:
    first, last = bucket.gradients[0], bucket.gradients[-1]
    names = first if len(bucket.gradients) == 1 else f"{first} … {last} ({len(bucket.gradients)})"
    return (
        f"{index:6d}  {bucket.communicator:12d}  {format_bytes(bucket.bytes):>9s}  "
        f"{_time(bucket.predicted_launch_s):>16s} / {_time(bucket.launched_s):<8s}  "
        f"{_time(bucket.predicted_done_s):>14s} / {_time(bucket.done_s):<8s}  {names}"
    )


def measured(left: Sequence[dict[int, float]], back: Sequence[dict[int, float]], index: int) -> Times:
    """Median launch and completion of one bucket, over steps."""
    return _median(found.get(index) for found in left), _median(found.get(index) for found in back)


def make_report(reducer: Reducer) -> Report:
    """How a reducer's buckets ran."""
    tuner = reducer.tuner
    plan = tuner.plan if tuner is not None else reducer.settings.plan
    recorded = reducer.recorder.steps() or (tuner.timed if tuner is not None else [])
    timed = [found for found in recorded if len(found.launched_s) == len(reducer.buckets)]
    forecast = plan.predicted if plan is not None and plan.predicted is not None else PlanPrediction()
    predicted = _predicted(plan)
    buckets = []
    for index, bucket in enumerate(reducer.buckets):
        launched, done = measured([one.launched_s for one in timed], [one.done_s for one in timed], index)
        gradients = tuple(reducer.names[place] for place in bucket.members)
        begin, end = predicted.get(frozenset(gradients), (None, None))
        buckets.append(
            BucketReport(
                gradients=gradients,
                communicator=bucket.spec.communicator,
                bytes=bucket.bytes,
                predicted_launch_s=begin,
                predicted_done_s=end,
                launched_s=launched,
                done_s=done,
            )
        )
    exposed = _median(found.exposed_s for found in timed)
    iteration = tuner.iteration_s if tuner is not None else None
    return Report(
        strategy=reducer.partition.strategy,
        state=tuner.state if tuner is not None else "running",
        steps=reducer.steps,
        buckets=tuple(buckets),
        predicted_iteration_s=forecast.iteration_s,
        predicted_exposed_s=forecast.exposed_s,
        iteration_s=iteration if iteration is not None else _median(found.iteration_s for found in timed),
        exposed_s=exposed if exposed is not None else (tuner.exposed_s if tuner is not None else None),
        late_buckets=reducer.late_buckets,
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


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
