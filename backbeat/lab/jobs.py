"""What the nodes are told to do: one iteration as plain numbers, and the order in which plans take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbeat.simulate.schedule import Schedule

if TYPE_CHECKING:
    from backbeat.model import Plan, Profile

FEWEST_ITERATIONS = 6
MOST_ITERATIONS = 60
ROUNDS = 6
"""Even rounds make one series and odd rounds the other; the two are compared to see how well the lab repeats itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective of an iteration."""

    bytes: int
    ready_s: float
    """After backward starts."""
    channel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One iteration to replay."""

    key: str
    forward_s: float
    backward_s: float
    update_s: float
    messages: tuple[Message, ...]
    """In launch order."""
    stock: bool = False
    """Through the process group itself, as stock DDP does it, and not through channels of one collective each."""

    @property
    def bytes(self) -> int:
        return sum(message.bytes for message in self.messages)


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive iterations of one job."""

    job: int
    iterations: int
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one node saw of one job."""

    series: tuple[list[float], list[float]]
    """Iteration times of the even and of the odd rounds."""
    finishes: list[float]
    """When each message was done, after backward started, in the warm-up iteration; empty where not traced."""


def job_of(key: str, profile: Profile, plan: Plan, *, stock: bool = False) -> Job:
    """The plan's groups as messages; `dynamic` fusion is replayed as the groups that its simulation formed."""
    schedule, _ = Schedule.of_plan(profile, plan)
    rows = zip(schedule.ready.tolist(), schedule.sizes.tolist(), schedule.channels, strict=True)
    return Job(
        key=key,
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        update_s=profile.update_s,
        messages=tuple(Message(bytes=int(size), ready_s=ready, channel=channel) for ready, size, channel in rows),
        stock=stock,
    )


def compute_of(profile: Profile) -> Job:
    """The compute alone."""
    return Job(
        key="compute",
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        update_s=profile.update_s,
        messages=(),
    )


def turns(expected_s: Sequence[float], seconds_each: float, seed: int = 0) -> list[Turn]:
    """Who plays when: every job in every round, each round in another order, so that drift touches all alike.

    >>> len(turns([0.1, 0.2], 1.2)), sum(turn.iterations for turn in turns([0.1, 0.2], 1.2) if turn.job == 0)
    (12, 12)
    """
    shuffled = random.Random(seed)
    planned: list[Turn] = []
    for place in range(ROUNDS):
        order = list(range(len(expected_s)))
        shuffled.shuffle(order)
        planned += [Turn(job, per_round(expected_s[job], seconds_each), place % 2) for job in order]
    return planned


def per_round(expected_s: float, seconds_each: float) -> int:
    """Iterations of a job in one round."""
    total = seconds_each / max(expected_s, 1e-6)
    return round(min(max(total, FEWEST_ITERATIONS), MOST_ITERATIONS) / ROUNDS)


def seconds_of(expected_s: Sequence[float], seconds_each: float) -> float:
    """What the turns of these jobs will take, warm-up included."""
    return sum(one * (ROUNDS * per_round(one, seconds_each) + 1) for one in expected_s)


def slowdowns(slowdown: float, jitter: float, seed: int) -> Callable[[], float]:
    """A node's compute, iteration by iteration: its own constant slowdown times a lognormal jitter of mean one."""
    if jitter <= 0:
        return lambda: slowdown
    drawn = random.Random(seed)
    return lambda: slowdown * drawn.lognormvariate(-(jitter**2) / 2, jitter)
