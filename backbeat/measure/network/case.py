"""What calibration times: cases, and which of them there are for given sizes and communicators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backbeat.cost.collectives import COLLECTIVES, Collective
from backbeat.model.framework import DDP_BUCKET_BYTES
from backbeat.units import doubling, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time: `messages` equal collectives issued at once, round robin over `communicators`."""

    collective: Collective = "all_reduce"
    bytes: int
    """The whole buffer: what all-gather ends with and reduce-scatter starts from."""
    messages: int = 1
    communicators: int = 1
    paired: bool = False
    """A reduce-scatter follows each all-gather: on the same communicator, or on a second one."""

    def __str__(self) -> str:
        name = f"{self.collective}{' and reduce_scatter' if self.paired else ''} {format_bytes(self.bytes)}"
        return name if self.messages == 1 else f"{name} × {self.messages} on {self.communicators}"


_ROUND_S, _ALL_REDUCE_ROUND_S = 2e-3, 12e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Cases from small to large, with the share of the budget that their obligatory repeats may take."""

    cases: tuple[Case, ...]
    share: float
    least: int = 0
    """This many cases are measured whatever they cost."""
    round_s: float = _ROUND_S
    """In each round a case is repeated until about this much time went into it."""


SIZES = tuple(sorted({*doubling(2**10, 2**28), *(3 << power for power in range(13, 21))}))
"""What is measured unless told otherwise: every octave, and twice as many from 24 KiB to 3 MiB, where libraries change
their protocol."""
JOB_SIZES = (4096, 65536, 524288, 2**20, 4 * 2**20, 16 * 2**20, DDP_BUCKET_BYTES, 64 * 2**20)
"""Where a job waits for it: up to DDP's own buckets, and beyond what any latency shows in."""
BATCH_SIZES = tuple(doubling(2**10, 2**24))
"""Back to back, on one communicator."""
SHARING_SIZES = BATCH_SIZES[::2]
"""On several: fewer, since two numbers are fitted to all of them."""
MESSAGES = 8
UNIT_SIZES = tuple(3 << power for power in range(20, 27))
"""From 3 to 192 MiB, beside the octaves: what units of sharded models have."""
PAIR_SIZES = tuple(doubling(2**20, 2**26))
"""All-gathers and reduce-scatters together: what units of sharded models have, and little of latency."""
PAIRS = 3

# Shares of the budget: the all-reduce, between the sizes of its curve, several at once, the other collectives,
# all-gathers and reduce-scatters together. The all-reduce curve is what every prediction stands on; for sharded plans
# it is those of its halves.
_SHARES = (0.4, 0.05, 0.3, 0.2, 0.05)
_SHARDED_SHARES = (0.2, 0.05, 0.1, 0.55, 0.1)
_BRIEF_SHARES = (0.35, 0.0, 0.1, 0.5, 0.05)


def held_out_cases(sizes: list[int]) -> tuple[Case, ...]:
    """All-reduces in the middle of every third interval of the curve: they check it, and are left out of it."""
    found = [
        Case(bytes=(small + large) // 8 * 4)
        for small, large in itertools.islice(itertools.pairwise(sizes), 1, None, 3)
        if large > small * 5 // 4 and small >= 16
    ]
    return tuple(case for case in found if case.bytes not in sizes)


def series_of(
    sizes: list[int],
    counts: list[int],
    collectives: Sequence[Collective],
    held_out: tuple[Case, ...] = (),
    *,
    sharded: bool = False,
    brief: bool = False,
) -> list[Series]:
    """What calibration measures, the most important first. `brief`: the sizes given and no others, whatever carries
    them."""
    shares = _BRIEF_SHARES if brief else _SHARDED_SHARES if sharded else _SHARES
    share, held_out_share, batch_share, others_share, pairs_share = shares
    octaves = [size for size in sizes if size & (size - 1) == 0]

    def isolated(collective: Collective) -> tuple[Case, ...]:
        # What every prediction stands on is measured more closely than the rest.
        chosen = sizes if collective == "all_reduce" or brief or len(octaves) < 2 else octaves
        if sharded and not brief and collective in ("all_gather", "reduce_scatter"):
            chosen = sorted({*chosen, *(size for size in UNIT_SIZES if sizes[0] <= size <= sizes[-1])})
        return tuple(Case(collective=collective, bytes=size) for size in chosen)

    batch_sizes = [size for size in BATCH_SIZES if sizes[0] <= size <= sizes[-1]] or [sizes[0], sizes[-1]]
    batches = tuple(
        Case(bytes=size, messages=MESSAGES, communicators=count)
        for size in dict.fromkeys(batch_sizes)
        for count in counts
        if count == 1 or size not in BATCH_SIZES or size in SHARING_SIZES
    )
    together = {"all_gather", "reduce_scatter"} <= set(collectives)
    pair_sizes = [size for size in PAIR_SIZES if sizes[0] <= size <= sizes[-1]] if together else []
    pairs = tuple(
        Case(collective="all_gather", bytes=size, messages=PAIRS, communicators=count, paired=True)
        for size in pair_sizes
        for count in (1, 2)
        if count in counts
    )
    others = [collective for collective in COLLECTIVES if collective in collectives and collective != "all_reduce"]
    found = [
        Series(cases=isolated("all_reduce"), share=share, least=2, round_s=_ROUND_S if brief else _ALL_REDUCE_ROUND_S),
        Series(cases=held_out, share=held_out_share, round_s=_ALL_REDUCE_ROUND_S),
        Series(cases=batches, share=batch_share),
        *(Series(cases=isolated(one), share=others_share / len(others), least=2 if sharded else 0) for one in others),
        Series(cases=pairs, share=pairs_share),
    ]
    if not brief:
        return found
    whole = sum(one.share for one in found if one.cases)
    return [replace(one, share=one.share / whole) for one in found if one.cases]


def smallest_of_each_kind(series: Iterable[Series]) -> list[Case]:
    """One for each collective and number of communicators: together they open every communicator."""
    cases = sorted((case for one in series for case in one.cases), key=lambda case: case.bytes)
    return list({(case.collective, case.communicators, case.paired): case for case in reversed(cases)}.values())


def message_sizes(model_bytes: int) -> tuple[int, ...]:
    """What a job measures its network with, for a model of so many bytes: none larger than all of it.

    >>> message_sizes(3 * 2**20)
    (4096, 65536, 524288, 1048576, 3145728)
    """
    largest = min(max(model_bytes, JOB_SIZES[1]), JOB_SIZES[-1])
    return (*(size for size in JOB_SIZES if size < largest), largest)
