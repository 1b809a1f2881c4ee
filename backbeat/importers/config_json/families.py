"""Families of Hugging Face models by model_type: what the fields of their config.json leave unsaid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from backbeat.importers.config_json.fields import ConfigFields

Count = Callable[[ConfigFields], int]
Windowed = Callable[[ConfigFields, int], bool]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What no field says, or one of the family's own."""

    gated: bool = True
    rms_norm: bool = True
    norms: int | Count = 2
    bias: bool | str = False
    """Of all matrices; or the field that says so."""
    tied: bool | None = None
    """None: a field says so."""
    causal: bool = True
    """An encoder becomes causal by `is_decoder`."""
    positions: int | None = None
    """Learned positions beyond those that a field says; None: none are learned."""
    ffn: Count | None = None
    kv_heads: Count | None = None
    end_parameters: Count | None = None
    latent: bool = False
    """Keys and values are squeezed (MLA)."""
    experts: bool = False
    shared_experts: int = 0
    """Where no field says."""
    dense_layers: int = 0
    """Without experts, before the others, where no field says."""
    windowed: Windowed | None = None
    """Whether a layer sees a window only, where no list of layers says so."""


def _all(fields: ConfigFields, layer: int) -> bool:
    return True


def _last(fields: ConfigFields, layer: int) -> bool:
    return layer >= fields.number("max_window_layers")


def _all_but_last_of(period: int, *names: str) -> Windowed:
    return lambda fields, layer: (layer + 1) % fields.period(*names, default=period) != 0


def _all_but_first_of(period: int, *names: str) -> Windowed:
    return lambda fields, layer: layer % fields.period(*names, default=period) != 0


def _local(fields: ConfigFields, layer: int) -> bool:
    """GPT-Neo's, one by one or in groups: [[["global", "local"], 12]]."""
    kinds = fields.each("attention_layers", layer + 1)
    if kinds is None:
        groups = fields.value("attention_types") or [[["global", "local"], 1]]
        try:
            kinds = [kind for group, times in groups for kind in group * times]
        except (TypeError, ValueError):
            raise fields.refused(f"attention_types is {groups!r}, where groups of layers are read") from None
    return bool(kinds and kinds[layer % len(kinds)] == "local")


def _with_rope(fields: ConfigFields, layer: int) -> bool:
    said = fields.each("no_rope_layers", layer + 1)
    return bool(said[layer]) if said else (layer + 1) % fields.period("no_rope_layer_interval", default=4) != 0


def _falcon_kv_heads(fields: ConfigFields) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.number("num_kv_heads")
    return 1 if fields.flag("multi_query") else 0


def _falcon_norms(fields: ConfigFields) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.number("num_ln_in_parallel_attn", default=2)
    return 1 if fields.flag("parallel_attn") else 2


def _head_bias(fields: ConfigFields) -> int:
    return fields.number("vocab_size")


def _masked_head(fields: ConfigFields) -> int:
    """Token types; a product, its bias and a norm before the vocabulary, which has a bias. The norm behind the
    embedding takes the place of a last one."""
    hidden = fields.number("hidden_size", "dim")
    return hidden * (hidden + 3 + fields.number("type_vocab_size")) + fields.number("vocab_size")


_LLAMA, _MOE = ModelFamily(), ModelFamily(experts=True)
_GPT = ModelFamily(gated=False, rms_norm=False, bias=True)
_SIDE_BY_SIDE = replace(_GPT, norms=1, end_parameters=_head_bias)
_BERT = replace(_GPT, causal=False, positions=0, end_parameters=_masked_head)
_MODERN = ModelFamily(end_parameters=_masked_head, windowed=_all_but_first_of(3, "global_attn_every_n_layers"))

