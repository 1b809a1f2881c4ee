"""A chain of pieces, by its two makers: it has the times and parameters of what it was made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat import api
from backbeat.layouts.predict_layout import predictor_of
from backbeat.layouts.rank_parameters import rank_parameters
from backbeat.layouts.stage_layers import split_layers
from backbeat.layouts.stage_times import StageTimes
from backbeat.layouts.transformer_chain import chain_of_layers
from backbeat.model import Network, Profile
from backbeat.model.layout import Job, Layout
from backbeat.model.profile import device_alone
from backbeat.steps.model_chain import ModelChain
from backbeat.steps.sharded_units import ShardedChain, chain_of
from tests.chains import chains
from tests.problems import profiles

NAMES = ("resnet50-b64-bf16-h200", "llama-8b-b1-bf16-adamw-h200", "bert-large-b64-bf16-adamw-h200")


@given(st.one_of(profiles(), chains()))
def test_a_profile_keeps_its_times_and_gradients(profile: Profile) -> None:
    _compare(ModelChain.of_profile(profile), profile)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_profile_keeps_its_times_and_gradients(name: str) -> None:
    _compare(ModelChain.of_profile(Profile.load(name)), Profile.load(name))


def _compare(chain: ModelChain, profile: Profile) -> None:
    own = device_alone(profile)
    assert chain.forward_s == pytest.approx(own.forward_s)
    assert chain.backward_s == pytest.approx(own.backward_s)
    assert [one.name for one in chain.gradients] == [one.name for one in own.gradients]
    assert [one.ready_s for one in chain.gradients] == own.ready.tolist()
    assert chain.elements == sum(one.elements for one in chain.gradients)
    for index, piece in enumerate(chain.pieces):
        assert sum(piece.elements) == sum(one.elements for one in chain.gradients if one.piece == index)


@pytest.mark.parametrize("name", NAMES)
def test_units_cut_from_it_are_those_cut_from_the_profile(name: str) -> None:
    profile = device_alone(Profile.load(name))
    plan = api.plan(profile, Network.load("aws-p5en").at(workers=16), "fsdp")
    assert plan.sharding is not None
    direct, cut = chain_of(profile, plan), ShardedChain.of(ModelChain.of_profile(profile).model_pieces(), plan.sharding)
    assert cut.elements == direct.elements
    assert [part.unit for part in cut.parts] == [part.unit for part in direct.parts]
    for mine, theirs in zip(cut.parts, direct.parts, strict=True):
        assert (mine.forward_s, mine.backward_s) == pytest.approx((theirs.forward_s, theirs.backward_s))


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("llama-3-8b", "dp=8"),
        ("llama-3-8b", "dp=8,recompute=full"),
        ("llama-3-8b", "dp=4,pp=2,recompute=selective"),
        ("mixtral-8x7b", "dp=8,pp=2"),
        ("gpt3-175b", "dp=1,pp=4"),
    ],
)
def test_layers_take_what_their_stage_takes_without_communication(model: str, label: str) -> None:
    layout = Layout.parse(label)
    predictor = predictor_of(model, "dgx-h100", Job(global_batch=64, sequence=2048), framework="megatron")
    timer = predictor.timer(layout)
    for layers, stage in zip(split_layers(timer.model, layout), timer.stages(), strict=True):
        chain = chain_of_layers(timer, layers)
        assert sum(piece.weight_s for piece in chain.pieces) == pytest.approx(stage.weight_s)
        assert chain.forward_s + chain.backward_s == pytest.approx(stage.total_s - _communication_s(stage))
        assert len(chain.pieces) == layers.layers + layers.first + layers.last
        held = rank_parameters(timer.model, layout, layers)
        if not timer.model.bias:
            assert chain.elements == pytest.approx(sum(held), rel=1e-3)
        assert chain.gradients[-1].ready_s == pytest.approx(chain.backward_s)


def _communication_s(stage: StageTimes) -> float:
    return stage.parts.tensor + stage.parts.context + stage.parts.expert + stage.parts.contention


def test_recomputing_keeps_less_and_takes_longer() -> None:
    predictor = predictor_of("llama-3-8b", "dgx-h100", Job(global_batch=64, sequence=4096))
    for layout in (Layout(dp=8), Layout(dp=8, recompute="full")):
        (layers,) = split_layers(predictor.model, layout)
        piece = chain_of_layers(predictor.timer(layout), layers).pieces[1]
        assert piece.kept_bytes["full"] < piece.kept_bytes["selective"] <= piece.kept_bytes["none"]
