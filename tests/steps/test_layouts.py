"""Predicting one layout: what cannot be, what must hold, and what memory is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbeat as bb
from backbeat.importers.config_json import read_architecture
from backbeat.model import Fabric, LoadBand
from backbeat.model.cluster import cluster_of
from backbeat.model.framework import framework_named
from backbeat.model.layout import Layout
from backbeat.model.prediction import COMPUTE
from backbeat.model.specification import Specification
from backbeat.model.topology import Load
from backbeat.steps.predict_layout import predict_layout
from tests.problems import affine

JOB: dict[str, Any] = {"global_batch": 64, "sequence": 4096}
POWERS = st.sampled_from([1, 2, 4])


def cluster(nic: float = 50e9, inside: float = 450e9) -> bb.Network:
    sheet = Specification(gpus_per_node=8, inside=inside, nic=nic, nics_per_node=8, fabric=Fabric(kind="fat-tree"))
    return sheet.network("made", [1, 2, 4, 8])


@pytest.mark.parametrize(
    ("fields", "equation"),
    [
        ({"dp": 2, "tp": 3}, r"dp\(2\) \* tp\(3\) \* pp\(1\) \* cp\(1\) = 6 != gpus\(8\)"),
        ({"tp": 8, "dp": 1, "ep": 2}, r"ep\(2\) > 1, but llama-3-8b has no experts"),
        ({"pp": 8, "chunks": 5}, r"layers\(32\) < pp\(8\) \* chunks\(5\) = 40"),
        ({"dp": 8, "micro_batch": 3}, r"global_batch\(64\) % \(dp\(8\) \* micro_batch\(3\)\) = 16 != 0"),
        ({"pp": 8, "chunks": 2, "global_batch": 12}, r"micro-batches\(12\) % pp\(8\) != 0"),
        ({"dp": 8, "chunks": 2}, "chunks"),
        ({"pp": 8, "schedule": "interleaved"}, "like chunks=2"),
        ({"dp": 8, "zero": 4}, "zero"),
        ({"dp": 8, "schedule": "best"}, "schedule"),
        ({"dp": 8, "precision": "fp4"}, "precision"),
        ({"dp": 8, "imbalance": 0.5}, "imbalance is 0.5"),
        ({"dp": 8, "compute_factor": 0.0}, "compute_factor is 0.0"),
        ({"dp": 8, "family": "guess"}, "family is 'guess'"),
        ({"dp": 8, "framework": "megatorn"}, "did you mean 'megatron'"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_equation(fields: dict[str, Any], equation: str) -> None:
    with pytest.raises(bb.InputError, match=equation):
        predict_layout("llama-3-8b", "dgx-h100", gpus=8, **{**JOB, **fields})


@pytest.mark.parametrize("given", ["dp=2+tp=2+recompute=full", Layout(dp=2, tp=2, recompute="full")])
def test_fields_change_the_layout_that_is_given(given: Layout | str) -> None:
    found = predict_layout("llama-3-8b", "dgx-h100", given, zero=3, dp=4, **JOB)
    assert found.layout == Layout(dp=4, tp=2, recompute="full", zero=3)
    assert predict_layout("llama-3-8b", "dgx-h100", given, **JOB).layout == Layout(dp=2, tp=2, recompute="full")
    assert predict_layout("llama-3-8b", "dgx-h100", **JOB).layout == Layout()


def test_models_come_from_names_configs_and_fields(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_architecture(tmp_path)
    assert read.parameters == read_architecture("deepseek-v3").parameters == pytest.approx(671e9, rel=0.01)
    assert read_architecture(tmp_path / "config.json") == read
    mixtral = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }  # fmt: skip
    assert read_architecture(mixtral).parameters == read_architecture("mixtral-8x7b").parameters
    assert read_architecture({"model_type": "seeing", "text_config": mixtral}).experts == 8
    fields = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100}
    assert read_architecture(fields).layers == 2
    for wrong, why in (
        ("llama-3-7b", "did you mean"),
        ({"layers": 2, "hidden": 0}, "hidden"),
        ({"a": 1}, "no model_type"),
    ):
        with pytest.raises(bb.InputError, match=why):
            read_architecture(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "billions"), [("gpt3-13b", 12.85), ("llama-3-8b", 8.03), ("llama-3-405b", 405.9),
                                                ("llama-3.2-1b", 1.236), ("qwen3-235b-a22b", 235.1),
                                                ("mixtral-8x22b", 140.6)])  # fmt: skip
def test_bundled_models_have_the_parameters_they_are_known_for(name: str, billions: float) -> None:
    assert read_architecture(name).parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_a_network_that_names_no_gpu_asks_for_one() -> None:
    with pytest.raises(bb.InputError, match="--accelerator h100"):
        predict_layout("llama-3-8b", "10gbe", dp=8, **JOB)
    assert predict_layout("llama-3-8b", "10gbe", dp=8, accelerator="a100", **JOB).cluster == "10gbe (A100)"
    with pytest.raises(bb.InputError, match="'h1000' is no accelerator known here"):
        predict_layout("llama-3-8b", "10gbe", dp=8, accelerator="h1000", **JOB)


@settings(max_examples=25, deadline=None)
@given(POWERS, POWERS, POWERS, POWERS, st.sampled_from([0, 1, 2, 3]), st.sampled_from([1.5, 4.0]))
def test_more_bandwidth_is_never_slower(tp: int, pp: int, cp: int, dp: int, zero: int, more: float) -> None:
    found = [
        predict_layout(
            "llama-3-8b",
            cluster(nic, inside),
            accelerator="h100",
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            zero=zero,
            band=False,
            **JOB,
        ).step_s
        for nic, inside in ((25e9, 300e9), (25e9 * more, 300e9), (25e9 * more, 300e9 * more))
    ]
    assert found[0] >= found[1] * (1 - 1e-9) >= found[2] * (1 - 2e-9)


@settings(max_examples=25, deadline=None)
@given(POWERS, POWERS, st.sampled_from([1, 2, 4]), st.sampled_from(["none", "selective", "full"]))
def test_parts_add_up_to_the_step_and_families_agree(tp: int, pp: int, micro: int, recompute: str) -> None:
    layout = Layout(dp=2, tp=tp, pp=pp, micro_batch=micro, recompute=recompute)  # type: ignore[arg-type]
    events = predict_layout("llama-3-8b", "dgx-h100", layout, **JOB)
    assert sum(events.breakdown.parts.values()) == pytest.approx(events.step_s, rel=1e-6)
    closed = predict_layout("llama-3-8b", "dgx-h100", layout, family="closed-form", **JOB)
    assert closed.step_s == pytest.approx(events.step_s, rel=0.05)
    assert closed.memory == events.memory
    assert not closed.timeline
    assert max(span.end_s for span in events.timeline) == pytest.approx(events.step_s)


@pytest.mark.parametrize("text", ["dp=2", "dp=2+pp=4", "dp=2+pp=2+chunks=2", "dp=2+pp=4+schedule=zero-bubble"])
def test_the_timeline_shows_every_pass_and_what_follows(text: str) -> None:
    found = predict_layout("llama-3-8b", "dgx-h100", text, overlap="none", **JOB)
    layout = found.layout
    computing = [span for span in found.timeline if span.name.split()[0] in ("forward", "backward", "weight")]
    # What stages do nothing in, until the last has done its passes.
    busy = sum(span.end_s - span.start_s for span in computing)
    assert found.bubble_share == pytest.approx(1 - busy / layout.pp / max(span.end_s for span in computing), abs=1e-9)
    kinds = {"forward", "backward", *(["weight gradients"] if "zero" in text else [])}
    passes = {
        f"{kind} {micro}{chunk}" for kind in kinds for micro in range(32) for chunk in ("", " chunk 1")[: layout.chunks]
    }
    after = {"reduce gradients", "update", "gather parameters"}
    for stage in range(layout.pp):
        assert {span.name for span in found.timeline if span.lane == f"stage {stage}"} == passes | after
    last = {name: max(span.end_s for span in found.timeline if span.name == name) for name in after}
    assert last["reduce gradients"] < last["update"] < last["gather parameters"] == found.step_s


def kinds(**fields: Any) -> Any:
    return predict_layout("llama-3-8b", "dgx-h100", band=False, **{**JOB, "dp": 8, **fields}).memory.by_kind


def test_memory_falls_with_sharding_and_recomputation() -> None:
    assert kinds(zero=0)["optimizer"] == 8 * kinds(zero=1)["optimizer"]
    assert kinds(zero=1)["gradients"] == 8 * kinds(zero=2)["gradients"]
    assert kinds(zero=2)["parameters"] == 8 * kinds(zero=3)["parameters"]
    for field in ("micro_batch", "sequence"):
        small, large = (
            {"micro_batch": 1, "sequence": 4096} | {field: value}
            for value in ((1, 4), (4096, 8192))[field == "sequence"]
        )
        assert kinds(**small)["activations"] < kinds(**large)["activations"]
    scores = framework_named("megatron", flash_attention=False)
    for first, second in (("none", "selective"), ("selective", "full")):
        less = kinds(recompute=second, framework=scores, pp=2)
        assert kinds(recompute=first, framework=scores, pp=2)["activations"] > less["activations"]
    assert sum(kinds(tp=4).values()) < sum(kinds(tp=2).values()) < sum(kinds().values())
    assert kinds(tp=4, sequence_parallel=False)["activations"] > kinds(tp=4)["activations"]
    assert kinds(pp=4, schedule="gpipe")["activations"] > kinds(pp=4)["activations"]


def test_experts_cost_more_the_less_balanced_they_are() -> None:
    found = [
        predict_layout("mixtral-8x7b", "dgx-h100", dp=8, tp=2, ep=8, imbalance=each, band=False, **JOB)
        for each in (1.0, 1.5)
    ]
    assert found[1].step_s > found[0].step_s
    assert found[1].memory.peak_bytes > found[0].memory.peak_bytes
    # Experts inside a node travel faster than across nodes.
    there = cluster_of("dgx-h100")
    assert there.exchange_s(1e8, 8) < there.exchange_s(1e8, 16) < there.exchange_s(1e8, 8, 8)


@pytest.mark.parametrize(
    ("model", "fields", "link", "part"),
    [
        ("llama-3-8b", {"tp": 8, "pp": 2}, {"nic": 1e9}, "bubble"),
        ("llama-3-8b", {"tp": 8, "cp": 2}, {"nic": 1e9}, "context"),
        ("llama-3-8b", {"tp": 16}, {"nic": 1e9}, "tensor"),
        ("llama-3-8b", {"dp": 16}, {"nic": 1e9}, "reduce"),
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, {"inside": 9e9}, "expert"),
    ],
)
def test_what_travels_is_paid_for(model: str, fields: dict[str, int], link: dict[str, float], part: str) -> None:
    fast, slow = (
        predict_layout(model, there, accelerator="h100", band=False, **{"dp": 1, **fields}, **JOB)
        for there in (cluster(), cluster(**link))
    )
    assert slow.breakdown.parts[part] > fast.breakdown.parts[part]
    assert slow.step_s > fast.step_s * 1.01


def test_groups_that_share_a_node_share_its_network() -> None:
    there = cluster_of("dgx-h100")
    alone = there.collective_s("all_reduce", 1e9, 32, 1)
    shared = there.collective_s("all_reduce", 1e9, 4, 8)
    assert shared > 4 * alone
    assert there.collective_s("all_reduce", 1e9, 8, 1) < there.collective_s("all_reduce", 1e9, 8, 8)


def test_groups_fill_the_nodes_they_touch_and_share_their_links() -> None:
    network = cluster()
    there = cluster_of(network, "h100")
    size = 1e9
    # Inside a node only the group's own ranks count, however far they are apart.
    inside = network.at(workers=4).all_reduce.curve.at(size)
    assert there.collective_s("all_reduce", size, 4) == there.collective_s("all_reduce", size, 4, 2) == inside
    assert there.collective_s("all_reduce", size, 8) == network.at(workers=8).all_reduce.curve.at(size)
    # Across nodes as many groups share them as lie between two of a group's ranks, at most all GPUs of a node.
    for workers, stride, filled, sharing in ((16, 1, 16, 1), (4, 4, 16, 4)):
        # A ring of fewer ranks sends less of every byte, by 2 (N - 1) / N.
        found, whole = there.collective_s("all_reduce", size, workers, stride), network.at(workers=filled).all_reduce
        assert found == pytest.approx(whole.curve.at(size * sharing), rel=0.03)
    # Sends: 450 GB/s inside; outside each rank has a NIC of its own, and one send fills half of its 50 GB/s.
    assert there.send_s(size, 2, 4) == pytest.approx(size / 450e9, rel=0.2)
    assert there.send_s(size, 2, 8) == pytest.approx(size / 25e9, rel=0.2)
    assert there.send_s(size, 16, 1) == pytest.approx(there.send_s(size, 2, 8), rel=0.05)
    # All-to-alls: of 8 ranks 7 parts of 8 leave, inside; of 16 half of all crosses, through each rank's own NIC.
    assert there.exchange_s(size, 8) == pytest.approx(size * 7 / 8 / 450e9, rel=0.2)
    assert there.exchange_s(size, 16) == pytest.approx(size / 2 / 50e9, rel=0.2)
    assert there.exchange_s(size, 2, 8) == pytest.approx(size / 2 / 50e9, rel=0.2)
    # Of small parts latency is left: one for each other rank, of which eight run at a time.
    near, far = there.send_s(1.0, 2, 1), there.send_s(1.0, 16, 1)
    assert there.exchange_s(1.0, 4) == pytest.approx(3 * near, rel=1e-3)
    assert there.exchange_s(1.0, 8) == pytest.approx(7 * near, rel=1e-3)
    assert there.exchange_s(1.0, 16) == pytest.approx(max(15 * near, 8 * far) / 2, rel=1e-3)
    assert there.exchange_s(1.0, 4, 8) == pytest.approx(max(3 * near, 3 * far), rel=1e-3)
    # What every layer waits for takes a call at least: 25 µs, and 8.5 for each further rank.
    tiny = there.collective_s("all_gather", 1.0, 4)
    assert tiny < 50.5e-6
    assert there.waited_s("all_gather", size, 4) == there.collective_s("all_gather", size, 4) + (50.5e-6 - tiny)
    for nothing in (there.collective_s("all_reduce", size, 1), there.waited_s("all_reduce", 0.0, 8)):
        assert nothing == 0
    assert (there.exchange_s(size, 1), there.exchange_s(0.0, 8), there.send_s(0.0, 2, 1)) == (0, 0, 0)


def test_a_ring_of_few_ranks_sends_less_between_nodes() -> None:
    there = cluster_of("dgx-h100")
    two, many = (there.collective_s("all_gather", 8e9 / 8, ranks, 8) for ranks in (2, 16))
    filled = there.collective_s("all_gather", 8e9, 16, 1)
    assert two == pytest.approx(filled * (1 / 2) / (15 / 16), rel=0.05)
    assert many == pytest.approx(there.collective_s("all_gather", 8e9, 128, 1), rel=0.07)


def test_bands_hold_the_prediction_and_compute_scales() -> None:
    job = {**JOB, "dp": 16, "tp": 8}
    found = predict_layout("llama-3-70b", "gcp-a3-mega", recompute="full", **job)
    assert found.range_s is not None
    assert found.range_s[0] <= found.step_s <= found.range_s[1]
    slower = predict_layout("llama-3-70b", "gcp-a3-mega", recompute="full", compute_factor=1.5, **job)
    assert found.step_s < slower.step_s < 1.5 * found.step_s + 1e-9
    assert slower.breakdown.update_s == pytest.approx(1.5 * found.breakdown.update_s)
    # In closed form the band is what a quiet and a busy cluster take, and wider by what predictions are off.
    there = cluster_of("gcp-a3-mega")
    loads: tuple[Load, ...] = ("typical", "quiet", "busy")
    typical, quiet, busy = (
        predict_layout("llama-3-70b", replace(there, load=load), recompute="full", family="closed-form", **job)
        for load in loads
    )
    assert typical.range_s == pytest.approx((quiet.step_s / 1.13, busy.step_s * 1.13))
    assert quiet.step_s < typical.step_s < busy.step_s
    assert quiet.range_s == pytest.approx((quiet.step_s / 1.13, quiet.step_s * 1.13))
    # A network's own band needs no fabric, and without either there is what predictions are off.
    plain, banded = (
        predict_layout("llama-3-8b", affine(1e-4, 1e-9, accelerator="h100", band=band), dp=8, **JOB)
        for band in (None, LoadBand(quiet=1.25, busy=0.5))
    )
    assert plain.range_s == pytest.approx((plain.step_s / 1.13, plain.step_s * 1.13))
    assert banded.range_s is not None
    assert banded.range_s[0] < plain.range_s[0] < plain.range_s[1] < banded.range_s[1]
    experts = predict_layout("mixtral-8x7b", "dgx-h100", dp=16, tp=2, **JOB)
    assert experts.range_s is not None
    assert experts.range_s[1] / experts.step_s >= 1.35 > 1.13


def test_fp8_and_overlap_are_faster() -> None:
    fields: dict[str, Any] = {**JOB, "dp": 2, "tp": 8, "pp": 2}
    plain = predict_layout("llama-3-70b", "dgx-h100", **fields)
    assert predict_layout("llama-3-70b", "dgx-h100", precision="fp8", **fields).step_s < plain.step_s
    assert predict_layout("llama-3-70b", "dgx-h100", overlap="dp+tp", **fields).step_s < plain.step_s
    assert predict_layout("llama-3-70b", "dgx-h100", framework="nanotron", **fields).step_s > plain.step_s
    flops = read_architecture("llama-3-70b").flops_per_token(4096) * 64 * 4096
    assert plain.mfu == pytest.approx(flops / (plain.step_s * 32 * 989.4e12), rel=1e-3)
    assert plain.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / plain.step_s / 32)


def test_a_step_is_limited_by_its_largest_part_that_is_not_arithmetic() -> None:
    for fields, part in (({"pp": 4, "dp": 2, "global_batch": 8}, "bubble"), ({"dp": 8}, "compute")):
        found = predict_layout("llama-3-8b", "dgx-h100", **{**JOB, **fields})
        share = found.breakdown.parts.get(part, 0.0) / found.step_s
        assert found.bottleneck == part
        assert (share > 0.1) == (part == "bubble")


@pytest.mark.parametrize("text", ["dp=8", "dp=2+tp=2+pp=2", "dp=2+tp=4+recompute=full", "dp=8+zero=3"])
def test_a_step_is_what_one_gpu_takes_and_what_others_add(text: str) -> None:
    """T(1) is the same share of the batch, on one GPU that recomputes nothing and shards nothing."""
    found = predict_layout("llama-3-8b", "dgx-h100", text, band=False, **JOB)
    parts = found.breakdown.parts
    assert sum(parts.values()) == pytest.approx(found.step_s)
    assert found.exposed_s == pytest.approx(sum(parts[name] for name in parts if name not in COMPUTE))
    assert found.scaling_factor == found.single_s / found.step_s
    alone = predict_layout("llama-3-8b", "dgx-h100", zero=0, band=False, **{**JOB, "global_batch": 8})
    assert found.single_s == pytest.approx(alone.step_s)
    assert alone.scaling_factor == pytest.approx(1.0)
