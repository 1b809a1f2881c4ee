"""The script that runs layouts in the lab."""

from __future__ import annotations

import pytest

from backbeat.lab.layout_lab import predicted_layout
from backbeat.lab.setting import Setting
from backbeat.model.prediction import COMPUTE
from validation.layouts import lab


@pytest.mark.parametrize(("backend", "nodes"), [("gloo", 2), ("nccl", 4)])
def test_cases_wait_for_about_the_share_that_is_wanted(backend: str, nodes: int) -> None:
    setting = Setting(nodes=nodes, rate_bits=1e9, backend=backend)
    found = lab.planned(setting, 256, 256)
    assert [case["text"] for case in found] == [*lab.LAYOUTS[nodes]] * len(lab.WAITING)
    for record in found:
        events = predicted_layout(lab.case_of(record), setting, lab.nominal(setting))[0]["events"]
        computed = sum(events.breakdown.parts[name] for name in COMPUTE)
        assert 1 - computed / events.step_s == pytest.approx(record["waiting_wanted"], abs=0.02)
