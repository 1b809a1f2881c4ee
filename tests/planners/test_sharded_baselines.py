"""FSDP2 with torch's defaults, HSDP and ZeRO as plans."""

from __future__ import annotations

import pytest

import backbeat as bb
from backbeat.planners.planned import planned, predicted

LLAMA = "llama-1b-b2-bf16-h200"


@pytest.mark.parametrize(
    ("name", "units"),
    [
        (LLAMA, [f"model.layers.{index}" for index in range(16)]),
        ("gpt2-b8-bf16-h200", [f"transformer.h.{index}" for index in range(12)]),
        ("vit-b-b64-bf16-h200", [f"encoder.layers.encoder_layer_{index}" for index in range(12)]),
        # Without blocks, by the gradients' names.
        ("t5-base-b8-bf16-h200", [f"{part}.block.{index}" for part in ("encoder", "decoder") for index in range(12)]),
    ],
)
def test_a_unit_is_a_repeated_block_and_the_rest_is_the_roots(name: str, units: list[str]) -> None:
    plan = planned(bb.Profile.load(name), bb.Network.load("ib400").at(workers=8), "fsdp")
    assert plan.sharding is not None
    assert [unit.modules for unit in plan.sharding.units] == [(unit,) for unit in units]
    assert (plan.sharding.param_dtype, plan.sharding.reduce_dtype) == ("bf16", "fp32")


def test_the_strategies_differ_in_mesh_and_resharding() -> None:
    profile, network = bb.Profile.load(LLAMA), bb.Network.load("nvlink-ib400").at(workers=32)
    found = {}
    for strategy in ("fsdp", "hsdp:8", "hsdp", "hsdp:16", "zero1", "zero2"):
        sharding = planned(profile, network, strategy).sharding
        assert sharding is not None
        found[strategy] = (str(sharding.mesh), sharding.units[0].reshard, sharding.gradient_sync)
    assert found == {
        "fsdp": ("replicate(1) * shard(32)", True, "every"),
        "hsdp:8": ("replicate(4) * shard(8)", True, "every"),
        # The GPUs of a node.
        "hsdp": ("replicate(4) * shard(8)", True, "every"),
        "hsdp:16": ("replicate(2) * shard(16)", True, "every"),
        "zero1": ("replicate(1) * shard(32)", False, "last"),
        "zero2": ("replicate(1) * shard(32)", False, "every"),
    }


def test_zero1_reduces_once_a_step() -> None:
    profile, network = bb.Profile.load(LLAMA), bb.Network.load("25gbe").at(workers=8)
    one, four = (
        {s: predicted(profile, network, s, accumulation=count).iteration_s for s in ("zero1", "zero2", "fsdp")}
        for count in (1, 4)
    )
    assert one["zero1"] == one["zero2"]
    assert four["zero1"] < four["zero2"] < four["fsdp"]


def test_fp32_profiles_gather_fp32() -> None:
    sharding = planned(bb.Profile.load("gpt2-b8-tf32-h200"), bb.Network.load("ib400"), "fsdp").sharding
    assert sharding is not None
    assert sharding.param_dtype == "fp32"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("hsdp:5", r"gpus\(8\) % hsdp\(5\) = 3 != 0"),
        ("hsdp:", "takes the number of shards"),
        ("hsdp:x", "takes the number of shards"),
        ("hsdp", "one GPU a node.*like hsdp:8"),
        ("fsdp:8", "only hsdp takes a number"),
        ("fsdpp", "did you mean 'fsdp'"),
    ],
)
def test_what_is_no_strategy_is_refused(strategy: str, words: str) -> None:
    with pytest.raises(bb.InputError, match=words):
        planned(bb.Profile.load(LLAMA), bb.Network.load("ib400").at(workers=8), strategy)


def test_a_budget_is_refused_by_strategies_that_keep_all() -> None:
    with pytest.raises(bb.InputError, match=r"keeps no budget of memory \(10.0 GB\).*use `sharded`"):
        planned(bb.Profile.load(LLAMA), bb.Network.load("ib400"), "fsdp", memory_bytes=10**10)
