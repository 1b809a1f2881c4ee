"""Adaptive fusion, OSF's idea made precise: of all constant buffers, the one with the least predicted time.

A bucket closes once it has reached the buffer size B. As B grows from zero, the buckets stay the same until B passes
the smallest bucket that it closed. Walking from one such size to the next visits every bucketing that a constant buffer
can give: the choice is exact, not a grid. The bucketings depend on the gradients alone and are scored all at once. A
small first bucket lets the link start early, and only the end of communication is exposed. So a smaller first bucket
and smaller last ones are tried too, and kept where they are predicted to help.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import Network, Profile
from backbeat.model.framework import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES
from backbeat.planners.draft import Draft, StrategyOptions, soonest
from backbeat.steps.schedule import capped, running_sums
from backbeat.units import format_bytes

_EXACT_GRADIENTS = 1000
"""With more gradients than this, buffers grow by strides instead of visiting every bucketing."""
_STRIDE = 1.02
_ENGINE_CANDIDATES = 48


def adaptive(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    communicators, cost = options.communicators or 1, network.cost
    bucketings = _constant_buffers(tuple(profile.sizes.tolist()))

    if communicators == 1:
        chosen = int(np.argmin(_finishes(profile, cost, bucketings)))
    else:
        stride = -(-len(bucketings) // _ENGINE_CANDIDATES)
        thinned = [Draft(ends, communicators) for _, ends in bucketings[::stride]]
        chosen = stride * soonest(thinned, profile, cost)[1]
    buffer, ends = bucketings[chosen]
    # The first of equal ones, and so the constant buffer.
    drafts = [Draft(one, communicators) for one in (ends, *_with_smaller_ends(profile.sizes.tolist(), buffer, ends))]
    best = drafts[soonest(drafts, profile, cost)[1]].ends
    note = f"adaptive: a buffer of {format_bytes(buffer)}" + ("" if best is ends else ", smaller at head or tail")
    return Draft(best, communicators, notes=(note,))


@lru_cache(maxsize=32)
def _constant_buffers(sizes: tuple[float, ...]) -> list[tuple[float, list[int]]]:
    """(buffer, where its buckets end) for every bucketing that a constant buffer gives."""
    sums = running_sums(sizes)
    exact = len(sizes) <= _EXACT_GRADIENTS
    found: list[tuple[float, list[int]]] = []
    buffer = 0.0
    while True:
        ends = capped(list(sizes), [buffer], sums)
        if not found or found[-1][1] != ends:
            found.append((buffer, ends))
        if len(ends) == 1:
            return found
        smallest = float(np.diff(sums[[0, *ends[:-1]]]).min())
        buffer = smallest + 1 if exact else max(smallest + 1, buffer * _STRIDE, float(sums[-1]) / _EXACT_GRADIENTS)


def _finishes(profile: Profile, cost: LinkCost, bucketings: list[tuple[float, list[int]]]) -> NDArray[np.float64]:
    """The one-communicator finish of every bucketing: the recursion, one bucket of all of them at a time."""
    sums = running_sums(profile.sizes)
    longest = max(len(ends) for _, ends in bucketings)
    finish = np.full(len(bucketings), -np.inf)
    lengths = np.array([len(ends) for _, ends in bucketings])
    table = np.zeros((len(bucketings), longest), dtype=np.intp)
    for row, (_, ends) in enumerate(bucketings):
        table[row, : len(ends)] = ends
    starts = np.zeros(len(bucketings), dtype=np.intp)
    for index in range(longest):
        live = np.flatnonzero(lengths > index)
        stops = table[live, index]
        messages = sums[stops] - sums[starts[live]]
        ready = profile.ready[stops - 1]
        finish[live] = np.maximum(ready + cost.time(messages), finish[live] + cost.busy_time(messages))
        starts[live] = stops
    return finish


def _with_smaller_ends(sizes: list[float], buffer: float, ends: list[int]) -> Iterator[list[int]]:
    """A smaller first cap before this buffer, and before DDP's own; then the same buckets with what follows one of the
    last in other buckets by caps that shrink towards the end."""
    for cap in (buffer, float(DDP_BUCKET_BYTES)):
        for first in (float(DDP_FIRST_BUCKET_BYTES), cap / 8, cap / 4, cap / 2):
            yield capped(sizes, [first, cap])
    for kept in range(max(len(ends) - 4, 0), len(ends)):
        start = ends[kept - 1] if kept else 0
        tail = sizes[start:]
        total = sum(tail)
        for share in (0.9, 0.75, 0.5, 0.33, 0.25, 0.1):
            for caps in ([total * share], [total * share, total * (1 - share) / 2]):
                yield ends[:kept] + [start + end for end in capped(tail, caps)]
