"""Plans to compare, by name: every strategy, and bucketings that no strategy would choose, to test the model with.

`ddp:5MB` is DDP with that bucket cap, `random:8` eight buckets with random ends (always the same for one profile),
`equal:16` buckets of about equal bytes; `/2` after any of them asks for two communicators. `hsdp:2` shards within
groups of two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.planners import BUCKETED, OTHERWISE_CALLED, SEVERAL, SHARDED, STRATEGIES, Draft
from backbeat.planners.planned import planned as make
from backbeat.units import parse_bytes

BUCKETINGS = ("random", "equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan yet to be made."""

    name: str
    strategy: str
    argument: int | None = None
    """Bytes of a bucket, or number of buckets, or of ranks that hold one copy of the model."""
    communicators: int | None = None

    def widest(self, backend: str) -> int:
        """The most communicators its plan can have."""
        if self.stock(backend):
            return 1
        return self.communicators or (2 if self.strategy in SEVERAL else 1)

    @property
    def sharded(self) -> bool:
        """Run on torch's own `fully_shard`."""
        return self.strategy in SHARDED

    def stock(self, backend: str) -> bool:
        """Sent through torch's own process group, which on gloo carries two collectives at a time."""
        return self.strategy == "ddp" and backend == "gloo"


def parse_plans(texts: Sequence[str], communicators: Sequence[int] = ()) -> list[PlanChoice]:
    """
    >>> [choice.name for choice in parse_plans(["wfbp", "ddp:5MB"], [1, 2])]
    ['wfbp/1', 'wfbp/2', 'ddp:5MB/1', 'ddp:5MB/2']
    """
    return list({choice.name: choice for text in texts for choice in _parse(text, communicators)}.values())


def _parse(text: str, communicators: Sequence[int]) -> list[PlanChoice]:
    body, slash, count = text.partition("/")
    strategy, colon, argument = body.partition(":")
    if strategy not in STRATEGIES and strategy not in BUCKETINGS:
        known = f"use {', '.join(STRATEGIES)}, ddp:5MB, random:8 or equal:8"
        raise InputError(f"{text!r} is no plan: {OTHERWISE_CALLED.get(strategy, known)}")
    if colon and strategy not in (*BUCKETED, *BUCKETINGS, "hsdp"):
        raise InputError(f"{text!r}: {strategy} takes nothing after a colon; ddp:5MB, random:8, equal:8 and hsdp:2 do")
    if strategy in BUCKETINGS and not (argument.isdigit() and int(argument) > 0):
        raise InputError(f"{text!r}: say how many buckets, like {strategy}:8")
    if slash and not (count.isdigit() and int(count) > 0):
        raise InputError(f"{text!r}: say how many communicators, like {body}/2")
    if strategy in SHARDED:
        if slash:
            raise InputError(f"{text!r}: FSDP2 opens its communicators itself; leave /{count} out")
        if colon and not (argument.isdigit() and int(argument) > 1):
            raise InputError(f"{text!r}: say how many ranks hold one copy of the model, like hsdp:2")
        communicators = ()
    value = None if not colon else parse_bytes(argument) if strategy in BUCKETED else int(argument)
    if slash or not communicators:
        chosen = int(count) if slash else None
        return [PlanChoice(name=text, strategy=strategy, argument=value, communicators=chosen)]
    return [
        PlanChoice(name=f"{text}/{one}", strategy=strategy, argument=value, communicators=one) for one in communicators
    ]


def build_plan(choice: PlanChoice, profile: Profile, network: Network) -> Plan:
    """The plan, with its buckets fixed: what Horovod forms at run time is kept as its simulation formed it."""
    count = len(profile.gradients)
    if choice.strategy in BUCKETINGS:
        buckets = min(choice.argument or 1, count)
        if choice.strategy == "random":
            ends = sorted(random.Random(f"{profile.name} {buckets}").sample(range(1, count), buckets - 1))
        else:
            sums = np.cumsum(profile.sizes)
            wanted = sums[-1] * np.arange(1, buckets) / buckets
            ends = sorted({int(end) + 1 for end in np.searchsorted(sums, wanted)} - {count})
        return Draft([*ends, count], choice.communicators or 1).named(profile, choice.name, network.workers)
    if choice.sharded:
        return replace(make(profile, network, choice.name), predicted=None)
    communicators = None if choice.stock(network.backend or "") else choice.communicators
    size = choice.argument if choice.strategy in BUCKETED else None
    made = make(profile, network, choice.strategy, communicators=communicators, bucket_bytes=size)
    return replace(made, dynamic=None, predicted=None)


def shorthand(plan: Plan) -> list[list[int]]:
    """[gradients, communicator] of each bucket of a plan whose buckets are consecutive in ready order.

    Of a sharded plan, [modules, whether it reshards] of each unit.
    """
    if plan.sharding is not None:
        return [[len(unit.modules), int(unit.reshard)] for unit in plan.sharding.units]
    return [[len(bucket.gradients), bucket.communicator] for bucket in plan.buckets]
