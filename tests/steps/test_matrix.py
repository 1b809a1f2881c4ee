"""One job by every route gives the same number: by its shape, by its module without data, and as it was measured."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from backbeat.importers.config_json import read_architecture
from backbeat.model import Network, Profile
from backbeat.model.accelerator import operator_model
from backbeat.model.architecture import Architecture
from backbeat.planners import propose
from backbeat.steps.described import described
from backbeat.steps.predict import predict

WAYS = ("ddp", "fsdp", "hsdp:8", "zero1", "zero2")
CLUSTERS = {"aws-p4d": "a100", "aws-p5": "h100", "aws-p5en": "h200", "aws-p6-b200": "b200"}
MEASURED = ("llama-8b-b1-bf16-adamw-h200", "llama-1b-b4-bf16-adamw-h200", "gpt2-b8-bf16-adamw-h200")
_8B, _1B, _GPT2 = (Profile.load(name).architecture for name in MEASURED)
MODELS: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "llama-1b": (_1B, {"batch": 4, "sequence": 1024}),
    "llama-8b": (_8B, {"sequence": 4096}),
    "llama-70b": (read_architecture("llama-3-70b"), {"sequence": 4096}),
    "gpt2": (_GPT2, {"batch": 8, "sequence": 1024}),
}
# Layers that a module is built with: each adds the same to both sides.
LAYERS = {"llama-1b": 2, "llama-8b": 2, "llama-70b": 1, "gpt2": 12}


@cache
def _shape(model: str, gpu: str, layers: int | None = None) -> Profile:
    shape, told = MODELS[model]
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
    whole = Architecture(**fields | {"layers": layers or shape.layers})
    return described(whole, operator_model(gpu, "bf16"), **told)


@cache
def _module(model: str, gpu: str) -> Profile:
    """Of transformers' own module of that shape, on tensors without data."""
    import torch
    import transformers

    from backbeat.measure.model.analytic import analytic_profile
    from backbeat.measure.model.factory import Factory

    shape, told = MODELS[model]

    def build(batch_size: int = 1, device: str = "cpu") -> Any:
        sizes = {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "use_cache": False}
        if shape.positions:
            config: Any = transformers.GPT2Config(
                n_embd=shape.hidden, n_layer=LAYERS[model], n_head=shape.heads, n_positions=shape.positions, **sizes
            )  # fmt: skip
        else:
            config = transformers.LlamaConfig(
                hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=LAYERS[model],
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, **sizes,
            )  # fmt: skip
        with torch.device(device):
            kind = transformers.GPT2LMHeadModel if shape.positions else transformers.LlamaForCausalLM
            made = kind(config).train()
            tokens = torch.randint(0, shape.vocab, (batch_size, told["sequence"]))
        return made, {"input_ids": tokens, "labels": tokens}, lambda module, batch: module(**batch).loss

    factory = Factory(model, build, takes_batch_size=True, takes_device=True, default_batch_size=1)
    return analytic_profile(factory, gpu=gpu, batch_size=told.get("batch", 1), optimizer="adamw")


def _step(profile: Profile, cluster: str, workers: int, way: str) -> tuple[float, int]:
    """Seconds, and bytes at the peak."""
    network = Network.load(cluster).at(workers=workers)
    found = predict(profile, network, propose(profile, network, way))
    assert profile.memory is not None
    return found.iteration_s, found.peak_bytes or profile.memory.peak_bytes


def _cells() -> list[Any]:
    """Every sample is of another model, cluster and size; all of them take long."""
    found = []
    for model, cluster, workers in product(MODELS, CLUSTERS, (8, 64, 512)):
        quick = (model, cluster) == ("llama-1b", "aws-p5") and workers < 512
        found.append(pytest.param(model, cluster, workers, marks=() if quick else pytest.mark.long))
    return found


@pytest.mark.parametrize(("model", "cluster", "workers"), _cells())
def test_a_shape_is_what_its_module_is(model: str, cluster: str, workers: int) -> None:
    pytest.importorskip("transformers")
    gpu = CLUSTERS[cluster]
    for way in WAYS:
        by_shape = _step(_shape(model, gpu, LAYERS[model]), cluster, workers, way)
        by_module = _step(_module(model, gpu), cluster, workers, way)
        assert by_shape == pytest.approx(by_module, rel=0.03), way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("workers", [8, pytest.param(64, marks=pytest.mark.long), 512])
def test_a_shape_is_as_it_was_measured(name: str, way: str, workers: int) -> None:
    model = name.partition("-b")[0]
    by_shape = _step(_shape(model, "h200"), "aws-p5en", workers, way)
    measured = _step(Profile.load(name), "aws-p5en", workers, way)
    assert by_shape == pytest.approx(measured, rel=0.1)
