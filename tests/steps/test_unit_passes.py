"""Passes of sharded units against the whole step that FSDP2's calls make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.model.accelerator import accelerator_named
from backbeat.steps.stage_graph import StageTimes
from backbeat.steps.unit_graph import run_step
from backbeat.steps.unit_passes import UnitRunner, UnitTraffic

seconds = st.floats(0.0, 1.0)
PIECES = st.builds(StageTimes, seconds, seconds, seconds)
TRAFFIC = st.builds(UnitTraffic, st.sampled_from([1e6, 3e9]), seconds, seconds)
UNITS = st.lists(st.tuples(PIECES, TRAFFIC), min_size=1, max_size=6)


def runner(units: list[tuple[StageTimes, UnitTraffic]], zero: int, **fields: bool) -> UnitRunner:
    pieces, traffic = zip(*units, strict=True)
    told = {"has_head": True, "splits": False, "piped": False, **fields}
    return UnitRunner(
        pieces=pieces, traffic=traffic, zero=zero, shards=8, reduce_bytes=4, accelerator=accelerator_named("h100"),
        slowdown=1.0, **told,
    )  # fmt: skip


@settings(deadline=None)
@given(UNITS, st.sampled_from([2, 3]), st.integers(1, 4))
def test_a_stage_alone_takes_what_the_calls_of_all_its_micro_batches_take(
    units: list[tuple[StageTimes, UnitTraffic]], zero: int, count: int
) -> None:
    asked = runner(units, zero)
    whole = run_step(asked._chain(), asked._cost, micro_batches=count)[1].end_s
    found = asked.passes()
    assert found.gather_s + count * found.times.total_s == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert found.gather_s == 0 or zero == 2


@settings(deadline=None)
@given(UNITS, st.sampled_from([2, 3]), st.booleans(), st.data())
def test_what_takes_less_makes_no_pass_longer(
    units: list[tuple[StageTimes, UnitTraffic]], zero: int, splits: bool, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(units) - 1))
    share = data.draw(st.sampled_from([0.0, 0.5]))
    piece, traffic = units[index]
    quicker = replace(piece, forward_s=share * piece.forward_s, input_s=share * piece.input_s)
    lighter = traffic._replace(gather_s=share * traffic.gather_s, scatter_s=share * traffic.scatter_s)
    slow = runner(units, zero, piped=True, splits=splits).passes().times
    for changed in ((quicker, traffic), (piece, lighter)):
        again = [changed if number == index else unit for number, unit in enumerate(units)]
        fast = runner(again, zero, piped=True, splits=splits).passes().times
        assert fast.forward_s <= slow.forward_s * (1 + 1e-12)
        assert fast.backward_s <= slow.backward_s * (1 + 1e-12)
        if splits:
            assert fast.input_s <= slow.input_s * (1 + 1e-12)
            assert fast.weight_s <= slow.weight_s * (1 + 1e-12)


def test_between_two_passes_of_a_pipeline_the_last_unit_comes_again() -> None:
    """Alone, its gather hides behind the last forward."""
    units = [(StageTimes(1.0, 1.0, 1.0), UnitTraffic(1e6, 0.5, 0.0))] * 3
    alone, piped = (runner(units, 3, piped=each, has_head=False).passes().times for each in (False, True))
    assert piped.backward_s - alone.backward_s == pytest.approx(0.5, abs=1e-3)
    assert piped.forward_s == pytest.approx(alone.forward_s)
