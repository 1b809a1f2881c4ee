"""How long a step takes that repeats: the period of its graph.

A step alone is no measure where something crosses from one step to the next: the host that runs ahead, an update that
the next gather waits for. So steps follow each other in one graph until two take the same time T. What ties them
together are lanes, which go on from step to step, and whatever edges a builder adds.

Two equal steps are not enough: a host may be ahead for many steps, and late after that. So no op of the last step may
have come more than T after the same op of the step before. Where no pace is shared this settles it: ops that come no
more than T later than a step before do so ever after, since an op moves no further than what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from backbeat.engine import Graph, GraphTimes, run
from backbeat.engine.graph import MOST_OPS, check_size

FIRST_STEPS = 3
"""Simulated at first: the first has nothing before it."""
MOST_STEPS = 96
_SAME = 1e-9
"""Of a step: what rounding may make of equal ones."""


class Period(NamedTuple):
    """Steps that repeat."""

    seconds: float
    settled: bool
    """Otherwise steps keep taking turns, and `seconds` is a mean."""
    times: GraphTimes
    ends: list[int]
    """The op that ends each step simulated."""


def period_of(graph: Graph, add_step: Callable[[], int]) -> Period:
    """`add_step` adds one more step to the graph, behind those before it, and returns the op that ends it.

    A host that issues 2 s of work in 3 s runs behind its device, and sets the pace:

    >>> graph = Graph()
    >>> def add_step() -> int:
    ...     issued = graph.add(("host",), 3.0)
    ...     return graph.add(("device",), 2.0, after=(issued,))
    >>> found = period_of(graph, add_step)
    >>> found.seconds, found.times.ends[found.ends[0]]
    (3.0, 5.0)
    """
    ends: list[int] = []
    begins = [len(graph)]
    wanted = FIRST_STEPS
    while True:
        while len(ends) < wanted:
            ends.append(add_step())
            begins.append(len(graph))
            check_size(graph)
        times = run(graph)
        moments = [times.ends[op] for op in ends]
        last, before = moments[-1] - moments[-2], moments[-2] - moments[-3]
        slack = _SAME * moments[-1]
        if abs(last - before) <= slack and _slowest_s(times, begins) <= last + slack:
            return Period(last, True, times, ends)
        if 2 * wanted > MOST_STEPS or 2 * len(graph) > MOST_OPS:
            half = wanted // 2
            return Period((moments[-1] - moments[half]) / (wanted - 1 - half), False, times, ends)
        wanted *= 2


def _slowest_s(times: GraphTimes, begins: list[int]) -> float:
    """How much later an op of the last step comes than in the one before, at most."""
    earlier, later = (times.ends[begin:end] for begin, end in (begins[-3:-1], begins[-2:]))
    return max([after - before for before, after in zip(earlier, later, strict=True)], default=0.0)
