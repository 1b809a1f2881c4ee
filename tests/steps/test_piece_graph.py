"""One pass through a piece: what is hidden, what it is put down to, and the host as a lane."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.engine import Graph
from backbeat.steps.host import period_of
from backbeat.steps.piece_graph import PiecePass

seconds = st.floats(0.0, 5.0)


class Issued(NamedTuple):
    dimension: str
    """Of a collective; empty for an operator."""
    seconds: float
    host_s: float
    waited: bool
    """At once; otherwise behind the next operator."""


PROGRAMS = st.lists(
    st.builds(Issued, st.sampled_from(["", "", "tensor", "context"]), seconds, seconds, st.booleans()), max_size=8
)


def run(program: list[Issued], slowdowns: dict[str, dict[str, float]] | None = None) -> PiecePass:
    found = PiecePass(slowdowns)
    late: list[int] = []
    for one in program:
        if one.dimension:
            sent = found.send(one.dimension, one.seconds, host_s=one.host_s)
            if one.waited:
                found.wait(sent)
            else:
                late.append(sent)
            continue
        found.compute("matmul", one.seconds, host_s=one.host_s)
        for sent in late:
            found.wait(sent)
        late = []
    return found


@given(PROGRAMS)
def test_piece_after_piece_a_pass_takes_what_its_repetition_takes(program: list[Issued]) -> None:
    """With the host as a lane that runs ahead, and every op behind its issue."""
    graph = Graph()

    def add_pass() -> int:
        computed: tuple[int, ...] = ()
        waits: list[int] = []
        late: list[int] = []
        ops: list[int] = []
        for one in program:
            issued = graph.add(("host",), one.host_s)
            if one.dimension:
                ops.append(graph.add((one.dimension,), one.seconds, after=(issued, *begun, *computed, *waits)))
                (waits if one.waited else late).append(ops[-1])
                continue
            ops.append(graph.add(("compute",), one.seconds, after=(issued, *begun, *waits)))
            computed, waits, late = (ops[-1],), late, []
        begun[:] = [graph.add(("compute",), 0.0, after=ops)]
        return begun[0]

    begun: list[int] = []
    period = period_of(graph, add_pass)
    assert run(program).times().seconds == pytest.approx(period.seconds, rel=1e-6, abs=1e-6)


@given(PROGRAMS, st.floats(1.0, 2.0))
def test_what_a_pass_is_put_down_to_adds_up(program: list[Issued], slowdown: float) -> None:
    for slowdowns in (None, {"matmul": {"tensor": slowdown, "context": 1.5}}):
        found = run(program, slowdowns).times()
        assert sum(found.causes.values()) == pytest.approx(found.seconds)
        assert min(found.causes.values(), default=0.0) >= 0
        assert found.causes.get("matmul", 0.0) == pytest.approx(
            sum(one.seconds for one in program if not one.dimension)
        )


@given(PROGRAMS, st.floats(0.0, 1.0), st.data())
def test_what_takes_less_ends_no_later(program: list[Issued], share: float, data: st.DataObject) -> None:
    if not program:
        return
    index = data.draw(st.integers(0, len(program) - 1))
    less = [*program]
    less[index] = less[index]._replace(seconds=share * less[index].seconds)
    assert run(less).times().seconds <= run(program).times().seconds * (1 + 1e-12)


def test_computation_takes_longer_only_beside_what_travels() -> None:
    found = PiecePass({"matmul": {"tensor": 2.0}})
    found.compute("matmul", 1.0)
    sent = found.send("tensor", 1.0)
    found.compute("matmul", 1.0)
    found.wait(sent)
    assert found.times().causes == pytest.approx({"matmul": 2.0, "contention": 0.5})
