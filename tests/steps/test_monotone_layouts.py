"""More work, a slower computer and a slower network take longer; more to hold takes more memory."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from backbeat.model import Network
from backbeat.model.architecture import Architecture
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.framework import Framework, framework_named
from backbeat.model.layout import Job, Layout
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import MemoryByKind
from backbeat.model.topology import Topology
from backbeat.steps.layout_memory import layout_memory
from backbeat.steps.predict_layout import Family, predict_layout
from backbeat.steps.rank_parameters import rank_parameters
from backbeat.steps.stage_layers import split_layers

SAME = 1 + 1e-9
NO_OVERLAP, TP_OVERLAP = (framework_named("megatron", overlap=overlap) for overlap in ("none", "dp+tp"))
FRAMEWORKS = st.sampled_from(["megatron", NO_OVERLAP, TP_OVERLAP, "deepspeed", "torchtitan"])
"""Those that give every stage as many layers: with one layer more for each, none has fewer than before."""
FAMILIES: st.SearchStrategy[Family] = st.sampled_from(["events", "closed-form"])
FEW = settings(max_examples=40)
SMALL = {"hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 128256}


def small(layers: int, **fields: Any) -> Architecture:
    return Architecture(name="m", layers=layers, **{**SMALL, **fields})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Architecture, Layout, Job]:
    hidden = draw(st.sampled_from([1024, 2048, 4096]))
    fields: dict[str, Any] = {"hidden": hidden, "ffn": 4 * hidden, "vocab": draw(st.sampled_from([32000, 128256]))}
    fields["tied"] = draw(st.booleans())
    if draw(st.booleans()):
        fields |= {
            "experts": 8,
            "experts_per_token": 2,
            "expert_ffn": 512,
            "shared_ffn": draw(st.sampled_from([0, 512])),
        }
    model = small(draw(st.sampled_from([4, 8, 13])), **fields)
    layout = Layout(
        dp=draw(st.sampled_from([1, 2, 4, 8])),
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([1, 2, 3, 4])),
        cp=draw(st.sampled_from([1, 1, 2])),
        ep=draw(st.sampled_from([1, 2, 4])) if model.experts else 1,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        recompute=draw(st.sampled_from(["none", "full"])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"])),
    )
    job = Job(global_batch=draw(st.sampled_from([8, 24, 32])), sequence=draw(st.sampled_from([512, 2048, 4096])))
    assume(not impossible(model, layout, job))
    return model, layout, job


@st.composite
def networks(draw: st.DrawFn) -> tuple[float, float, float, float, int]:
    """Latency and seconds a byte inside a node and across, and the GPUs of a node."""
    inside = 10 ** draw(st.floats(-6, -4.5)), 10 ** draw(st.floats(-12, -10.5))
    across = inside[0] * 10 ** draw(st.floats(0, 1)), inside[1] * 10 ** draw(st.floats(0, 1.5))
    return *inside, *across, draw(st.sampled_from([1, 2, 4, 8]))


def joined(made: tuple[float, float, float, float, int], *, latency: float = 1.0, byte: float = 1.0) -> Network:
    in_s, in_byte, out_s, out_byte, per_node = made
    inside = CollectiveTimes(alpha_s=in_s * latency, beta_s_per_byte=in_byte * byte)
    return Network(
        name="made",
        workers=2 * per_node,
        all_reduce=CollectiveTimes(alpha_s=out_s * latency, beta_s_per_byte=out_byte * byte),
        topology=Topology(algorithm="hierarchical", gpus_per_node=per_node, inside=inside, pipelined=True),
        accelerator="h100",
    )


def step_s(model: Architecture | str, network: Network | str, layout: Layout, job: Job, **given: Any) -> float:
    options = {"accelerator": "h100", "band": False, **given}
    size: dict[str, Any] = {"global_batch": job.global_batch, "sequence": job.sequence}
    return predict_layout(model, network, layout, **size, **options).step_s


def memory_of(model: Architecture, layout: Layout, job: Job, framework: Framework | str) -> MemoryByKind:
    return layout_memory(model, layout, job, framework_named(framework))


ONE_LAYER = (small(16), Layout(dp=8, pp=16), Job(global_batch=128, sequence=2048))
ALONE = (small(16), Layout(pp=16), Job(global_batch=128, sequence=2048))


@FEW
@given(cases(), FRAMEWORKS)
@example(ONE_LAYER, "torchtitan")
@example(ALONE, "torchtitan")
def test_what_is_sharded_further_takes_no_more_memory(
    case: tuple[Architecture, Layout, Job], framework: Framework | str
) -> None:
    model, layout, job = case
    found = [
        memory_of(model, msgspec.structs.replace(layout, zero=zero), job, framework).peak_bytes for zero in range(4)
    ]
    assert all(more <= less * SAME for less, more in itertools.pairwise(found)), found


@FEW
@given(cases(), FRAMEWORKS)
@example(ONE_LAYER, "torchtitan")
def test_no_more_is_gathered_than_there_is(case: tuple[Architecture, Layout, Job], framework: Framework | str) -> None:
    model, layout, job = case
    whole = max(
        sum(rank_parameters(model, layout, *split_layers(model, layout)[stage :: layout.pp]))
        for stage in range(layout.pp)
    )
    each = 2 + framework_named(framework).gradient_bytes
    found = memory_of(model, msgspec.structs.replace(layout, zero=3), job, framework)
    plain = memory_of(model, msgspec.structs.replace(layout, zero=0), job, framework)
    assert found.by_kind["buffers"] - plain.by_kind["buffers"] <= each * whole * SAME


@FEW
@given(cases(), FRAMEWORKS)
@example((small(1), Layout(dp=8, zero=3), Job(global_batch=32, sequence=512)), "torchtitan")
@example((small(3), Layout(dp=8, pp=3, zero=3), Job(global_batch=32, sequence=512)), "torchtitan")
def test_more_layers_take_no_less_memory(case: tuple[Architecture, Layout, Job], framework: Framework | str) -> None:
    model, layout, job = case
    deeper = msgspec.structs.replace(model, layers=model.layers + layout.pp)
    assert (
        memory_of(model, layout, job, framework).peak_bytes
        <= memory_of(deeper, layout, job, framework).peak_bytes * SAME
    )


@FEW
@given(cases(), networks(), FRAMEWORKS, FAMILIES)
@example(
    (small(1), Layout(dp=4, zero=2), Job(global_batch=32, sequence=512)),
    (1e-4, 1.5e-9, 1e-4, 1.5e-9, 1), "megatron", "events",
)  # fmt: skip
@example(
    (small(3), Layout(dp=4, pp=3, zero=3), Job(global_batch=32, sequence=512)),
    (1e-4, 1.5e-9, 1e-4, 1.5e-9, 1), "megatron", "events",
)  # fmt: skip
def test_more_layers_take_no_less_time(
    case: tuple[Architecture, Layout, Job],
    made: tuple[float, float, float, float, int],
    framework: Framework | str,
    family: Family,
) -> None:
    model, layout, job = case
    deeper = msgspec.structs.replace(model, layers=model.layers + layout.pp)
    few, many = (
        step_s(each, joined(made), layout, job, framework=framework, family=family) for each in (model, deeper)
    )
    assert few <= many * SAME


@FEW
@given(cases(), FRAMEWORKS)
@example((small(4), Layout(dp=2, pp=4, recompute="full"), Job(global_batch=2, sequence=4096)), "torchtitan")
def test_what_is_recomputed_takes_no_more_memory(
    case: tuple[Architecture, Layout, Job], framework: Framework | str
) -> None:
    model, layout, job = case
    none, full = (
        memory_of(model, msgspec.structs.replace(layout, recompute=each), job, framework) for each in ("none", "full")
    )
    assert full.peak_bytes <= none.peak_bytes * SAME


@FEW
@given(cases(), networks(), st.sampled_from([2, 4]), FAMILIES)
@example(
    (small(4), Layout(dp=4, pp=4, schedule="gpipe"), Job(global_batch=8, sequence=512)),
    (1e-5, 1e-11, 1e-5, 1e-10, 1),
    2,
    "events",
)
def test_where_weight_decides_the_stages_more_layers_take_what_the_average_stage_takes(
    case: tuple[Architecture, Layout, Job], made: tuple[float, float, float, float, int], more: int, family: Family
) -> None:
    """nanotron cuts anew with every layer, and may find stages that are more alike. A step may become shorter by that,
    but by no more than stages waited: micro-batches times the average stage grow with every layer, and no cut is
    faster."""
    model, layout, job = case
    layout = msgspec.structs.replace(layout, zero=min(layout.zero, 1))
    job_fields: dict[str, Any] = {"global_batch": job.global_batch, "sequence": job.sequence, "band": False}
    found = [
        predict_layout(each, joined(made), layout, framework="nanotron", family=family, **job_fields)
        for each in (model, msgspec.structs.replace(model, layers=model.layers + more))
    ]
    after = [each.breakdown.reduce_s + each.breakdown.update_s + each.breakdown.gather_s for each in found]
    few, many = (each.step_s - rest for each, rest in zip(found, after, strict=True))
    assert few * (1 - found[0].bubble_share) <= many * SAME


ZERO_BUBBLE = Layout(dp=8, pp=4, tp=2, zero=3, schedule="zero-bubble")


@FEW
@given(cases(), networks(), FRAMEWORKS, FAMILIES)
def test_slower_computation_takes_no_less_time(
    case: tuple[Architecture, Layout, Job],
    made: tuple[float, float, float, float, int],
    framework: Framework | str,
    family: Family,
) -> None:
    model, layout, job = case
    fast, same, slow = (
        step_s(model, joined(made), layout, job, framework=framework, family=family, compute_factor=factor)
        for factor in (0.5, 1, 2)
    )
    assert fast <= same * SAME
    assert same <= slow * SAME
    assert slow <= 2 * same * SAME


@pytest.mark.parametrize(
    ("name", "framework"), [("llama-3-8b", "torchtitan"), ("gpt3-6.7b", "torchtitan"), ("llama-3-8b", "megatron")]
)
def test_a_zero_bubble_is_no_longer_where_computation_is_faster(name: str, framework: Framework | str) -> None:
    job = Job(global_batch=32, sequence=2048)
    fast, same = (
        step_s(name, "dgx-h100", ZERO_BUBBLE, job, framework=framework, compute_factor=factor) for factor in (0.5, 1)
    )
    assert fast <= same * SAME


@pytest.mark.parametrize(
    ("name", "network", "framework", "dp", "ep"),
    [
        ("mixtral-8x7b", "10gbe", "megatron", 16, 8),
        ("mixtral-8x7b", "10gbe", "nanotron", 32, 8),
        ("qwen3-30b-a3b", "100gbe", "megatron", 16, 1),
    ],
)
def test_one_backward_hides_what_experts_and_what_others_reduce(
    name: str, network: str, framework: Framework | str, dp: int, ep: int
) -> None:
    layout, job = Layout(dp=dp, ep=ep, zero=1), Job(global_batch=dp, sequence=4096)
    same, slow = (step_s(name, network, layout, job, framework=framework, compute_factor=factor) for factor in (1, 2))
    assert same <= slow * SAME


@FEW
@given(cases(), networks(), FRAMEWORKS, FAMILIES)
def test_a_faster_network_takes_no_more_time(
    case: tuple[Architecture, Layout, Job],
    made: tuple[float, float, float, float, int],
    framework: Framework | str,
    family: Family,
) -> None:
    model, layout, job = case
    same, sooner, wider = (
        step_s(model, network, layout, job, framework=framework, family=family)
        for network in (joined(made), joined(made, latency=0.5), joined(made, byte=0.5))
    )
    assert max(sooner, wider) <= same * SAME


@pytest.mark.parametrize("network", ["aws-p5", "dgx-h100"])
@pytest.mark.parametrize("framework", ["megatron", TP_OVERLAP], ids=["dp", "dp+tp"])
def test_longer_sequences_take_no_less_time(network: str, framework: Framework | str) -> None:
    layout = Layout(dp=2, tp=4, zero=1)
    found = [
        step_s("gpt3-1.3b", network, layout, Job(global_batch=48, sequence=sequence), framework=framework)
        for sequence in (512, 1024, 2048)
    ]
    assert found == sorted(found)


@FEW
@given(cases(), networks(), FRAMEWORKS, FAMILIES)
def test_twice_the_tokens_take_no_less_time_or_memory(
    case: tuple[Architecture, Layout, Job],
    made: tuple[float, float, float, float, int],
    framework: Framework | str,
    family: Family,
) -> None:
    model, layout, job = case
    longer = msgspec.structs.replace(job, sequence=2 * job.sequence)
    few, many = (
        step_s(model, joined(made), layout, each, framework=framework, family=family) for each in (job, longer)
    )
    assert few <= many * SAME
    assert (
        memory_of(model, layout, job, framework).peak_bytes
        <= memory_of(model, layout, longer, framework).peak_bytes * SAME
    )
