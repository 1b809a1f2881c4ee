"""A plan against a profile, reduced to the arrays the simulators need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from backbeat.model import Plan, Profile


def running_sums(sizes: ArrayLike) -> NDArray[np.float64]:
    """What comes before each, and all of it at the end.

    >>> running_sums([3, 4]).tolist()
    [0.0, 3.0, 7.0]
    """
    return np.concatenate([[0.0], np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class Schedule:
    """Groups in launch order."""

    ready: NDArray[np.float64]
    """When the last gradient of each group is ready, after backward starts."""
    sizes: NDArray[np.float64]
    """Bytes of each group."""
    channels: Sequence[int]
    """Channel of each group."""

    @classmethod
    def of_ends(cls, profile: Profile, ends: Sequence[int], channels: Sequence[int] | None = None) -> Schedule:
        """Consecutive groups in ready order, given by where each ends (the index after its last gradient)."""
        sums = running_sums(profile.sizes)
        stops = np.asarray(ends, dtype=np.intp)
        starts = np.concatenate([[0], stops[:-1]])
        return cls(profile.ready[stops - 1], sums[stops] - sums[starts], channels or [0] * len(stops))

    @classmethod
    def of_plan(cls, profile: Profile, plan: Plan) -> tuple[Schedule, list[tuple[str, ...]]]:
        """The plan's groups, and behind them what it does not name, as the drop-in sends it; and each group's names."""
        plan.check(profile)
        groups = [(group.gradients, group.channel) for group in plan.groups]
        missing = plan.missing(profile)
        if missing:
            groups.append((tuple(missing), 0))
        # Plain lists: most groups are small, and a numpy call costs more than adding a few numbers.
        place, ready, sizes = profile.index, profile.ready.tolist(), profile.sizes.tolist()
        members = [[place[name] for name in names] for names, _ in groups]
        return (
            cls(
                np.array([ready[max(indices)] for indices in members]),
                np.array([sum([sizes[index] for index in indices]) for indices in members]),
                [channel for _, channel in groups],
            ),
            [names for names, _ in groups],
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """When each group starts on its channel, reaches the link, and is done, after backward starts."""

    starts: NDArray[np.float64]
    on_link: NDArray[np.float64]
    finishes: NDArray[np.float64]

    @property
    def end_s(self) -> float:
        return float(self.finishes.max())
