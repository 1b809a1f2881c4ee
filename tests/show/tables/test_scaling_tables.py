"""The lines above and below the tables say each thing once."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.planners.planned import planned, predicted
from backbeat.show.tables import scaling_tables as tables
from backbeat.show.tables.plan_tables import plan_table, segments_table
from backbeat.show.tables.terminal_table import natural_width
from backbeat.show.words.numbers import describe


def test_an_analytic_profile_is_called_so_once() -> None:
    measured = bb.Profile.load("resnet50-b64-bf16-h200")
    source = replace(measured.source, method="analytic")
    computed = replace(measured, device="NVIDIA H100 SXM (analytic)", source=source)
    line = describe(computed, bb.Network.load("10gbe"))
    assert "on NVIDIA H100 SXM (analytic): " in line
    assert line.count("analytic") == 1
    assert "NVIDIA H200 (measured): " in describe(measured, bb.Network.load("10gbe"))


def test_a_network_that_was_not_measured_says_so() -> None:
    profile = bb.Profile.load("resnet50-b64-bf16-h200")
    assert describe(profile, bb.Network.load("100gbe")).endswith("network 100gbe (assumed), one GPU a node")
    assert describe(profile, bb.Network.load("10gbe")).endswith("network 10gbe (published), one GPU a node")
    assert describe(profile, replace(bb.Network.load("10gbe"), source=None)).endswith("network 10gbe, one GPU a node")


def test_how_many_gpus_share_a_node_is_said() -> None:
    profile = bb.Profile.load("resnet50-b64-bf16-h200")
    assert describe(profile, bb.Network.load("nvlink-ib400")).endswith("(assumed), 8 GPUs a node")


def test_the_adaptive_buffer_is_given_as_people_write_sizes() -> None:
    profile = bb.Profile.load("resnet50-b64-bf16-h200")
    (note,) = planned(profile, bb.Network.load("10gbe"), strategy="adaptive").notes
    assert note.startswith("adaptive: a buffer of ")
    assert note.split(",")[0].endswith(("kB", "MB"))


@pytest.mark.parametrize(
    ("profile", "network", "workers"),
    [
        ("resnet50-b64-bf16-h200", "100gbe", 64),
        ("bert-large-b64-bf16-adamw-h200", "10gbe", 64),
        ("llama-1b-b4-bf16-adamw-h200", "aws-p5en", 64),
    ],
)
def test_tables_of_plans_and_strategies_fit_80_columns(profile: str, network: str, workers: int) -> None:
    given, there = bb.Profile.load(profile), bb.Network.load(network).at(workers=workers)
    rows = []
    for strategy in ("ddp", "mg-wfbp", "optimal", "best"):
        plan = planned(given, there, strategy)
        rows.append(predicted(given, there, plan))
        table = plan_table(plan, rows[-1], 80)
        assert natural_width(table) <= 80
        whole = plan_table(plan, rows[-1])
        counts = [[re.findall(r"\(\d+\)$", cell) for cell in one.columns[-4].cells] for one in (table, whole)]
        assert counts[0] == counts[1]
    for table in tables.scaling_tables(rows, samples=10**6, width=80):
        assert natural_width(table) <= 80


def test_segments_of_a_memory_plan_fit_80_columns() -> None:
    given, there = bb.Profile.load("resnet152-b256-bf16-h200"), bb.Network.load("10gbe").at(workers=4)
    plan = planned(given, there, "best", memory_bytes=6 * 10**9)
    assert plan.memory is not None
    assert natural_width(segments_table(given, plan.memory, 80)) <= 80
    assert natural_width(segments_table(given, plan.memory)) > 80
