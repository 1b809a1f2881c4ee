"""Published tables as cases: their arithmetic, and answers that were looked at."""

from __future__ import annotations

import doctest
from functools import cache
from types import ModuleType

import pytest

from validation import blocks, case, cases, held_out, measures, own_docs, own_ratios
from validation.ask import Asker
from validation.case import Case
from validation.tables import aws_collectives, expert_exchanges, identities, own
from validation.tables.aws_collectives import seconds as bus_seconds
from validation.tables.bigscience_a100_layouts import layers_of
from validation.tables.expert_exchanges import sent_bytes
from validation.tables.megatron_papers import seconds


@cache
def of(name: str) -> dict[str, Case]:
    """Development cases alone."""
    return {case.id: case for case in cases.table(name).cases() if case.split == "development"}


def test_a_row_that_stands_twice_gets_a_number() -> None:
    rows = [{"gpus": "8", "ms": "1"}, {"gpus": "8", "ms": "2"}, {"gpus": "16", "ms": "3"}]
    assert list(identities("t", rows, ("ms",))) == ["t/8", "t/8#1", "t/16"]


def test_rates_of_a_paper_become_seconds() -> None:
    """22B on 8 A100: model flops give the 51 % that Megatron-LM's README of 2022 states for the 175B row."""
    row = {
        "value": "160", "unit": "TFLOPs/GPU", "metric": "model", "seq_len": "2048", "layers": "96", "hidden": "12288",
        "vocab": "51200", "gbs": "64", "gpus": "64",
    }  # fmt: skip
    tokens = 64 * 2048
    assert seconds(row) == pytest.approx(6 * 175e9 * tokens / (160e12 * 64), rel=0.03)
    assert seconds({**row, "metric": "achieved"}) == pytest.approx(seconds(row) * 4 / 3, rel=0.01)
    assert seconds({**row, "unit": "s", "value": "13.75"}) == 13.75


def test_layers_follow_from_the_printed_size_where_one_shape_stands_for_all() -> None:
    row = {"section": "Choosing the fastest 3D Topology", "hidden": "14400", "layers": "80", "pp": "12", "size": "183B"}
    assert layers_of(row) == 72
    assert layers_of({**row, "section": "other"}) == 80


@pytest.mark.parametrize("name", ["mosaicml_mpt", "modalities_fsdp_hsdp"])
def test_recorded_blocks_are_there_for_every_row(name: str) -> None:
    pytest.importorskip("torch")
    from validation.operators import tapes

    table = cases.table(name)
    recorded = set(tapes(table.folder / "operators.json.gz"))
    every = {case.recorded for case in table.cases()}
    assert {f"{one}/{count}" for one in every for count in (1, 2)} == recorded


def test_runs_of_fsdp1_keep_its_rules() -> None:
    small = of("mosaicml_mpt")["mosaicml/mpt-1b/a100_40gb/bf16/seq=2048/gpus=128/mbs=10/gbs=1280"]
    large = of("mosaicml_mpt")["mosaicml/mpt-1b/h100_80gb/amp_bf16/seq=2048/gpus=512/mbs=12/gbs=6144"]
    asker = Asker(cases.table("mosaicml_mpt"))
    first, second = asker.plan(small.plan).sharding, asker.plan(large.plan).sharding
    assert first is not None
    assert second is not None
    assert (first.reduce_dtype, first.units[0].reshard, first.units[0].prefetch) == ("bf16", True, 0)
    assert (second.reduce_dtype, second.units[0].reshard, second.units[0].prefetch) == ("fp32", False, 1)
    assert first.gradient_sync == second.gradient_sync == "every"
    hybrid = blocks.fsdp1(2, 16, reshard=True, prefetch=0, reduce_dtype="bf16", shard=4)
    assert asker.plan(hybrid).sharding.mesh.replicate == 4  # type: ignore[union-attr]


def test_several_nodes_follow_from_eight_gpus() -> None:
    pytest.importorskip("torch")
    asker, every = Asker(cases.table("mosaicml_mpt")), of("mosaicml_mpt")
    known = next(
        case for case in every.values() if case.gpus == 8 and case.family == "mpt-7b" and case.sequence == 2048
    )
    case = next(case for case in every.values() if case.system == known.system and case.gpus > 8)
    route = "analytic, own run"
    factor = asker.fitted(known, route)
    assert asker.ask(known, route, factor).seconds == pytest.approx(known.seconds, rel=1e-3)
    answer = asker.ask(case, route, factor)
    assert answer.low_s is not None
    assert answer.low_s < answer.seconds


def test_long_sequences_on_old_kernels() -> None:
    """65536 tokens: far too fast with the attention of today, close with that of the time."""
    pytest.importorskip("torch")
    case = of("mosaicml_mpt")["mosaicml/mpt-7b/a100_80gb/amp_bf16/seq=65536/gpus=8/mbs=1/gbs=16"]
    asker = Asker(cases.table("mosaicml_mpt"))
    now, then = (asker.ask(case, route).seconds for route in ("analytic", "analytic, attention by FlashAttention-2"))
    assert case.seconds is not None
    assert now / case.seconds == pytest.approx(0.65, abs=0.03)
    assert then / case.seconds == pytest.approx(1.0, abs=0.06)


def test_rings_send_more_between_nodes_than_trees() -> None:
    table = cases.table("vtrain_multi_a100")
    asker = Asker(table)
    rings = asker.network("8 A100, 4 x HDR").at(workers=16)
    told = {key: value for key, value in table.networks["8 A100, 4 x HDR"].items() if key != "rings"}
    trees = Asker(cases.Table(**{**vars(table), "networks": {"trees": told}})).network("trees").at(workers=16)
    slopes = (one.all_reduce.curve.link_s_per_byte for one in (rings, trees))
    assert next(slopes) > next(slopes)


def test_what_a_row_needs_that_cannot_be_said_is_counted() -> None:
    reasons = {case.unasked for name in ("mlperf_llm", "nvidia_megatron_bridge") for case in of(name).values()}
    assert any(one and one.startswith("LoRA") for one in reasons)
    assert any(one and one.startswith("fp4") for one in reasons)
    groups = [case for case in of("internevo_7b_a100").values() if case.unasked]
    assert groups
    assert all(case.shard == 8 for case in groups)


def test_a_token_travels_once_to_each_rank_that_has_one_of_its_experts() -> None:
    one, many = (sent_bytes(1000, 100, experts, 8, 2.0) for experts in (1, 64))
    assert one == pytest.approx(1000 * 100 * 2)
    assert 0.99 * 8 * one < many <= 8 * one
    sizes = {case.id: case.bytes for case in of("expert_exchanges").values() if not case.unasked}
    there, back = (sizes[f"deepep/{way}/h100/32/1024 x 7168/8 of 256/0.5.0"] for way in ("dispatch", "combine"))
    assert there / back == pytest.approx((1 + 4 / 128) / 2, rel=1e-6)


def test_bus_bandwidth_is_what_nccl_tests_print() -> None:
    """Of 8 ranks, 8000 bytes: 14000 cross the bus in an all-reduce, 7000 in the others."""
    assert [bus_seconds(kind, 8000, 8, 1000.0) for kind in ("all_reduce", "all_to_all")] == [14.0, 7.0]


def test_sizes_that_a_calibration_used_are_not_asked_again() -> None:
    found = of("left_out_sizes")
    assert len(found) > 50
    for one in found.values():
        assert one.bytes not in {size for size, _ in one.own_network["all_reduce"]["points"]}


EXAMPLES = (case, cases, held_out, measures, own_docs, own_ratios, aws_collectives, expert_exchanges, own)


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
