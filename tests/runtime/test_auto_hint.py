"""What `DistributedDataParallel(plan="auto")` says of `parallelize`, and how long it holds training up."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

import backbeat as bb
from backbeat.runtime.auto import Tuner


@pytest.mark.parametrize(("network", "told"), [("10gbe", True), ("dgx-h100", False)])
def test_units_are_mentioned_where_they_gain(network: str, told: bool) -> None:
    tuner = object.__new__(Tuner)
    tuner.history = []
    tuner._reducer = SimpleNamespace(communicators=SimpleNamespace(rank=0))
    profile = bb.Profile.load("gpt2-b8-bf16-h200")
    tuner._tell_of_units(profile, bb.Network.load(network).at(workers=8), profile.forward_s + profile.backward_s)
    assert any("parallelize(model" in line for line in tuner.history) == told


@pytest.mark.parametrize(("iteration_s", "budget_s"), [(0.001, 0.2), (0.2, 0.4), (5.0, 2.0)])
def test_the_network_is_measured_for_a_small_share_of_the_first_steps(iteration_s: float, budget_s: float) -> None:
    tuner = object.__new__(Tuner)
    tuner._network, tuner._communicators = None, None
    communicators = SimpleNamespace(size=2, allowed=lambda count: count, process_group=None, device=None)
    tuner._reducer = SimpleNamespace(communicators=communicators)
    with mock.patch("backbeat.runtime.auto.calibrate") as calibrate:
        tuner._measure_network(bb.Profile.load("gpt2-b8-bf16-h200"), iteration_s)
    assert calibrate.call_args.kwargs["budget_s"] == pytest.approx(budget_s)
    tuner._reducer.steps = 13
    more = tuner._too_early(iteration_s)
    # Of the first 500 steps, or of those done by then, where that is more.
    steps = 500 if more == 0 else 13 + more
    assert budget_s <= 0.01 * steps * iteration_s * (1 + 1e-9)
    assert (more == 0) == (iteration_s >= 0.04)
