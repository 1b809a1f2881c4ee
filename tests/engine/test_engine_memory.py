"""What is held, against adding up what is there at every moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.engine import Graph, run
from backbeat.engine.memory import held_over_time
from tests.engine.graph_problems import GraphSpec, graph_specs


@st.composite
def held_graphs(draw: st.DrawFn) -> Graph:
    spec: GraphSpec = draw(graph_specs())
    graph, _ = spec.graph()
    for _ in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, len(graph) - 1))
        # Those that use a buffer run after what fills it.
        users = [first, *draw(st.lists(st.sampled_from(_after(graph, first)), max_size=2))]
        size = float(draw(st.integers(1, 100)))
        graph.hold(draw(st.sampled_from("ab")), size, first, users if draw(st.booleans()) else ())
    return graph


def _after(graph: Graph, first: int) -> list[int]:
    found = [first]
    for op in range(first + 1, len(graph)):
        if not set(found).isdisjoint(graph.before[op]):
            found.append(op)
    return found


@given(held_graphs())
def test_levels_are_the_sum_of_what_is_there(graph: Graph) -> None:
    times = run(graph)
    alive = [
        (each, times.starts[each.first], max([times.ends[op] for op in each.users], default=float("inf")))
        for each in graph.buffers
    ]

    def held_at(now: float) -> float:
        return sum(each.bytes for each, comes, goes in alive if comes <= now < goes or comes == now == goes)

    moments = {comes for _, comes, _ in alive} | {goes for _, _, goes in alive if goes < float("inf")}
    levels = held_over_time(graph, times, {"resident": 7.0})
    for now in moments:
        mine = [level.total for level in levels if level.start_s == now]
        assert max(mine) == pytest.approx(held_at(now) + 7)


def test_what_goes_in_a_moment_makes_room_for_what_comes_in_it() -> None:
    graph = Graph()
    first, second = graph.add(("compute",), 1.0), graph.add(("compute",), 1.0)
    graph.hold("one", 10, first, [first])
    graph.hold("two", 10, second, [second])
    assert max(level.total for level in held_over_time(graph, run(graph))) == 10


def test_a_buffer_that_another_lane_uses_stays() -> None:
    graph = Graph()
    compute = graph.add(("compute",), 1.0)
    sent = graph.add(("communicator",), 3.0, after=(compute,))
    graph.add(("compute",), 2.0)
    graph.hold("bucket", 4, compute, [compute, sent])
    levels: list[Any] = held_over_time(graph, run(graph))
    assert [(level.start_s, dict(level.by_kind)) for level in levels] == [(0.0, {"bucket": 4}), (4.0, {"bucket": 0})]
