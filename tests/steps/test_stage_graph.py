"""Pipelines as a graph, against events with queues of transfers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.engine import run
from backbeat.errors import DeadlockError
from backbeat.layouts.pipeline import _simulated
from backbeat.layouts.stage_times import StageTimes
from backbeat.steps import stage_graph as module
from backbeat.steps.stage_graph import ChunkTimes, stage_graph
from backbeat.steps.stage_programs import Act

seconds = st.floats(0.1, 5.0)


@settings(max_examples=300)
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]),
    st.sampled_from(["direction", "pair", "rank"]),
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=5),
    st.integers(1, 8),
    st.tuples(st.floats(0, 3), st.sampled_from([None, 0.0, 0.5, 2.0])),
    st.data(),
)
def test_every_schedule_takes_what_its_events_take(
    schedule: Any, streams: Any, shapes: list[Any], count: int, sends: tuple[float, float | None], data: st.DataObject
) -> None:
    name, chunks = schedule
    stages = len(shapes)
    if chunks > 1:
        if stages == 1:
            return
        count = stages * min(count, 3)
    shapes = [data.draw(st.sampled_from(shapes)) for _ in range(stages * chunks)]
    send, late = sends[0], None if sends[1] is None else sends[0] * sends[1]
    theirs = _simulated(name, stages, count, [StageTimes(*shape) for shape in shapes], send, streams, late)
    made = stage_graph(name, stages, count, [ChunkTimes(*shape) for shape in shapes], send, streams, late)
    times = run(made.graph)
    assert made.ends(times) == pytest.approx(theirs.end_s, rel=1e-9)
    assert made.last_backward(times) == pytest.approx(theirs.last_backward_s, rel=1e-9)
    starts = {
        (stage, operation): times.starts[op] for stage, own in enumerate(made.ops) for operation, op in own.items()
    }
    assert starts == pytest.approx({each[:2]: each.start_s for each in theirs.performed}, rel=1e-9, abs=1e-12)


def test_with_a_nic_for_each_direction_nothing_shares_pace() -> None:
    chunks = [ChunkTimes(1.0, 1.0, 1.0)] * 4
    assert not stage_graph("1f1b", 4, 8, chunks, 0.1).graph.shares_pace()
    assert stage_graph("1f1b", 4, 8, chunks, 0.1, "pair").graph.shares_pace()


def test_a_program_that_never_receives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*given: Any, **options: Any) -> list[list[Act]]:
        acts = programs(*given, **options)
        # Stage 1 neither posts nor waits for its second activation.
        lost = ("F", 1, 1)
        return [acts[0], [act for act in acts[1] if lost not in act.what]]

    programs = module.programs
    monkeypatch.setattr(module, "programs", forgetful)
    made = stage_graph("gpipe", 2, 2, [ChunkTimes(1.0, 1.0, 1.0)] * 2, 0.1)
    with pytest.raises(DeadlockError, match="F1 from stage 0 to stage 1 waits for its other end"):
        run(made.graph)
