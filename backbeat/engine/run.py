"""When the ops of a graph run: in one pass where that gives every time, otherwise from one moment to the next."""

from __future__ import annotations

from backbeat.engine.events import run_events
from backbeat.engine.graph import Graph, deadlock
from backbeat.engine.in_order import GraphTimes, run_in_order


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
    if graph.shares_links() or (graph.shares_pace() and not (graph.behind_compute and graph.forward_only)):
        return run_events(graph)
    return run_in_order(graph)
