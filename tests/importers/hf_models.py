"""Models that transformers builds without weights, to be counted: of any class, with drawn fields."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

NEEDED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
"""What some classes need to build a model beside what they have by default."""
_BUILDERS = (
    (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    (MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, AutoModelForImageTextToText),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
)
_LANGUAGE = ("language_model.", "text_model.", "lm_head.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Classes warn of token numbers, and of positions that nobody gave."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def config_of(kind: str, **fields: Any) -> Any:
    with quiet():
        return CONFIG_MAPPING[kind](**fields)


def written(config: Any) -> dict[str, Any]:
    """As `save_pretrained` writes it."""
    with quiet():
        return json.loads(config.to_json_string(use_diff=True))  # type: ignore[no-any-return]


def counted(config: Any, *, language: bool = False) -> int | None:
    """Parameters of the model; None where transformers has none that speaks or cannot build it. `language`: of its
    language model alone."""
    builder = next((made for names, made in _BUILDERS if config.model_type in names), None)
    if builder is None:
        return None
    try:
        with quiet(), torch.device("meta"):
            model = builder.from_config(config)
    except Exception:
        return None
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    # Some are built without what sees.
    own = {name: size for name, size in sizes.items() if any(part in name for part in _LANGUAGE)}
    whole = not language or all(name.startswith("lm_head.") for name in own)
    return sum((sizes if whole else own).values())


@st.composite
def drawn(draw: st.DrawFn, kind: str) -> Any:
    """A small config of this type; None where its class refuses what was drawn.

    Every field that says something of shapes is drawn, under whichever name the class has for it.
    """
    own = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    fields: dict[str, Any] = {}

    def give(names: str, values: st.SearchStrategy[Any]) -> Any:
        found = [name for name in names.split() if name in own]
        value = draw(values)
        fields.update(dict.fromkeys(found[:1], value))
        return value if found else None

    heads, width = draw(st.sampled_from([4, 8])), draw(st.sampled_from([64, 96]))
    hidden = heads * width
    layers = draw(st.integers(1, 6))
    give("hidden_size n_embd d_model dim", st.just(hidden))
    give("num_attention_heads n_head n_heads num_heads attention_heads", st.just(heads))
    give("num_hidden_layers n_layer n_layers num_layers", st.just(layers))
    ffn = st.sampled_from([256, 384, 1024])
    give("intermediate_size n_inner ffn_dim ffn_hidden_size dff hidden_dim", ffn)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"):
        give(name, ffn)
    give("shared_intermediate_size", st.one_of(st.just(0), ffn))
    give("intermediate_multiple_size", st.integers(2, 4))
    give("vocab_size", st.sampled_from([1000, 3001]))
    give("n_positions max_position_embeddings max_seq_len", st.sampled_from([512, 1024]))
    give("tie_word_embeddings", st.booleans())
    give("num_key_value_heads num_kv_heads", st.sampled_from([1, 2, heads]))
    give("type_vocab_size", st.integers(1, 2))
    if not {"kv_lora_rank", "dim"} & own:
        give("head_dim", st.sampled_from([width, 32]))
        if kind in ("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"):
            # One of these takes no other, and the others are not built without.
            fields["head_dim"] = width
    experts = give("n_routed_experts num_local_experts num_experts moe_num_experts", st.sampled_from([2, 4, 8]))
    give("num_experts_per_tok moe_topk moe_k", st.integers(1, experts or 2))
    give("n_shared_experts num_shared_experts moe_num_shared_experts", st.integers(1, 2))
    for name in ("n_group", "topk_group"):
        give(name, st.just(1))
    give("first_k_dense_replace moe_layer_start_index", st.integers(0, layers))
    give("decoder_sparse_step interleave_moe_layer_step moe_layer_interval", st.integers(1, 3))
    give("mlp_only_layers", st.lists(st.integers(0, layers - 1), max_size=2, unique=True))
    give("mlp_layer_types", st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers))
    give("q_lora_rank", st.sampled_from([None, 96]))
    for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        give(name, st.sampled_from([64, 128]))
    give("qk_rope_head_dim", st.sampled_from([16, 32]))
    give("sliding_window", st.sampled_from([None, 16, 128]))
    give("attention_types", st.just([[["global", "local"], math.ceil(layers / 2)]]))
    for name in (
        "multi_query", "new_decoder_architecture", "parallel_attn", "bias", "use_bias", "enable_bias", "attention_bias",
        "mlp_bias", "qkv_bias", "use_qkv_bias", "use_parallel_residual", "use_post_norm", "qk_layernorm", "use_qk_norm",
        "use_sliding_window",
    ):  # fmt: skip
        give(name, st.booleans())
    give("pad_token_id", st.just(0))
    fields |= {
        name: value
        for name, value in (
            ("word_embed_proj_dim", hidden),
            ("embedding_size", hidden),
            ("attn_config", {"kv_n_heads": draw(st.sampled_from([1, heads])), "rope_theta": 10000}),
            ("ffn_config", {"ffn_hidden_size": draw(ffn), "moe_num_experts": 4, "moe_top_k": 2}),
        )
        if name in own and (kind == "dbrx" or not name.endswith("config"))
    }
    try:
        return config_of(kind, **fields)
    except Exception:
        return None
