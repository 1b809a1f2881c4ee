"""Adaptive fusion, OSF's idea made precise: of all constant buffers, the one with the least predicted time.

A group closes once it has reached the buffer size B. As B grows from zero the groups stay the same until B passes the
smallest group that it closed, so walking from one such size to the next visits every grouping a constant buffer can
give: the choice is exact, not a grid. The groupings depend on the gradients alone and are scored all at once.
A small first group lets the link start early, and only the end of communication is exposed: so a smaller head and
smaller groups at the tail are tried too, and kept where they are predicted to help.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from backbeat.planners.baselines import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES
from backbeat.planners.draft import Draft, Options, capped
from backbeat.simulate.schedule import running_sums
from backbeat.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from backbeat.cost import LinkCost
    from backbeat.model import Network, Profile

_EXACT_GRADIENTS = 1000
"""With more gradients than this, buffers grow by strides instead of visiting every grouping."""
_STRIDE = 1.02
_ENGINE_CANDIDATES = 48


def adaptive(profile: Profile, network: Network, options: Options) -> Draft:
    channels, cost = options.channels or 1, network.cost
    groupings = _constant_buffers(tuple(profile.sizes.tolist()))

    def end_s(ends: list[int]) -> float:
        return Draft(ends, channels).end_s(profile, cost)

    if channels == 1:
        chosen = int(np.argmin(_finishes(profile, cost, groupings)))
    else:
        thinned = range(0, len(groupings), -(-len(groupings) // _ENGINE_CANDIDATES))
        chosen = min(thinned, key=lambda place: end_s(groupings[place][1]))
    buffer, ends = groupings[chosen]
    best, finish = ends, end_s(ends)
    sizes = profile.sizes.tolist()
    for candidate in (*_with_smaller_head(sizes, buffer), *_with_smaller_tail(sizes, ends)):
        if (end := end_s(candidate)) < finish:
            best, finish = candidate, end
    note = f"adaptive: a buffer of {format_bytes(buffer)}" + ("" if best is ends else ", smaller at head or tail")
    return Draft(best, channels, notes=(note,))


@lru_cache(maxsize=32)
def _constant_buffers(sizes: tuple[float, ...]) -> list[tuple[float, list[int]]]:
    """(buffer, where its groups end) for every grouping that a constant buffer gives."""
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


def _finishes(profile: Profile, cost: LinkCost, groupings: list[tuple[float, list[int]]]) -> NDArray[np.float64]:
    """The one-channel finish of every grouping: the recursion, one group of all of them at a time."""
    sums = running_sums(profile.sizes)
    longest = max(len(ends) for _, ends in groupings)
    finish = np.full(len(groupings), -np.inf)
    lengths = np.array([len(ends) for _, ends in groupings])
    table = np.zeros((len(groupings), longest), dtype=np.intp)
    for row, (_, ends) in enumerate(groupings):
        table[row, : len(ends)] = ends
    starts = np.zeros(len(groupings), dtype=np.intp)
    for place in range(longest):
        live = np.flatnonzero(lengths > place)
        stops = table[live, place]
        messages = sums[stops] - sums[starts[live]]
        ready = profile.ready[stops - 1]
        finish[live] = np.maximum(ready + cost.time(messages), finish[live] + cost.busy_time(messages))
        starts[live] = stops
    return finish


def _with_smaller_head(sizes: list[float], buffer: float) -> Iterator[list[int]]:
    """A smaller first cap before this buffer, and before DDP's own."""
    for cap in (buffer, float(DDP_BUCKET_BYTES)):
        for first in (float(DDP_FIRST_BUCKET_BYTES), cap / 8, cap / 4, cap / 2):
            yield capped(sizes, [first, cap])


def _with_smaller_tail(sizes: list[float], ends: list[int]) -> Iterator[list[int]]:
    """The same groups with what follows one of the last regrouped by caps that shrink towards the end."""
    for kept in range(max(len(ends) - 4, 0), len(ends)):
        start = ends[kept - 1] if kept else 0
        tail = sizes[start:]
        total = sum(tail)
        for share in (0.9, 0.75, 0.5, 0.33, 0.25, 0.1):
            for caps in ([total * share], [total * share, total * (1 - share) / 2]):
                yield ends[:kept] + [start + end for end in capped(tail, caps)]
