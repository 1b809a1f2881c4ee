"""Plans to compare, by name: every strategy, and groupings that no strategy would choose, to test the model with.

`ddp:5MB` is DDP with that bucket cap, `random:8` eight groups with random ends (always the same for one profile),
`equal:16` groups of about equal bytes; `/2` behind any of them asks for two channels.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backbeat.errors import InputError
from backbeat.model import Plan
from backbeat.planners import STRATEGIES, Draft
from backbeat.planners import plan as make
from backbeat.planners.decoupled import Halved
from backbeat.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Network, Profile

GROUPINGS = ("random", "equal")
_WITH_BUCKET = ("ddp", "horovod")
_SEVERAL = ("asc-wfbp", "best")
"""Use a second channel where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan yet to be made."""

    name: str
    strategy: str
    argument: int | None = None
    """Bytes of a bucket, or number of groups."""
    channels: int | None = None

    def widest(self, backend: str) -> int:
        """The most channels its plan can have."""
        if self.strategy == "ddp" and backend == "gloo":
            return 1
        return self.channels or (2 if self.strategy in _SEVERAL else 1)

    def stock(self, backend: str) -> bool:
        """Sent through torch's own process group, which on gloo carries two collectives at a time."""
        return self.strategy == "ddp" and backend == "gloo"


def parse(texts: Sequence[str], channels: Sequence[int] = ()) -> list[Choice]:
    """
    >>> [choice.name for choice in parse(["wfbp", "ddp:5MB"], [1, 2])]
    ['wfbp/1', 'wfbp/2', 'ddp:5MB/1', 'ddp:5MB/2']
    """
    found: dict[str, Choice] = {}
    for text in texts:
        for choice in _parse(text, channels):
            found[choice.name] = choice
    return list(found.values())


def _parse(text: str, channels: Sequence[int]) -> list[Choice]:
    body, slash, count = text.partition("/")
    strategy, colon, argument = body.partition(":")
    if strategy not in STRATEGIES and strategy not in GROUPINGS:
        raise InputError(f"{text!r} is no plan: use {', '.join(STRATEGIES)}, ddp:5MB, random:8 or equal:8")
    if colon and strategy not in (*_WITH_BUCKET, *GROUPINGS):
        raise InputError(f"{text!r}: {strategy} takes nothing behind a colon; ddp:5MB, random:8 and equal:8 do")
    if strategy in GROUPINGS and not (argument.isdigit() and int(argument) > 0):
        raise InputError(f"{text!r}: say how many groups, like {strategy}:8")
    if slash and not (count.isdigit() and int(count) > 0):
        raise InputError(f"{text!r}: say how many channels, like {body}/2")
    if strategy == "decoupled":
        if slash and int(count) != 1:
            raise InputError(f"{text!r}: decoupled plans use one channel; leave /{count} out")
        return [Choice(name=text, strategy=strategy)]
    value = None if not colon else int(argument) if strategy in GROUPINGS else parse_bytes(argument)
    if slash:
        return [Choice(name=text, strategy=strategy, argument=value, channels=int(count))]
    if not channels:
        return [Choice(name=text, strategy=strategy, argument=value)]
    return [Choice(name=f"{text}/{one}", strategy=strategy, argument=value, channels=one) for one in channels]


def build(choice: Choice, profile: Profile, network: Network) -> Plan:
    """The plan, with its groups fixed: what Horovod forms at run time is kept as its simulation formed it."""
    count = len(profile.gradients)
    if choice.strategy in GROUPINGS:
        groups = min(choice.argument or 1, count)
        ends = _random_ends(profile, groups) if choice.strategy == "random" else _equal_ends(profile, groups)
        return Draft(ends, choice.channels or 1).named(profile, choice.name, network.workers)
    channels = None if choice.stock(network.backend or "") else choice.channels
    made = make(
        profile,
        network,
        choice.strategy,
        channels=channels,
        bucket_bytes=choice.argument if choice.strategy in _WITH_BUCKET else None,
    )
    return msgspec.structs.replace(made, dynamic=None, predicted=None)


def _random_ends(profile: Profile, groups: int) -> list[int]:
    drawn = random.Random(f"{profile.name} {groups}")
    return [*sorted(drawn.sample(range(1, len(profile.gradients)), groups - 1)), len(profile.gradients)]


def _equal_ends(profile: Profile, groups: int) -> list[int]:
    sums = np.cumsum(profile.sizes)
    wanted = sums[-1] * np.arange(1, groups) / groups
    ends = {int(end) + 1 for end in np.searchsorted(sums, wanted)} | {len(profile.gradients)}
    return sorted(end for end in ends if end <= len(profile.gradients))


_PHASES = ("reduce_scatter", "all_gather")


def shorthand(plan: Plan) -> list[list[int]]:
    """[gradients, channel] of each group of a plan whose groups are consecutive in ready order.

    Decoupled plans have a third number: 0 for a scatter, in ready order, 1 for a gather, in the reverse.
    """
    return [
        [len(group.gradients), group.channel, *([] if group.phase is None else [_PHASES.index(group.phase)])]
        for group in plan.groups
    ]


def from_shorthand(groups: Sequence[Sequence[int]], profile: Profile, name: str, channels: int, workers: int) -> Plan:
    """The plan that `shorthand` described."""
    if any(len(row) > 2 for row in groups):
        scatter, gather = ([row[0] for row in groups if row[2] == phase] for phase in (0, 1))
        halved = Halved(np.cumsum(scatter).tolist(), np.cumsum(gather).tolist(), False)
        return halved.named(profile, name, workers)
    ends = np.cumsum([count for count, _ in groups]).tolist()
    draft = Draft(ends, channels, [channel for _, channel in groups])
    return draft.named(profile, name, workers)
