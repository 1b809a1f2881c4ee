"""The blocks of models as people build them."""

from __future__ import annotations

import copy
import doctest

import pytest
import torch
from torch import nn

from backbeat.measure.model import chain
from backbeat.measure.model.chain import block, find_blocks, observe
from tests.block_models import (
    LANGUAGE_MODELS,
    Layer,
    SmallTransformer,
    language_model,
    resnet_case,
    transformer_case,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_resnet_opens_its_stages_and_not_its_blocks():
    model, batch = resnet_case()
    names = list(find_blocks(model))
    assert names == [
        "conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "avgpool", "fc",
    ]  # fmt: skip
    links = observe(find_blocks(model), lambda: model(batch[0]))
    assert [link.name for link in links] == names
    assert [link.name for link in links if not link.chained] == ["conv1", "fc"]
    assert [link.name for link in links if link.changes_input] == ["relu"]


def test_a_transformer_opens_what_holds_its_layers():
    model, batch = transformer_case()
    links = observe(find_blocks(model), lambda: model(batch[0]))
    assert [link.name for link in links] == [
        "embedding", *(f"encoder.layers.{index}" for index in range(4)), "encoder.norm", "head",
    ]  # fmt: skip
    assert [link.chained for link in links] == [False, True, True, True, True, True, False]


def test_a_marked_module_is_one_block_and_what_holds_it_is_opened():
    model = nn.Sequential(block(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), nn.Linear(2, 2))
    assert list(find_blocks(model)) == ["0", "1"]
    assert list(find_blocks(copy.deepcopy(model))) == ["0", "1"]
    wrapped = SmallTransformer(depth=2)
    block(wrapped.encoder.layers[0].mlp)
    names = list(find_blocks(wrapped))
    assert "encoder.layers.0.mlp" in names
    assert "encoder.layers.0.attention" in names
    assert "encoder.layers.1" in names


def test_a_layer_of_a_stack_is_a_block_whatever_it_holds():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Layer(8, 2) for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleList(Mixture() for _ in range(2))
    assert list(find_blocks(model)) == ["layers.0", "layers.1"]


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(chain) == (0, 1 + 1)


def test_a_model_without_children_has_no_blocks():
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_blocks_called_twice_are_counted_and_never_chained():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    model.add_module("again", nn.Tanh())
    links = observe(find_blocks(model), lambda: model(torch.zeros(1, 4)))
    assert [(link.name, link.calls, link.chained) for link in links] == [
        ("0", 2, False), ("1", 1, True), ("again", 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_models_of_transformers(kind):
    model, batch = language_model(kind)
    links = observe(find_blocks(model), lambda: model(**batch))
    # Which name a shared embedding goes by differs between versions of transformers.
    names = [link.name for link in links if kind != "t5" or not link.name.endswith(("shared", "embed_tokens"))]
    assert names == LANGUAGE_MODELS[kind][3]
