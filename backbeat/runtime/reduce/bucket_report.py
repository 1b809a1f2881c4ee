"""What `model.report()` tells: for each bucket, what was predicted and what was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Prediction
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

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {self.state}, {self.steps} steps, {len(self.buckets)} buckets",
            f"iteration  predicted {_time(self.predicted_iteration_s)}  measured {_time(self.iteration_s)}",
            f"exposed    predicted {_time(self.predicted_exposed_s)}  measured {_time(self.exposed_s)}",
            f"{'bucket':8s}{_HEADING}",
        ]
        lines.extend(_row(index, bucket) for index, bucket in enumerate(self.buckets))
        lines.extend(self.history)
        return "\n".join(lines)


_HEADING = "communicator      bytes  launch predicted / measured     done predicted / measured  gradients"


def _row(index: int, bucket: BucketReport) -> str:
    first, last = bucket.gradients[0], bucket.gradients[-1]
    names = first if len(bucket.gradients) == 1 else f"{first} … {last} ({len(bucket.gradients)})"
    return (
        f"{index:6d}  {bucket.communicator:7d}  {format_bytes(bucket.bytes):>9s}  "
        f"{_time(bucket.predicted_launch_s):>16s} / {_time(bucket.launched_s):<8s}  "
        f"{_time(bucket.predicted_done_s):>14s} / {_time(bucket.done_s):<8s}  {names}"
    )


def spans(prediction: Prediction | None) -> list[tuple[float, float]]:
    """Predicted (start, end) of each bucket from the start of backward, in launch order."""
    if prediction is None:
        return []
    backward = next((span.start_s for span in prediction.timeline if span.name == "backward"), 0.0)
    return [
        (span.start_s - backward, span.end_s - backward)
        for span in prediction.timeline
        if span.lane.startswith("communicator") and span.name != "buffers"
    ]


def measured(left: Sequence[dict[int, float]], back: Sequence[dict[int, float]], index: int) -> Times:
    """Median launch and completion of one bucket, over steps."""
    launched = [found[index] for found in left if index in found]
    done = [found[index] for found in back if index in found]
    return (statistics.median(launched) if launched else None, statistics.median(done) if done else None)


def make_report(reducer: Reducer) -> Report:
    """How a reducer's buckets ran."""
    tuner, plan = reducer.tuner, reducer.settings.plan
    recorded = reducer.recorder.steps() or (tuner.timed if tuner is not None else [])
    timed = [found for found in recorded if len(found.launched_s) == len(reducer.buckets)]
    prediction = tuner.prediction if tuner is not None else None
    predicted = spans(prediction)
    buckets = []
    for index, bucket in enumerate(reducer.buckets):
        launched, done = measured([one.launched_s for one in timed], [one.done_s for one in timed], index)
        begin, end = predicted[index] if len(predicted) == len(reducer.buckets) else (None, None)
        buckets.append(
            BucketReport(
                gradients=tuple(reducer.names[place] for place in bucket.members),
                communicator=bucket.spec.communicator,
                bytes=bucket.bytes,
                predicted_launch_s=begin,
                predicted_done_s=end,
                launched_s=launched,
                done_s=done,
            )
        )
    forecast = plan.predicted if plan is not None and plan.predicted else {}
    exposed = statistics.median([found.exposed_s for found in timed]) if timed else None
    return Report(
        strategy=reducer.partition.strategy,
        state=tuner.state if tuner is not None else "running",
        steps=reducer.steps,
        buckets=tuple(buckets),
        predicted_iteration_s=prediction.iteration_s if prediction else _figure(forecast.get("iteration_s")),
        predicted_exposed_s=prediction.exposed_s if prediction else _figure(forecast.get("exposed_s")),
        iteration_s=tuner.iteration_s if tuner is not None else None,
        exposed_s=exposed if exposed is not None else (tuner.exposed_s if tuner is not None else None),
        late_buckets=reducer.late_buckets,
        history=tuple(tuner.history) if tuner is not None else (),
    )


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
