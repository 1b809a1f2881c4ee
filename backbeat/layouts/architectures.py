"""Models by name, and Hugging Face's config.json."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbeat.errors import InputError
from backbeat.layouts.config_reader import read_config
from backbeat.layouts.transformer import Transformer
from backbeat.model.files import checked

_GPT: dict[str, Any] = {"gated": False, "rms_norm": False, "bias": True, "tied": True, "dropout": True}
_GPT3_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "175b": (96, 12288, 96),
}
"""Layers, hidden, heads. Where the paper's heads do not divide its hidden width, those that others train with."""
_LLAMA_SHAPES = {
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256),
    "llama-3.2-3b": (28, 3072, 24, 8, 8192, 128256),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": (126, 16384, 128, 8, 53248, 128256),
}
"""Layers, hidden, heads, heads of keys and values, MLP, vocabulary."""
_EXPERT_SHAPES = {
    "mixtral-8x7b": (32, 4096, 32, 8, 0, 32000, 8, 2, 14336),
    "mixtral-8x22b": (56, 6144, 48, 8, 0, 32768, 8, 2, 16384),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 151936, 128, 8, 768),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 151936, 128, 8, 1536),
}
"""Layers, hidden, heads, heads of keys and values, head width, vocabulary, experts, experts per token, their MLP."""
_DEEPSEEK: dict[str, Any] = {
    "vocab": 129280,
    "latent_width": 512,
    "head_width": 128,
    "rope_width": 64,
    "value_width": 128,
    "query_rank": 1536,
}


def _bundled() -> dict[str, Transformer]:
    made = [
        Transformer(
            name=f"gpt3-{size}", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden,
            vocab=50257, positions=2048, **_GPT,
        )
        for size, (layers, hidden, heads) in _GPT3_SHAPES.items()
    ]  # fmt: skip
    made += [
        Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocab=vocab, tied="3.2" in name
        )
        for name, (layers, hidden, heads, kv, ffn, vocab) in _LLAMA_SHAPES.items()
    ]
    made += [
        Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_width=width, ffn=0, vocab=vocab,
            experts=experts, experts_per_token=taken, expert_ffn=ffn,
        )
        for name, (layers, hidden, heads, kv, width, vocab, experts, taken, ffn) in _EXPERT_SHAPES.items()
    ]  # fmt: skip
    made += [
        Transformer(
            name="deepseek-v3", layers=61, hidden=7168, heads=128, ffn=18432, experts=256, experts_per_token=8,
            expert_ffn=2048, shared_ffn=2048, dense_layers=3, **_DEEPSEEK,
        ),
        Transformer(
            name="deepseek-v2", layers=60, hidden=5120, heads=128, ffn=12288, experts=160, experts_per_token=6,
            expert_ffn=1536, shared_ffn=3072, dense_layers=1, **{**_DEEPSEEK, "vocab": 102400},
        ),
    ]  # fmt: skip
    return {one.name: one for one in made}


BUNDLED = _bundled()
"""By name. GPT-3 as in its paper; Llama, Mixtral, Qwen and DeepSeek as in their published configurations."""


def transformer(model: Transformer | str | os.PathLike[str] | Mapping[str, Any]) -> Transformer:
    """A model by its bundled name, its config.json (or the folder that holds it), or as a dict of either kind.

    >>> transformer("llama-3-8b").layers, transformer({"model_type": "gpt2", "n_embd": 768, "n_layer": 12,
    ...     "n_head": 12, "vocab_size": 50257, "n_positions": 1024}).ffn
    (32, 3072)
    """
    if isinstance(model, Transformer):
        return model
    if isinstance(model, Mapping):
        return _from_fields(dict(model), "the model")
    text = os.fspath(model)
    if text in BUNDLED:
        return BUNDLED[text]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"{text} is a folder without a config.json: give a model's, or a bundled name")
    if not path.is_file():
        close = difflib.get_close_matches(text, BUNDLED, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"bundled are {', '.join(BUNDLED)}."
        raise InputError(f"{text!r} is neither a config.json nor a bundled model: {hint}")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no JSON can be read from it ({error}): give a model's config.json") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path}: a {type(fields).__name__}, where a model's config.json is an object")
    return _from_fields(fields, str(path))


def _from_fields(fields: dict[str, Any], where: str) -> Transformer:
    if "layers" in fields and "hidden" in fields:
        return checked({"name": "custom", **fields}, Transformer, f"{where}: ")
    return read_config(fields, where)
