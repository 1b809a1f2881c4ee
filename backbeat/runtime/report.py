"""What `model.report()` tells: for each group, what was predicted and what was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Prediction
    from backbeat.runtime.timing import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group; times count from the start of backward. None where nothing was measured or predicted."""

    gradients: tuple[str, ...]
    channel: int
    bytes: int
    predicted_launch_s: float | None = None
    predicted_done_s: float | None = None
    launched_s: float | None = None
    done_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the groups run, predicted against measured."""

    strategy: str
    state: str
    steps: int
    groups: tuple[GroupReport, ...]
    predicted_iteration_s: float | None = None
    predicted_exposed_s: float | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None
    late_groups: int = 0
    """Groups sent a second time because a gradient came late."""
    history: tuple[str, ...] = ()
    """What the tuner did, in order."""

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {self.state}, {self.steps} steps, {len(self.groups)} groups",
            f"iteration  predicted {_time(self.predicted_iteration_s)}  measured {_time(self.iteration_s)}",
            f"exposed    predicted {_time(self.predicted_exposed_s)}  measured {_time(self.exposed_s)}",
            "group  channel      bytes  launch predicted / measured     done predicted / measured  gradients",
        ]
        for index, group in enumerate(self.groups):
            first, last = group.gradients[0], group.gradients[-1]
            names = first if len(group.gradients) == 1 else f"{first} … {last} ({len(group.gradients)})"
            lines.append(
                f"{index:5d}  {group.channel:7d}  {format_bytes(group.bytes):>9s}  "
                f"{_time(group.predicted_launch_s):>16s} / {_time(group.launched_s):<8s}  "
                f"{_time(group.predicted_done_s):>14s} / {_time(group.done_s):<8s}  {names}"
            )
        lines.extend(self.history)
        return "\n".join(lines)


def spans(prediction: Prediction | None) -> list[tuple[float, float]]:
    """Predicted (start, end) of each group from the start of backward, in launch order."""
    if prediction is None:
        return []
    backward = next((span.start_s for span in prediction.timeline if span.name == "backward"), 0.0)
    return [
        (span.start_s - backward, span.end_s - backward)
        for span in prediction.timeline
        if span.lane.startswith("channel") and span.name != "buffers"
    ]


def measured(rounds: Sequence[Round], group: int) -> tuple[float | None, float | None]:
    """Median launch and completion of one group."""
    launched = [round_.launched_s[group] for round_ in rounds if group in round_.launched_s]
    done = [round_.done_s[group] for round_ in rounds if group in round_.done_s]
    return (statistics.median(launched) if launched else None, statistics.median(done) if done else None)


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
