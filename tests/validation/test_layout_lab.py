"""The script that runs layouts in the lab, and what its page says of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from backbeat.lab.layout_lab import predicted_layout
from backbeat.lab.setting import Setting
from backbeat.layouts.layout_prediction import COMPUTE
from validation.layouts import lab

HERE = Path(__file__).resolve().parent.parent.parent / "validation" / "layouts"


@pytest.mark.parametrize(("backend", "nodes"), [("gloo", 2), ("nccl", 4)])
def test_cases_wait_for_about_the_share_that_is_wanted(backend: str, nodes: int) -> None:
    setting = Setting(nodes=nodes, rate_bits=1e9, backend=backend)
    found = lab.planned(setting, 256, 256)
    assert [case["text"] for case in found] == [*lab.LAYOUTS[nodes]] * len(lab.WAITING)
    for record in found:
        events = predicted_layout(lab.case_of(record), setting, lab.nominal(setting))[0]["events"]
        computed = sum(events.breakdown.parts[name] for name in COMPUTE)
        assert 1 - computed / events.step_s == pytest.approx(record["waiting_wanted"], abs=0.02)


@pytest.mark.parametrize("record", ["lab-gloo-200mbit.json", "lab-nccl-10gbit.json"])
def test_the_pages_tables_are_what_the_model_says_of_the_kept_steps(
    record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.judge(argparse.Namespace(file=str(HERE / record)))
    page = (HERE / "README.md").read_text()
    printed = [line for line in capsys.readouterr().out.splitlines() if line and "cost of an answer" not in line]
    assert [line for line in printed if line not in page] == []
