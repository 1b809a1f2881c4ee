"""A chain of pieces has the times and parameters of the profile that it was made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.model import Profile
from backbeat.model.profile import device_alone
from backbeat.steps.model_chain import Chain
from tests.chains import chains
from tests.problems import profiles

NAMES = ("resnet50-b64-bf16-h200", "llama-8b-b1-bf16-adamw-h200", "bert-large-b64-bf16-adamw-h200")


@given(st.one_of(profiles(), chains()))
def test_a_profile_keeps_its_times_and_parameters(profile: Profile) -> None:
    own = device_alone(profile)
    _compare(Chain.of_profile(own), own)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_profile_keeps_its_times_and_parameters(name: str) -> None:
    own = device_alone(Profile.load(name))
    _compare(Chain.of_profile(own), own)


def _compare(chain: Chain, own: Profile) -> None:
    assert chain.forward_s == pytest.approx(own.forward_s)
    assert chain.backward_s == pytest.approx(own.backward_s)
    elements = sum(chain.loose) + sum(sum(piece.elements) for piece in chain.pieces)
    assert elements == sum(-(-gradient.bytes // own.element_bytes) for gradient in own.gradients)
