"""When the ops of a graph run: in one pass where that gives every time, otherwise from one moment to the next.

One pass, each op after those before it, is enough where no op changes the pace of another. So it is where all that is
slowed down is on one lane of one GPU: such computation comes last of what is ready. Then what is left waits for it, so
all that may be in flight beside it is known.
"""

from __future__ import annotations

from typing import Any

from backbeat.engine.events import run_events
from backbeat.engine.graph import Graph, GraphTimes, alone_s, deadlock


def run(graph: Graph) -> GraphTimes:
    """When every op runs.

    Two messages of 1 s latency and 1 s on the link they share, on two communicators: latencies overlap.

    >>> from backbeat.engine.graph import Graph
    >>> graph = Graph()
    >>> link = graph.link()
    >>> for communicator in (0, 1):
    ...     _ = graph.add((communicator,), 1.0, work_s=1.0, links=(link,))
    >>> run(graph).ends
    [3.0, 3.0]

    Three seconds of computation beside a message of two, which makes it take twice as long: one second's worth is done
    when the message ends.

    >>> graph = Graph()
    >>> _ = graph.add(("communicator",), 1.0, work_s=1.0, links=(graph.link(),), transport="nvlink")
    >>> _ = graph.add(("compute",), 3.0, kind=graph.kind({"nvlink": 2.0}))
    >>> run(graph).ends
    [2.0, 4.0]
    """
    if graph.open:
        raise deadlock(graph, sorted(graph.open.values()))
    if graph.shares_links() or (graph.shares_pace() and not graph.one_computes):
        return run_events(graph)
    return run_in_order(graph)


def run_in_order(graph: Graph) -> GraphTimes:
    """Each op after those it waits for."""
    count, sent = len(graph), graph.sent
    before, seconds = graph.before, graph.seconds
    starts, on_link, ends = [0.0] * count, [0.0] * count, [0.0] * count
    slowed = {kind for kind in range(1, len(graph.kinds)) if graph.slows(kind)}
    kind_of = graph.kind_of if slowed else {}
    flights = _Flights(graph)
    for number in graph.order() if slowed or not graph.forward_only else range(count):
        start = 0.0
        for other in before[number]:
            end = ends[other]
            if end > start:
                start = end
        starts[number] = start
        own = seconds[number]
        if number in sent:
            message = sent[number]
            _, work, behind_s, _, carrier, _ = message
            if own < 0 or behind_s is not None:
                own, work = alone_s(graph, number, message, start, ends)
            on_link[number] = start + own
            ends[number] = end = start + own + work
            if carrier and slowed:
                flights.add(carrier, start, end)
        elif kind_of.get(number) in slowed:
            on_link[number] = ends[number] = flights.computed(kind_of[number], start, own)
        else:
            on_link[number] = ends[number] = start + own
    return GraphTimes(starts, on_link, ends)


class _Flights:
    """What is in flight on each GPU."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.carriers = list(graph.carriers)
        self.of_gpu: dict[int, list[list[Any]]] = {gpu: [] for gpu, _ in self.carriers}
        """[start, end, transport] of what has not ended; what follows without a gap is one."""

    def add(self, carrier: int, start: float, end: float) -> None:
        gpu, transport = self.carriers[carrier]
        flights = self.of_gpu[gpu]
        if flights:
            last = flights[-1]
            if last[0] <= start <= last[1] and last[2] == transport:
                if end > last[1]:
                    last[1] = end
                return
        flights.append([start, end, transport])

    def computed(self, kind: int, start: float, seconds: float) -> float:
        """When so many seconds of computation, begun at `start`, are done."""
        gpu, slowdowns = self.graph.kinds[kind]
        flights = self.of_gpu.get(gpu, [])
        while flights and flights[0][1] <= start:
            flights.pop(0)
        now, left = start, seconds
        if not flights:
            return now + left
        if len(flights) == 1 and flights[0][0] <= now:
            _, end, transport = flights[0]
            factor = max(slowdowns.get(transport, 1.0), 1.0)
            slow = now + left * factor
            return slow if slow <= end else end + (left - (end - now) / factor)
        while True:
            factor, until = 1.0, float("inf")
            for begin, end, transport in flights:
                if begin > now:
                    until = min(until, begin)
                elif end > now:
                    factor, until = max(factor, slowdowns.get(transport, 1.0)), min(until, end)
            if now + left * factor <= until:
                return now + left * factor
            left -= (until - now) / factor
            now = until
