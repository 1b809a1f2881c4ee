"""Why a finished graph takes as long as it does: what each moment is put down to.

An op begins when the last of those before it has ended. So from any op a chain leads back to the beginning, without a
gap: the *critical path* of that op. Time on it is put down to the op's `cause` and a part of it:

- `own`: seconds of its own, or what computation takes alone
- `contention`: what computation takes longer beside collectives
- `latency`, `transfer`: before it is on its link, and its work there
- `sharing`: what the work takes longer because others are on the link
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from backbeat.engine.graph import NO_OP, Graph, GraphTimes, Lane

Causes = dict[tuple[str, str], float]
"""Seconds by (cause, part)."""


def exposed(graph: Graph, times: GraphTimes, lane: Lane) -> Causes:
    """What a lane waits for, to the end of the step, and what its own ops take longer beside others.

    Two seconds of computation, and a message of 1 s latency and 1 s of work that leaves after the first:

    >>> from backbeat.engine.graph import Graph
    >>> from backbeat.engine.run import run
    >>> graph = Graph()
    >>> first = graph.add(("compute",), 1.0, cause="compute")
    >>> _ = graph.add(("communicator",), 1.0, work_s=1.0, links=(graph.link(),), after=(first,), cause="all-reduce")
    >>> _ = graph.add(("compute",), 1.0, cause="compute")
    >>> exposed(graph, run(graph), "compute")
    {('all-reduce', 'transfer'): 1.0}
    """
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    reached = 0.0
    for number, lanes in enumerate(graph.lanes):
        if lane not in lanes:
            continue
        if times.starts[number] > reached:
            _add(found, _put_down(graph, times, _binding(graph, times, number), reached, times.starts[number]))
        reached = times.ends[number]
        slower = reached - times.starts[number] - graph.seconds[number]
        if number not in graph.sent and slower > 0:
            found[graph.causes[number], "contention"] += slower
    if times.end_s > reached:
        last = [max(range(len(graph)), key=lambda number: (times.ends[number], number))]
        _add(found, _put_down(graph, times, last, reached, times.end_s))
    return dict(found)


def _add(found: defaultdict[tuple[str, str], float], more: Causes) -> None:
    for cause, seconds in more.items():
        found[cause] += seconds


def _put_down(graph: Graph, times: GraphTimes, last: list[int], low: float, high: float) -> Causes:
    """The time from `low` to `high`, along the path to an op that ends at `high`."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for number in last:
        for op, start, end in _back(graph, times, number, low, high):
            for part, seconds in _parts(graph, times, op, start, end):
                if seconds > 0:
                    found[graph.causes[op], part] += seconds
    return dict(found)


def _back(graph: Graph, times: GraphTimes, number: int, low: float, high: float) -> Iterator[tuple[int, float, float]]:
    """Along the path to an op, last first: each op, and from when to when it is on the path."""
    while number != NO_OP:
        start, end = max(times.starts[number], low), min(times.ends[number], high)
        if end < low or (end == low > 0):
            return
        yield number, start, end
        number = next(iter(_binding(graph, times, number)), NO_OP)


def _binding(graph: Graph, times: GraphTimes, number: int) -> list[int]:
    """The op that another waits for last."""
    before = graph.before[number]
    return [max(before, key=lambda other: (times.ends[other], other))] if before else []


def _parts(graph: Graph, times: GraphTimes, op: int, start: float, end: float) -> Iterator[tuple[str, float]]:
    """What a part of an op is put down to."""
    if op in graph.sent:
        reached = times.on_link[op]
        on_link = times.ends[op] - reached
        passed = max(end - max(start, reached), 0.0)
        work = min(graph.sent[op].work_s / on_link, 1.0) * passed if on_link > 0 else 0.0
        yield "latency", end - start - passed
        yield "transfer", work
        yield "sharing", passed - work
    else:
        whole = times.ends[op] - times.starts[op]
        own = min(graph.seconds[op] / whole, 1.0) * (end - start) if whole > 0 else 0.0
        yield "own", own
        yield "contention", end - start - own


def busy_periods(starts: Iterable[float], ends: Iterable[float]) -> list[tuple[float, float]]:
    """Where at least one of these intervals is: when each period begins and ends.

    >>> busy_periods([0.0, 3.0, 1.0], [2.0, 4.0, 2.5])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    periods: list[tuple[float, float]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if periods and start <= periods[-1][1]:
            periods[-1] = (periods[-1][0], max(float(end), periods[-1][1]))
        else:
            periods.append((float(start), float(end)))
    return periods


def slower_beside(graph: Graph, times: GraphTimes, lane: Lane) -> float:
    """How much longer all that this lane computes takes because of what is in flight meanwhile."""
    return sum(
        times.ends[op] - times.starts[op] - graph.seconds[op] for op, lanes in enumerate(graph.lanes) if lane in lanes
    )


def overlap_s(gaps: Sequence[tuple[float, float]], periods: Sequence[tuple[float, float]]) -> float:
    """How long of the gaps lies within some period; both are in order.

    >>> overlap_s([(1.0, 3.0), (4.0, 6.0)], [(0.0, 1.5), (2.0, 5.0)])
    2.5
    """
    total, index = 0.0, 0
    for low, high in gaps:
        while index < len(periods) and periods[index][1] <= low:
            index += 1
        for start, end in islice(periods, index, None):
            if start >= high:
                break
            total += max(min(high, end) - max(low, start), 0.0)
    return total


def idle_by_cause(
    gaps: Sequence[tuple[float, float]], messages: GraphTimes, most_bandwidth_s: float
) -> tuple[float, float, float]:
    """Latency, bandwidth and waiting in these gaps of computation, beside messages.

    A gap counts as latency where some message is starting and none moves bytes, and as bandwidth where bytes move that
    no order of messages would have hidden: at most so many seconds. The rest was held back.

    A message starts at 1 s and moves bytes from 2 to 5 s; half of a second could have been sent before:

    >>> idle_by_cause([(0.5, 5.0)], GraphTimes([1.0], [2.0], [5.0]), 2.5)
    (1.0, 2.5, 1.0)
    """
    holding, moving = (overlap_s(gaps, busy_periods(begins, messages.ends)) for begins in messages[:2])
    latency = max(holding - moving, 0.0)
    bandwidth = min(moving, most_bandwidth_s)
    return latency, bandwidth, max(sum(end - start for start, end in gaps) - latency - bandwidth, 0.0)
