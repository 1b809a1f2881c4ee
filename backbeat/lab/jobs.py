"""What the ranks are told to do: one iteration as plain numbers, and the order in which plans take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backbeat.lab.layout_jobs import LayoutJob, TransferJob
from backbeat.model import Plan, Profile
from backbeat.simulate.schedule import Schedule
from backbeat.simulate.sharded_units import ModelPiece, ModelPieces

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
    communicator: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedJob:
    """One training step of FSDP2, on real parameters."""

    plan: Plan
    pieces: tuple[ModelPiece, ...]
    loose: tuple[int, ...]
    """Elements of the root's own parameters."""
    update_s: float
    """Of this rank's shards."""


SpunJob = ShardedJob | LayoutJob | TransferJob
"""What torch runs itself, around computation that is spun or slept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """One iteration to replay."""

    forward_s: float
    backward_s: float
    update_s: float
    messages: tuple[Message, ...] = ()
    """In launch order."""
    stock: bool = False
    """Through the process group itself, as stock DDP does it, and not through communicators of one collective each."""
    spun: SpunJob | None = None
    """Takes the place of all else, where the plan is sharded or a layout is run."""

    @classmethod
    def of(cls, profile: Profile, **more: Any) -> ReplayJob:
        """The profile's compute, alone unless `more` says otherwise."""
        return cls(forward_s=profile.forward_s, backward_s=profile.backward_s, update_s=profile.update_s, **more)

    @classmethod
    def run(cls, job: SpunJob) -> ReplayJob:
        """A job that torch runs, and nothing beside it."""
        return cls(forward_s=0.0, backward_s=0.0, update_s=0.0, spun=job)


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive iterations of one job."""

    job: int
    iterations: int
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one rank saw of one job."""

    series: tuple[list[float], list[float]]
    """Iteration times of the even and of the odd rounds."""
    finishes: list[float]
    """When each message was done, after backward started, in the warm-up iteration; empty where torch runs the job."""


def job_of(profile: Profile, plan: Plan, *, stock: bool = False) -> ReplayJob:
    """The plan's buckets as messages; `dynamic` fusion is replayed as the buckets that its simulation formed."""
    if plan.sharding is not None:
        whole = ModelPieces.of(profile)
        update_s = profile.update_s / plan.sharding.mesh.shard
        job = ShardedJob(plan=plan, pieces=whole.pieces, loose=whole.loose, update_s=update_s)
        return ReplayJob.of(profile, spun=job)
    schedule, _ = Schedule.of_plan(profile, plan)
    rows = zip(schedule.ready.tolist(), schedule.sizes.tolist(), schedule.communicators, strict=True)
    return ReplayJob.of(
        profile,
        messages=tuple(
            Message(bytes=int(size), ready_s=ready, communicator=communicator) for ready, size, communicator in rows
        ),
        stock=stock,
    )


def turns(expected_s: Sequence[float], seconds_each: float) -> list[Turn]:
    """Who plays when: every job in every round, each round in another order, so that drift touches all alike.

    >>> len(turns([0.1, 0.2], 1.2)), sum(turn.iterations for turn in turns([0.1, 0.2], 1.2) if turn.job == 0)
    (12, 12)
    """
    shuffled = random.Random(0)
    planned: list[Turn] = []
    for index in range(ROUNDS):
        order = list(range(len(expected_s)))
        shuffled.shuffle(order)
        planned += [Turn(job, per_round(expected_s[job], seconds_each), index % 2) for job in order]
    return planned


def per_round(expected_s: float, seconds_each: float) -> int:
    """Iterations of a job in one round."""
    total = seconds_each / max(expected_s, 1e-6)
    return round(min(max(total, FEWEST_ITERATIONS), MOST_ITERATIONS) / ROUNDS)


def seconds_of(expected_s: Sequence[float], seconds_each: float) -> float:
    """What the turns of these jobs will take, warm-up included."""
    return sum(one * (ROUNDS * per_round(one, seconds_each) + 1) for one in expected_s)


def slowdowns(slowdown: float, jitter: float, seed: int) -> Callable[[], float]:
    """A rank's compute, iteration by iteration: its own constant slowdown times a lognormal jitter of mean one."""
    if jitter <= 0:
        return lambda: slowdown
    drawn = random.Random(seed)
    return lambda: slowdown * drawn.lognormvariate(-(jitter**2) / 2, jitter)
