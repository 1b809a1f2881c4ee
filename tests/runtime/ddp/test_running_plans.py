"""Which plan a model runs is said in one place, whatever runs it."""

from __future__ import annotations

import copy

import pytest
from scenario_rig import mlp, small_plan

from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.ddp.reducer import Reducer
from backbeat.runtime.running_plans import plan_of

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("reducer", ["backbeat", "ddp"])
def test_a_wrapper_says_which_plan_its_model_runs(reducer: str) -> None:
    model = mlp()
    plan = small_plan(model)
    wrapped = DistributedDataParallel(model, plan=plan, reducer=reducer)
    assert plan_of(model) == plan
    copied = copy.deepcopy(wrapped)
    del wrapped
    again = DistributedDataParallel(model, reducer=reducer)
    assert plan_of(model) is None
    if isinstance(copied.reducer, Reducer):
        # Where the plan runs again: at the first forward that trains.
        copied.reducer.build()
        assert plan_of(copied.module) == plan
    assert plan_of(again.module) is None
