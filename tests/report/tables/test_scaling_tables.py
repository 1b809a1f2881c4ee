"""The lines above and below the tables say each thing once."""

from __future__ import annotations

from msgspec.structs import replace

import backbeat as bb
from backbeat.report.words.numbers import describe


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
    (note,) = bb.plan(profile, bb.Network.load("10gbe"), strategy="adaptive").notes
    assert note.startswith("adaptive: a buffer of ")
    assert note.split(",")[0].endswith(("kB", "MB"))
