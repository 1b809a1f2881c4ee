"""What `DistributedDataParallel(plan="auto")` says of `parallelize`."""

from __future__ import annotations

from types import SimpleNamespace

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
