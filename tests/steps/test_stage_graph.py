"""Pipelines as a graph; what a step takes is tested in tests/steps/test_pipeline.py."""

from __future__ import annotations

from typing import Any

import pytest

from backbeat.engine import run
from backbeat.errors import DeadlockError
from backbeat.steps import stage_graph as module
from backbeat.steps.stage_graph import StageTimes, stage_graph
from backbeat.steps.stage_programs import Act


def test_with_a_nic_for_each_direction_nothing_shares_pace() -> None:
    chunks = [StageTimes(1.0, 1.0, 1.0)] * 4
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
    made = stage_graph("gpipe", 2, 2, [StageTimes(1.0, 1.0, 1.0)] * 2, 0.1)
    with pytest.raises(DeadlockError, match="F1 from stage 0 to stage 1 waits for its other end"):
        run(made.graph)
