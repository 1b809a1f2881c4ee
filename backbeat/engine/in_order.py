"""Ops one after the other, each after those before it: all times, where no op changes the pace of another."""

from __future__ import annotations

from typing import NamedTuple

from backbeat.engine.graph import NO_OP, Graph, Sent, deadlock


class GraphTimes(NamedTuple):
    """By op: when it starts, has its latency behind it, and ends."""

    starts: list[float]
    on_link: list[float]
    ends: list[float]

    @property
    def end_s(self) -> float:
        return max(self.ends, default=0.0)


def run_in_order(graph: Graph) -> GraphTimes:
    """Each op after those before it."""
    count, sent = len(graph), graph.sent
    before, seconds = graph.before, graph.seconds
    starts, on_link, ends = [0.0] * count, [0.0] * count, [0.0] * count
    for number in range(count) if graph.forward_only else _sorted(graph):
        start = 0.0
        for other in before[number]:
            end = ends[other]
            if end > start:
                start = end
        starts[number] = start
        own = seconds[number]
        if number in sent:
            latency, work = alone_s(graph, number, sent[number], start, ends)
            on_link[number] = start + latency
            ends[number] = start + latency + work
        else:
            on_link[number] = ends[number] = start + own
    return GraphTimes(starts, on_link, ends)


def alone_s(graph: Graph, number: int, sent: Sent, now: float, ends: list[float]) -> tuple[float, float]:
    """Latency and work of an op that starts now and has its links to itself."""
    own = own_s(graph, number, sent, now, ends)
    return (own, sent.work_s) if own >= 0 else (0.0, sent.work_s + own)


def own_s(graph: Graph, number: int, sent: Sent, now: float, ends: list[float]) -> float:
    """Seconds of an op before its work; below zero, the head start that it takes on an idle link."""
    own, behind, last = graph.seconds[number], sent.behind_s, sent.follows
    if last == NO_OP or behind is None:
        return own
    ready = max([ends[other] for other in graph.before[number] if other != last], default=0.0)
    return max(ready + own, ends[last] + behind) - now


def _sorted(graph: Graph) -> list[int]:
    """Every op after those it waits for."""
    waiting, behind = edges_of(graph)
    found = [number for number, count in enumerate(waiting) if not count]
    for number in found:
        for later in behind[number]:
            waiting[later] -= 1
            if not waiting[later]:
                found.append(later)
    if len(found) < len(graph):
        raise deadlock(graph, [number for number, count in enumerate(waiting) if count])
    return found


def edges_of(graph: Graph) -> tuple[list[int], list[list[int]]]:
    """How many ops each waits for, and which wait for each."""
    behind: list[list[int]] = [[] for _ in graph.before]
    for number, before in enumerate(graph.before):
        for other in before:
            behind[other].append(number)
    return [len(before) for before in graph.before], behind
