"""Models whose gradients are not fp32, and profiles that spell their precision otherwise."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.model.network import CollectiveTimes
from backbeat.model.profile import Dtype, Gradient
from backbeat.planners.planned import planned, predicted
from backbeat.show.words.notes import worded
from backbeat.steps.model_chain import chain_of
from backbeat.steps.sharded_memory import sharded_activations

NETWORK = bb.Network(name="n", workers=8, all_reduce=CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=1e-9))
ELEMENTS = 10_000_000


def profile(dtype: Dtype, precision: str = "bf16") -> bb.Profile:
    """Four layers of as many parameters, whatever they are held in."""
    width = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    return bb.Profile(
        name="layers", model="layers", batch_size=4, precision=precision, device="d",
        forward_s=0.02, backward_s=0.04, update_s=0.004, gradient_dtype=dtype,
        gradients=tuple(
            Gradient(name=f"layers.{3 - i}.w", bytes=ELEMENTS * width, ready_s=0.01 * (i + 1)) for i in range(4)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "hsdp:4", "zero1"])
def test_units_have_as_many_elements_whatever_gradients_are_in(strategy: str) -> None:
    fp32, bf16 = (predicted(profile(dtype), NETWORK, strategy) for dtype in ("fp32", "bf16"))
    assert bf16.iteration_s == pytest.approx(fp32.iteration_s, rel=1e-9)
    gathers = [span.bytes for span in bf16.timeline if "all-gather" in span.name]
    assert gathers
    assert set(gathers) == {2 * ELEMENTS}


def test_compressed_buckets_have_as_many_elements_whatever_gradients_are_in() -> None:
    sent = []
    for dtype in ("fp32", "bf16"):
        one = profile(dtype)
        plan = planned(one, NETWORK, "compressed", density=0.01)
        assert plan.compressed
        spans = predicted(one, NETWORK, plan).timeline
        sent.append(sum(span.bytes for span in spans if span.name.endswith("(topk)")))
    assert sent[0] == sent[1] > 0


def test_a_model_in_bf16_is_gathered_in_bf16() -> None:
    """Without autocast parameters travel as they are."""
    plan = planned(profile("bf16", precision="fp32"), NETWORK, "fsdp")
    assert plan.sharding is not None
    assert plan.sharding.param_dtype == "bf16"


@pytest.mark.parametrize("precision", ["bf16", "BF16", "bfloat16", "BFloat16"])
def test_a_precision_is_known_by_any_of_its_names(precision: str) -> None:
    plan = planned(profile("fp32", precision), NETWORK, "fsdp")
    assert plan.sharding is not None
    assert plan.sharding.param_dtype == "bf16"


def test_a_precision_that_is_not_known_is_noted() -> None:
    found = predicted(profile("fp32", "amp"), NETWORK, "fsdp")
    assert any("precision 'amp' is not known" in note for note in worded(found.notes))
    known = predicted(profile("fp32", "tf32"), NETWORK, "fsdp")
    assert not any("precision" in note for note in worded(known.notes))


def test_iteration_times_in_another_unit_are_noted() -> None:
    milliseconds = replace(profile("fp32"), iteration_s=tuple(64.0 + i / 10 for i in range(10)))
    seconds = replace(profile("fp32"), iteration_s=tuple(0.064 + i / 10_000 for i in range(10)))
    assert any("are both in seconds?" in note for note in worded(predicted(milliseconds, NETWORK, "ddp").notes))
    assert not any("are both in seconds?" in note for note in worded(predicted(seconds, NETWORK, "ddp").notes))


def test_only_fp32_weights_under_autocast_have_copies() -> None:
    """Copies that backward keeps are taken off a sharded step's activations; a model held in bf16 has none."""
    assert profile("fp32", "bf16").autocast == "bf16"
    assert profile("bf16", "bf16").autocast is None
    assert profile("bf16", "fp32").autocast is None
    assert profile("fp32", "fp32").autocast is None
    held = bb.Profile.load("llama-1b-b4-bf16-adamw-h200")
    halved = replace(
        held, precision="fp32", gradient_dtype="bf16",
        gradients=tuple(replace(one, bytes=one.bytes // 2) for one in held.gradients),
    )  # fmt: skip
    network = bb.Network.load("aws-p5en").at(workers=8)
    for one, copies in ((held, True), (halved, False)):
        chain = chain_of(one, planned(one, network, "fsdp"))
        saved = sum(block.saved_bytes for block in one.blocks)
        left = sum(block.saved_bytes for block in sharded_activations(one, chain).blocks)
        assert (left < saved) == copies


def test_accumulated_iterations_with_a_long_update_are_not_taken_for_another_unit() -> None:
    one = replace(profile("fp32"), accumulation=8, update_s=0.18)
    whole = 8 * (one.forward_s + one.backward_s) + one.update_s
    found = predicted(replace(one, iteration_s=(whole,) * 10), NETWORK, "ddp")
    assert not any("are both in seconds?" in note for note in worded(found.notes))
