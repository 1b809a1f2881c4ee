"""A language model from its Hugging Face config.json.

Nothing is guessed: a model_type that `families` does not have is refused, and so is a field that changes a model in a
way that is not counted. Of a model that sees or hears as well the language model is counted, where a `text_config`
describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbeat.errors import InputError
from backbeat.importers.config_json.families import MODEL_FAMILIES, ModelFamily
from backbeat.importers.config_json.fields import WAY_OUT, ConfigFields, class_defaults
from backbeat.model.architecture import Architecture

_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCAB = ("vocab_size", "padded_vocab_size")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "attn_config.kv_n_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "hidden_dim")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "ffn_config.moe_num_experts")
_TAKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "ffn_config.moe_top_k")
_EXPERT_FFN = ("moe_intermediate_size", "intermediate_size", "ffn_config.ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_FFN = ("shared_expert_intermediate_size", "shared_intermediate_size")
_WINDOW = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
_DROPOUT = ("resid_pdrop", "hidden_dropout", "dropout", "hidden_dropout_prob", "resid_dropout", "residual_dropout")
_EMBEDDING = ("word_embed_proj_dim", "embedding_size")

_COUNTED = {"attn_config.attn_type": "multihead_attention", "expansion_ratio": 4}
"""MPT's, which transformers takes for granted."""

_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Files that describe the language model beside the other parts, before they had a text_config."""


def read_config(config: Mapping[str, Any], where: str) -> Architecture:
    """
    >>> read_config({"model_type": "t5", "d_model": 512}, "config.json")
    Traceback (most recent call last):
    backbeat.errors.InputError: config.json: models of model_type 't5' are not counted: profile the module itself, \
