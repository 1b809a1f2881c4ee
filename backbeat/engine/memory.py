"""What a graph's buffers hold as its ops run: a fold of what comes and what goes.

A buffer comes when its first op starts, and goes when the last op that uses it ends, on whatever lane. What goes in a
moment makes room for what comes in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from backbeat.engine.graph import Graph, GraphTimes


class HeldBytes(NamedTuple):
    """What is held from one moment to the next."""

    start_s: float
    by_kind: Mapping[str, float]
    total: float
    """Of all kinds."""


def held_over_time(graph: Graph, times: GraphTimes, resident: Mapping[str, float] | None = None) -> list[HeldBytes]:
    """Every level in order; `resident` is there all the time.

    A buffer that two ops use, and one that only the second does:

    >>> from backbeat.engine.graph import Graph
    >>> from backbeat.engine.run import run
    >>> graph = Graph()
    >>> first, second = graph.add(("compute",), 1.0), graph.add(("compute",), 2.0)
    >>> _ = graph.hold("activation", 10, first, [first, second]), graph.hold("gradient", 5, second, [second])
    >>> [(level.start_s, level.total) for level in held_over_time(graph, run(graph), {"parameter": 7})]
    [(0.0, 17), (1.0, 22), (3.0, 7)]
    """
    held: defaultdict[str, float] = defaultdict(float, resident or {})
    levels: list[HeldBytes] = []
    changes, total = _changes(graph, times), sum(held.values())
    for (moment, _, kind, change), following in zip_longest(changes, changes[1:]):
        held[kind] += change
        total += change
        # What goes as soon as it comes is there in between.
        if following is None or following.at_s != moment or following.order == _GOES_AT_ONCE:
            levels.append(HeldBytes(moment, dict(held), total))
    return levels or [HeldBytes(0.0, dict(held), total)]


def issue_times(count: int) -> GraphTimes:
    """Ops one after the other in the order of issue, as a host's allocator counts what they hold."""
    starts = [float(number) for number in range(count)]
    return GraphTimes(starts, starts, [start + 1 for start in starts])


_GOES, _COMES, _GOES_AT_ONCE = range(3)
"""The order in a moment. A buffer that comes and goes in one is there in between."""


class _Change(NamedTuple):
    at_s: float
    order: int
    kind: str
    bytes: float


def _changes(graph: Graph, times: GraphTimes) -> list[_Change]:
    found: list[_Change] = []
    for kind, size, first, users in graph.buffers:
        comes = times.starts[first]
        found.append(_Change(comes, _COMES, kind, size))
        if users:
            goes = max([times.ends[user] for user in users])
            found.append(_Change(goes, _GOES if goes > comes else _GOES_AT_ONCE, kind, -size))
    found.sort()
    return found