_ALIKE: dict[str, ModelFamily] = {
    "llama granite helium hunyuan_v1_dense internlm2 internlm3 iquestcoder seed_oss ernie4_5 bitnet diffllama gemma "
    "olmo olmo2 glm baichuan exaone smollm3 qwen3_vl_text": _LLAMA,
    "mistral ministral ministral3 phi3 doge": ModelFamily(windowed=_all),
    "qwen2 qwen3 qwen2_vl_text qwen2_5_vl_text": ModelFamily(windowed=_last),
    "qwen": ModelFamily(ffn=lambda fields: fields.size("intermediate_size") // 2),
    "chatglm": ModelFamily(
        kv_heads=lambda fields: fields.number("multi_query_group_num") if fields.flag("multi_query_attention") else 0
    ),
    "olmo3": ModelFamily(windowed=_all_but_last_of(4)),
    "exaone4": ModelFamily(windowed=_all_but_last_of(4, "sliding_window_pattern")),
    "cwm granite_swa": ModelFamily(windowed=_all_but_first_of(4)),
    "vaultgemma": ModelFamily(windowed=_all_but_last_of(2)),
    "gemma2": ModelFamily(norms=4, windowed=_all_but_last_of(2)),
    "gemma3_text": ModelFamily(norms=4, windowed=_all_but_last_of(6, "sliding_window_pattern")),
    "glm4": ModelFamily(norms=4),
    "hyperclovax": ModelFamily(norms=lambda fields: 4 if fields.flag("use_post_norm") else 2),
    "cohere": ModelFamily(norms=1),
    "cohere2": ModelFamily(norms=1, windowed=_all_but_last_of(4, "sliding_window_pattern")),
    "stablelm": ModelFamily(rms_norm=False, norms=lambda fields: 1 if fields.flag("use_parallel_residual") else 2),
    "minicpm3 youtu": ModelFamily(latent=True),
    # Without a gate.
    "arcee apertus nanochat mpt": ModelFamily(gated=False),
    "nemotron": ModelFamily(gated=False, rms_norm=False),
    "gpt_neox bloom xglm jais2 persimmon": _GPT,
    "gpt2 gpt-sw3 openai-gpt": replace(_GPT, positions=0),
    "gpt_bigcode": replace(_GPT, positions=0, kv_heads=lambda fields: 1 if fields.flag("multi_query") else 0),
    "gpt_neo": replace(_GPT, positions=0, windowed=_local),
    "biogpt opt": replace(_GPT, positions=2),
    "ctrl": replace(_GPT, end_parameters=_head_bias),
    "phi gptj codegen": _SIDE_BY_SIDE,
    "gpt_neox_japanese": ModelFamily(
        gated=False,
        rms_norm=False,
        ffn=lambda fields: fields.size("intermediate_multiple_size") * fields.size("hidden_size"),
    ),
    "starcoder2": replace(_GPT, bias="use_bias", windowed=_all),
    "falcon": replace(_GPT, bias="bias", norms=_falcon_norms, kv_heads=_falcon_kv_heads),
    # With experts.
    "deepseek olmoe flex_olmo granitemoe granitemoeshared minimax_m2 dbrx aria_text glm4_moe solar_open ernie4_5_moe "
    "qwen2_moe qwen3_vl_moe_text mellum": _MOE,
    "deepseek_v2 deepseek_v3 kimi_k2": replace(_MOE, latent=True),
    "glm4_moe_lite axk1": replace(_MOE, latent=True, dense_layers=1),
    "hy_v3": replace(_MOE, dense_layers=1),
    "exaone_moe": replace(_MOE, windowed=_all_but_last_of(4, "sliding_window_pattern")),
    "mixtral qwen3_moe": replace(_MOE, windowed=_all),
    "phimoe": replace(_MOE, rms_norm=False, windowed=_all),
    "gpt_oss": replace(_MOE, windowed=_all_but_last_of(2)),
    "granitemoe_swa": replace(_MOE, windowed=_all_but_first_of(4)),
    "dots1": replace(_MOE, windowed=_last),
    "llama4_text": replace(_MOE, shared_experts=1, windowed=_with_rope),
    "hunyuan_v1_moe": replace(_MOE, shared_experts=1),
    # Encoders, and a decoder in their manner.
    "bert camembert data2vec-text ernie megatron-bert roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl "
    "distilbert mpnet": _BERT,
    "bert-generation": replace(_BERT, end_parameters=_head_bias),
    "nomic_bert": replace(_BERT, positions=None, gated=True, bias=False, tied=True),
    "eurobert": ModelFamily(causal=False),
    "modernbert": replace(_MODERN, causal=False),
    "modernbert-decoder": _MODERN,
}
MODEL_FAMILIES = {kind: family for kinds, family in _ALIKE.items() for kind in kinds.split()}
"""By model_type. baichuan, chatglm, deepseek, exaone, internlm2, kimi_k2 and qwen have no class in transformers."""
