"""Gradients in buckets of whole tensors, behind backward and between stages; stages of equal cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.importers.config_json import read_architecture
from backbeat.model.layout import Layout
from backbeat.steps.predict_layout import predict_layout
from backbeat.steps.rank_parameters import dense_buckets, equal_buckets, rank_parameters
from backbeat.steps.replicas import GradientMessage, StageEnds
from backbeat.steps.schedule import Flow
from backbeat.steps.stage_layers import StageLayers, split_layers
from tests.steps.fixed_point import contended

MODELS = st.sampled_from(["llama-3.2-1b", "llama-3-8b", "gpt3-13b", "mixtral-8x7b", "deepseek-v3"])


@settings(max_examples=60, deadline=None)
@given(MODELS, st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 3, 4, 8]), st.booleans(), st.floats(1e6, 1e10))
def test_buckets_hold_every_parameter_in_the_order_of_backward(
    name: str, tp: int, pp: int, by_cost: bool, cap: float
) -> None:
    model, layout = read_architecture(name), Layout(tp=tp, pp=pp)
    stages = split_layers(model, layout, by_cost=by_cost)
    assert sum(stage.layers for stage in stages) == model.layers
    assert [sum(getattr(stage, end) for stage in stages) for end in ("first", "last")] == [1, 1]
    for stage in stages:
        held = rank_parameters(model, layout, stage).dense
        for most in (cap, None):
            made = dense_buckets(model, tp, (stage,), most)
            assert sum(one.elements for one in made) == pytest.approx(held, rel=1e-9)
            ready = [one.ready for one in made]
            assert ready == sorted(ready)
            assert not ready or ready[-1] <= 1 + 1e-9
            assert all(one.elements >= cap for one in made[:-1]) or most is None
            assert most is not None or len(made) <= 1


def test_stages_of_equal_cost_leave_room_for_the_head() -> None:
    small = read_architecture({"layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072})
    even, weighed = (
        predict_layout(small, "dgx-h100", framework=framework, pp=4, global_batch=32, sequence=4096, band=False)
        for framework in ("megatron", "nanotron")
    )
    assert weighed.bubble_share < even.bubble_share
    deep = predict_layout(small, "dgx-h100", framework="nanotron", pp=8, dp=2, global_batch=32, sequence=4096)
    assert deep.step_s > 0, "the last stage has nothing to do"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.floats(1.0, 2.0))
def test_buckets_take_what_the_simulation_of_data_parallelism_says(
    buckets: int, window: float, each: float, slowdown: float
) -> None:
    def one_by_one(ready: Any) -> Flow:
        starts, free = [], 0.0
        for moment in ready:
            starts.append(max(float(moment), free))
            free = starts[-1] + each
        return Flow(np.array(starts), np.array(starts), np.array(starts) + each)

    flow, _ = contended(one_by_one, window / buckets * np.arange(1, buckets + 1), slowdown)
    messages = [GradientMessage(each, bucket.ready, 1.0) for bucket in equal_buckets(float(buckets), 1.0)]
    found = StageEnds(1.0, window, slowdown).reduced(messages)
    assert flow.finishes[-1] == pytest.approx(window + found.seconds, rel=1e-6)
    if slowdown == 1:
        assert StageEnds(1.0, window, simulated=False).reduced(messages).seconds == pytest.approx(found.seconds)


def test_what_is_complete_last_hides_behind_nothing() -> None:
    found = StageEnds(5.0, 10.0).reduced([GradientMessage(1.0, 0.5, 1.0), GradientMessage(4.0, 1.0, 4.0)])
    assert found.seconds == pytest.approx(4.0)


def test_a_layer_of_experts_takes_the_time_of_those_a_token_goes_to() -> None:
    """Of 2 of 8 experts, of the one that all tokens share, of the router, and of attention as in any layer."""
    model = read_architecture(
        {"layers": 2, "dense_layers": 1, "hidden": 8, "heads": 1, "ffn": 32, "vocab": 100, "experts": 8}
        | {"experts_per_token": 2, "expert_ffn": 4, "shared_ffn": 16}
    )
    first, *_ = dense_buckets(model, 1, (StageLayers(1, 1, False, False),), 100)
    dense = sum(one.parameters for one in (*model.attention, *model.mlp(32)))
    shared, expert = (sum(one.parameters for one in model.mlp(inner)) for inner in (16, 4))
    sparse = sum(one.parameters for one in model.attention) + model.router.parameters + shared + 2 * expert
    assert first.ready == pytest.approx(sparse / (sparse + dense))


def test_a_tied_embedding_is_added_up_between_stages() -> None:
    shape = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 131072}
    job: dict[str, Any] = {"pp": 4, "tp": 8, "global_batch": 8, "sequence": 1024, "band": False}
    apart, tied = (
        predict_layout(read_architecture({**shape, "tied": each}), "dgx-h100", **job).breakdown.reduce_s
        for each in (False, True)
    )
    assert apart == 0
    assert tied > 2 * 131072 * 1024 / 8 / 50e9, "a NIC of 50 GB/s carries what a GPU has, in four bytes"


def test_chunks_reduce_their_gradients_one_after_the_other() -> None:
    job: dict[str, Any] = {"dp": 16, "pp": 4, "tp": 4, "global_batch": 64, "sequence": 4096, "band": False}
    for family in ("events", "closed-form"):
        one, four = (
            predict_layout("llama-3-70b", "aws-p5", chunks=each, family=family, **job).breakdown.reduce_s
            for each in (1, 4)
        )
        assert four < one


def test_nanotron_copies_a_slice_of_every_tensor_from_every_replica() -> None:
    job: dict[str, Any] = {"framework": "nanotron", "sequence": 4096, "band": False}
    few, many = (
        predict_layout("llama-3.2-1b", "aws-p5", dp=dp, global_batch=dp, **job).breakdown.gather_s for dp in (8, 128)
    )
    tensors = 16 * 6 + 2
    assert many - few > (128 - 8) * tensors * 4e-6
    zero = predict_layout("llama-3.2-1b", "aws-p5", dp=128, zero=0, global_batch=128, **job)
    assert zero.breakdown.gather_s == 0
