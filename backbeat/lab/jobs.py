"""What the ranks are told to do: one iteration as plain numbers, and the order in which plans take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from backbeat.model import Plan, Profile
from backbeat.model.layout import Layout
from backbeat.steps.model_chain import Chain, ChainPiece
from backbeat.steps.schedule import Schedule
from backbeat.steps.stage_graph import StageTimes
from backbeat.steps.stage_layers import StageLayers

FEWEST_ITERATIONS = 6
MOST_ITERATIONS = 60
ROUNDS = 6
"""Even rounds make one series and odd rounds the other; the two are compared to see how well the lab repeats itself."""

TransferKind = Literal["send", "swap", "late", "all_gather", "reduce_scatter"]


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
    pieces: tuple[ChainPiece, ...]
    loose: tuple[int, ...]
    """Elements of the root's own parameters."""
    update_s: float
    """Of this rank's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """One training step under a layout of tensor and pipeline parallelism."""

    layout: Layout
    micro_batches: int
    rows: int
    """Tokens of a micro-batch."""
    row_bytes: int
    """Of one token's activation."""
    chunks: tuple[tuple[StageTimes, StageLayers], ...]
    """One micro-batch through each chunk, and what this holds; in the order of layers: chunk c of stage s is c · pp +
    s."""
    update_s: float

    @property
    def activation_bytes(self) -> int:
        """Of a micro-batch, over all ranks that share it."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """One collective or send by itself, as torch's pipelining and DTensor run it."""

    kind: TransferKind
    bytes: int
    """What an all-gather ends with, a reduce-scatter starts from, a send carries."""
    workers: int
    """Ranks of a group; groups of neighbours run side by side. A send goes from the first rank of two to the second, in
    a swap both send; `late` is a send whose receiver computes first."""
    late_s: float = 0.0


SpunJob = ShardedJob | LayoutJob | TransferJob
"""What torch runs itself, around computation that is spun or slept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    forward_s: float
    backward_s: float
    update_s: float
    messages: tuple[Message, ...] = ()
    """In launch order."""
    stock: bool = False
    """Through the process group itself, as stock DDP does it, and not through communicators of one collective each."""

    @classmethod
    def of(cls, profile: Profile, **more: Any) -> ReplayJob:
        """The profile's compute, alone unless `more` says otherwise."""
        return cls(forward_s=profile.forward_s, backward_s=profile.backward_s, update_s=profile.update_s, **more)


LabJob = ReplayJob | SpunJob


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive iterations of one job."""

    job: int
    iterations: int
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank saw of one job, or of training under one plan."""

    series: tuple[list[float], list[float]]
    """Iteration times of the even and of the odd rounds."""
    finishes: list[float] = field(default_factory=list)
    """When each message was done, after backward started, in the warm-up iteration; empty where torch runs the job."""
    losses: list[float] = field(default_factory=list)
    """Of every training step in order, the warm-up included."""
    peak_bytes: int | None = None
    """The most that was allocated on the device in timed training steps, other plans' tensors included; None on a
    CPU."""


def lab_job(profile: Profile, plan: Plan, *, stock: bool = False) -> LabJob:
    """The plan's buckets as messages; `dynamic` fusion is replayed as the buckets that its simulation formed."""
    if plan.sharding is not None:
        whole = Chain.of_profile(profile)
        update_s = profile.update_s / plan.sharding.mesh.shard
        return ShardedJob(plan=plan, pieces=whole.pieces, loose=whole.loose, update_s=update_s)
    schedule, _ = Schedule.of_plan(profile, plan)
    rows = zip(schedule.ready.tolist(), schedule.sizes.tolist(), schedule.communicators, strict=True)
    messages = tuple(Message(bytes=int(size), ready_s=ready, communicator=number) for ready, size, number in rows)
    return ReplayJob.of(profile, messages=messages, stock=stock)


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


def turns_s(expected_s: Sequence[float], seconds_each: float) -> float:
    """What the turns of these jobs will take, warm-up included."""
    return sum(one * (ROUNDS * per_round(one, seconds_each) + 1) for one in expected_s)


def slowdowns(slowdown: float, jitter: float, seed: int) -> Callable[[], float]:
    """A rank's compute, iteration by iteration: its own constant slowdown times a lognormal jitter of mean one."""
    if jitter <= 0:
        return lambda: slowdown
    drawn = random.Random(seed)
    return lambda: slowdown * drawn.lognormvariate(-(jitter**2) / 2, jitter)
