"""The blocks of models as people build them."""

from __future__ import annotations

import copy
import doctest

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402

from backbeat.measure.model import chain  # noqa: E402
from backbeat.model import MemoryPlan, Segment  # noqa: E402
from backbeat.runtime.memory import apply, block, find_blocks, observe  # noqa: E402
from tests.runtime.memory.memory_models import Layer, SmallTransformer, resnet_case, transformer_case  # noqa: E402


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
        "embedding", *(f"encoder.layers.{place}" for place in range(4)), "encoder.norm", "head",
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


TINY = {
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False},
        ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.1",
         "transformer.ln_f", "lm_head"],
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "use_cache": False},
        ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
         "use_cache": False},
        ["encoder.dropout", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm",
         "decoder.dropout", "decoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head"],
    ),
}  # fmt: skip


def language_model(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model_class, config_class, options, _ = TINY[kind]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(vocab_size=64, **options))
    tokens = torch.randint(0, 64, (2, 8))
    return model.train(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("kind", TINY)
def test_models_of_transformers(kind):
    model, batch = language_model(kind)
    links = observe(find_blocks(model), lambda: model(**batch))
    # Which name a shared embedding goes by differs between versions of transformers.
    names = [link.name for link in links if kind != "t5" or not link.name.endswith(("shared", "embed_tokens"))]
    assert names == TINY[kind][3]


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize(("action", "where"), [("recompute", "keep"), ("recompute", "offload"), ("offload", "keep")])
def test_models_of_transformers_train_alike(kind, action, where, monkeypatch):
    from backbeat.runtime.memory import offload

    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)
    model, batch = language_model(kind)

    def gradients(segments=()):
        mine = copy.deepcopy(model)
        handle = apply(mine, MemoryPlan(segments=segments))
        torch.manual_seed(1)
        mine(**batch).loss.backward()
        handle.remove()
        return {name: parameter.grad for name, parameter in mine.named_parameters()}

    layers = [name for name in TINY[kind][3] if name[-1].isdigit()]
    segments = tuple(
        Segment(blocks=tuple(names), action=action, input=where)
        for names in (layers[:2], layers[2:], ["lm_head" if kind != "bert" else "cls"])
        if names
    )
    expected, found = gradients(), gradients(segments)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None)
        assert gradient is None or torch.equal(gradient, found[name]), name
