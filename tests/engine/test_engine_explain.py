"""What time is put down to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from backbeat.engine import Graph, SharedLink, run
from backbeat.engine.explain import exposed
from tests.engine.graph_problems import GraphSpec, graph_specs


@settings(max_examples=200)
@given(graph_specs())
def test_all_that_a_lane_waits_for_is_put_down_to_something(spec: GraphSpec) -> None:
    graph, _ = spec.graph()
    times = run(graph)
    for lane in {lane for lanes in graph.lanes for lane in lanes}:
        own = [op for op, lanes in enumerate(graph.lanes) if lane in lanes]
        busy = sum(times.ends[op] - times.starts[op] for op in own)
        slower = sum(times.ends[op] - times.starts[op] - graph.seconds[op] for op in own if op not in graph.sent)
        found = exposed(graph, times, lane)
        assert sum(found.values()) == pytest.approx(times.end_s - busy + slower, abs=1e-9)
        assert min(found.values(), default=0.0) >= 0


def test_a_message_that_computation_waits_for() -> None:
    graph = Graph()
    links = (graph.link(SharedLink()),)
    compute = graph.kind({"efa": 1.5})
    backward = graph.add(("compute",), 1.0, kind=compute, cause="backward")
    for lane in ("a", "b"):
        graph.add((lane,), 1.0, work_s=2.0, links=links, after=(backward,), transport="efa", cause="all-reduce")
    graph.add(("compute",), 2.0, kind=compute, cause="backward")
    graph.add(("compute",), 0.5, after=(1, 2), cause="update")
    times = run(graph)
    # Latency until 2 s and the last byte at 6 s; beside it two seconds of backward take three.
    assert times.ends == pytest.approx([1.0, 6.0, 6.0, 4.0, 6.5])
    assert exposed(graph, times, "compute") == pytest.approx(
        {("backward", "contention"): 1.0, ("all-reduce", "transfer"): 1.0, ("all-reduce", "sharing"): 1.0}
    )
