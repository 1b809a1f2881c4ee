"""What `model.report()` returns: how the buckets of a training job run, predicted against measured, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from backbeat.units import first_to_last, format_bytes, format_seconds


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
    return (
        f"{index:6d}  {bucket.communicator:12d}  {format_bytes(bucket.bytes):>9s}  "
        f"{_time(bucket.predicted_launch_s):>16s} / {_time(bucket.launched_s):<8s}  "
        f"{_time(bucket.predicted_done_s):>14s} / {_time(bucket.done_s):<8s}  {first_to_last(bucket.gradients)}"
    )


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