like `backbeat profile mymodels:build --analytic h100`
    """
    kind, text = config.get("model_type"), config.get("text_config")
    kind = kind if isinstance(kind, str) else ""
    if kind not in MODEL_FAMILIES and isinstance(text, Mapping):
        return _text_model({**text, **_tied(config, text)}, f"{where}: text_config", kind, nested=True)
    if not kind:
        raise InputError(f"{where} has no model_type: is it a language model's config.json?")
    if kind in _FLAT:
        return _text_model({**config, "model_type": _FLAT[kind]}, where, kind, nested=False)
    return _model(config, where)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
    """The whole model says whether its head is tied; older files leave it to a text_config that is not as its class."""
    whole, own = (part.get("tie_word_embeddings") for part in (config, text))
    if whole is None:
        return {}
    usual = class_defaults().get(str(text.get("model_type")), {}).get("tie_word_embeddings", False)
    return {"tie_word_embeddings": bool(whole or (own and not usual))}


def _text_model(config: Mapping[str, Any], where: str, whole: str, *, nested: bool) -> Architecture:
    family = MODEL_FAMILIES.get(str(config.get("model_type")))
    if family is not None and not family.causal:
        raise InputError(f"{where}: the text model of model_type {whole!r} is an encoder, not counted: {WAY_OUT}")
    return _model(config, where, nested=nested, name=f"{whole} (its text model)")


def _model(config: Mapping[str, Any], where: str, *, nested: bool = False, name: str = "") -> Architecture:
    kind = str(config.get("model_type", ""))
    if kind not in MODEL_FAMILIES:
        raise InputError(f"{where}: models of model_type {kind!r} are not counted: {WAY_OUT}")
    family, fields = MODEL_FAMILIES[kind], ConfigFields(config, kind, where, nested=nested)
    hidden, heads, layers = fields.size(*_HIDDEN), fields.size(*_HEADS), fields.size(*_LAYERS)
    _check(fields, hidden)
    dense = _dense_layers(fields, family, layers)
    made: dict[str, Any] = {
        "name": name or str(config.get("_name_or_path") or kind),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": _ffn(fields, family, hidden) if dense else 0,
        "vocab": fields.size(*_VOCAB),
        "gated": family.gated,
        "rms_norm": family.rms_norm,
        "norms": family.norms if isinstance(family.norms, int) else family.norms(fields),
        "bias": fields.flag(family.bias) if isinstance(family.bias, str) else family.bias,
        "tied": fields.flag("tie_word_embeddings") if family.tied is None else family.tied,
        "end_parameters": family.end_parameters(fields) if family.end_parameters else 0,
        "dropout": any(fields.flag(each) for each in _DROPOUT),
        "causal": (family.causal or fields.flag("is_decoder")) and not fields.flag("use_bidirectional_attention"),
        **_attention(fields, family, hidden, heads),
        **_windows(fields, family, layers),
    }
    if family.positions is not None:
        made["positions"] = fields.size("n_positions", "max_position_embeddings") + family.positions
    if len(dense) < layers:
        made |= _experts(fields, family, dense)
    return Architecture(**made)


def _check(fields: ConfigFields, hidden: int) -> None:
    """Refuse what changes a model of a known type."""
    for name in ("add_cross_attention", "is_encoder_decoder", "is_moe", "per_layer_config"):
        if fields.flag(name):
            raise fields.refused(f"{name} is not counted")
    for name in _EMBEDDING:
        if fields.number(name, default=hidden) != hidden:
            raise fields.refused(f"{name}({fields.number(name)}) != hidden({hidden}) is not counted")
    for name, counted in _COUNTED.items():
        value = fields.value(name)
        if value not in (None, counted):
            raise fields.refused(f"{name} is {value!r}, where {counted!r} is counted")


def _ffn(fields: ConfigFields, family: ModelFamily, hidden: int) -> int:
    if family.ffn is not None:
        return family.ffn(fields)
    if fields.value("intermediate_size_mlp") is not None:
        # Llama 4's experts have the other one.
        return fields.size("intermediate_size_mlp")
    if family.gated or fields.has_default(*_FFN):
        return fields.size(*_FFN)
    return fields.number(*_FFN, default=4 * hidden)


def _attention(fields: ConfigFields, family: ModelFamily, hidden: int, heads: int) -> dict[str, int]:
    if family.latent:
        return {
            "head_width": fields.size("qk_nope_head_dim"),
            "query_rank": fields.number("q_lora_rank"),
            "latent_width": fields.size("kv_lora_rank"),
            "rope_width": fields.number("qk_rope_head_dim"),
            "value_width": fields.size("v_head_dim"),
        }
    kv_heads = family.kv_heads(fields) if family.kv_heads else fields.number(*_KV_HEADS)
    rounded = hidden // heads if hidden % heads else 0
    return {"kv_heads": kv_heads, "head_width": fields.number("head_dim", "kv_channels", default=rounded)}


def _dense_layers(fields: ConfigFields, family: ModelFamily, layers: int) -> list[int]:
    """Those without experts."""
    if not family.experts or not fields.number(*_EXPERTS):
        return list(range(layers))
    listed = fields.each("mlp_layer_types", layers)
    if listed is not None:
        unknown = next((kind for kind in listed if kind not in ("dense", "sparse")), None)
        if unknown is not None:
            raise fields.refused(f"mlp_layer_types has {unknown!r}, which is not counted")
        return [place for place, kind in enumerate(listed) if kind == "dense"]
    sparse = fields.places("moe_layers")
    if sparse is None:
        first = fields.number("first_k_dense_replace", "moe_layer_start_index", default=family.dense_layers)
        last = fields.number("moe_layer_end_index", default=-1, least=-1) % layers
        every = fields.period("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
        frequency = fields.period("moe_layer_freq", default=1)
        found = (each for each in range(first, last + 1) if (each + 1) % every == 0 and each % frequency == 0)
        sparse = frozenset(found) - (fields.places("mlp_only_layers") or frozenset())
    return [place for place in range(layers) if place not in sparse]


def _experts(fields: ConfigFields, family: ModelFamily, dense: list[int]) -> dict[str, Any]:
    """Of a model of which these layers have none."""
    experts, taken, inner = fields.number(*_EXPERTS), fields.number(*_TAKEN), fields.size(*_EXPERT_FFN)
    if not 1 <= taken <= experts:
        raise fields.refused(f"a token takes {taken} of {experts} experts")
    shared = fields.number(*_SHARED, default=family.shared_experts)
    first = next((place for place, number in enumerate(dense) if place != number), len(dense))
    return {
        "experts": experts,
        "experts_per_token": taken,
        "expert_ffn": inner,
        "shared_ffn": fields.number(*_SHARED_FFN, default=shared * inner),
        "dense_layers": first,
        "dense_at": tuple(dense[first:]),
    }


def _windows(fields: ConfigFields, family: ModelFamily, layers: int) -> dict[str, Any]:
    listed = fields.each("layer_types", layers)
    kinds = ("sliding_attention", "chunked_attention")
    unknown = next((kind for kind in listed or () if kind not in ("full_attention", *kinds)), None)
    if unknown is not None:
        raise fields.refused(f"layer_types has {unknown!r}, which is not counted")
    width = fields.number(*_WINDOW, least=-1)
    if width < 1 or fields.value("use_sliding_window") is False:
        return {}
    if listed is not None:
        narrow = [place for place, kind in enumerate(listed) if kind in kinds]
    else:
        narrow = [place for place in range(layers) if family.windowed is not None and family.windowed(fields, place)]
    chunked = fields.value("attention_chunk_size") is not None
    return {"window": width, "windowed": tuple(narrow), "chunked": chunked} if narrow else {}
