"""What is read of a config.json, and what is refused; counts are those that publishers state of their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.importers.config_json.families import MODEL_FAMILIES
from backbeat.importers.config_json.fields import WAY_OUT
from backbeat.importers.config_json.reader import read_config
from backbeat.model.architecture import Architecture

CONFIGS = Path(__file__).parent / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
MAVERICK: dict[str, Any] = {
    "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 2, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "num_local_experts": 128, "num_experts_per_tok": 1, "vocab_size": 202048,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip


def read(config: dict[str, Any], **fields: Any) -> Architecture:
    return read_config({**config, **fields}, "config.json")


@pytest.mark.parametrize(
    ("name", "parameters", "stated"),
    [
        ("qwen-7b", 7_721_324_544, 1e-3),
        ("deepseek-moe-16b", 16_375_728_128, 1e-3),
        ("kimi-k2", 1_026_408_235_864, 1e-3),
        ("chatglm3-6b", 6_243_584_000, 1e-3),
        ("internlm2-7b", 7_737_708_544, 1e-3),
        ("exaone-3.0-7.8b", 7.8e9, 1e-2),
        ("baichuan-7b", 7.0e9, 1e-2),
    ],
)
def test_models_that_bring_their_own_code_are_counted_without_it(name: str, parameters: float, stated: float) -> None:
    """From elements of their weight files, or billions on their pages."""
    path = CONFIGS / f"{name}.json"
    assert "auto_map" in json.loads(path.read_text())
    assert read_architecture(path).parameters == pytest.approx(parameters, rel=stated)


@pytest.mark.parametrize("kind", ["jamba", "mamba", "t5", "bart", "vit", "gemma3n_text", "deepseek_v32", "llamma"])
def test_a_type_that_nobody_counts_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(InputError) as raised:
        read(LLAMA, model_type=kind)
    assert str(raised.value) == f"config.json: models of model_type {kind!r} are not counted: {WAY_OUT}"


@pytest.mark.parametrize(
    ("config", "fields", "why"),
    [
        (LLAMA, {"layer_types": ["full_attention", "linear_attention"] * 16}, "layer_types has 'linear_attention'"),
        (LLAMA, {"layer_types": ["full_attention"] * 8}, "layer_types is not a list with an entry for each of 32"),
        (LLAMA, {"hidden_size": "4096"}, "hidden_size is '4096', where one whole number from 0 is read"),
        (LLAMA, {"num_key_value_heads": [8] * 32}, "num_key_value_heads is"),
        (LLAMA, {"per_layer_config": {"00": {"head_dim": 64}}}, "per_layer_config is not counted"),
        (BERT, {"add_cross_attention": True}, "add_cross_attention is not counted"),
        (BERT, {"model_type": "opt", "word_embed_proj_dim": 512}, r"word_embed_proj_dim\(512\) != hidden\(768\)"),
        (MAVERICK, {"num_experts_per_tok": 129}, "a token takes 129 of 128 experts"),
        (MAVERICK, {"moe_layers": "all"}, "moe_layers is 'all', where a list of layers is read"),
        (MAVERICK, {"mlp_layer_types": ["dense", "hash_moe"] * 24}, "mlp_layer_types has 'hash_moe'"),
        (MAVERICK, {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
    ],
)
def test_what_changes_a_known_type_is_refused_with_the_type(
    config: dict[str, Any], fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why) as raised:
        read(config, **fields)
    text = str(raised.value)
    assert "\n" not in text
    assert f"(model_type {fields.get('model_type', config['model_type'])!r}): {WAY_OUT}" in text


def test_sizes_are_asked_for_and_the_rest_is_as_in_its_class() -> None:
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        with pytest.raises(InputError, match=f"config.json has no {name}: is it a language model's"):
            read({key: value for key, value in LLAMA.items() if key != name})
    with pytest.raises(InputError, match="num_hidden_layers is 0"):
        read(LLAMA, num_hidden_layers=0)
    # Mistral's class has eight heads of keys; null says as many as of queries.
    assert (read(LLAMA).key_heads, read(LLAMA, model_type="mistral").key_heads) == (32, 8)
    assert read(LLAMA, model_type="mistral", num_key_value_heads=None).key_heads == 32
    # Gemma's head is its embedding, Llama's is not.
    tied = {kind: read(LLAMA, model_type=kind).tied for kind in ("llama", "gemma", "cohere", "qwen2")}
    assert tied == {"llama": False, "gemma": True, "cohere": True, "qwen2": False}
    assert read(LLAMA, tie_word_embeddings=True).tied
    assert read(BERT, model_type="gpt2").ffn == 3072
    assert read({**BERT, "n_inner": None, "intermediate_size": None}, model_type="gpt2").ffn == 4 * 768


def test_a_text_config_leaves_out_what_is_as_in_its_class() -> None:
    """LLaVA 1.5 and Gemma 3 4B as published: the first has a vocabulary of its own, the second five sizes."""
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    found = read(llava)
    assert (found.name, found.parameters) == ("llava (its text model)", 6_738_415_616 + 64 * 2 * 4096)
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    gemma = read({"model_type": "gemma3", "text_config": text})
    assert gemma.parameters == pytest.approx(3_880_263_168, rel=1e-4)
    assert (gemma.window, len(gemma.windowed), gemma.tied) == (1024, 34 - 5, True)
    # The whole model says whether its head is tied; where its own class always wrote false, the text model does.
    for whole, own, tied in ((None, None, False), (True, None, True), (False, True, True), (False, None, False)):
        said = {"tie_word_embeddings": whole} if whole is not None else {}
        inner = {**llava["text_config"], **({"tie_word_embeddings": own} if own is not None else {})}  # type: ignore[dict-item]
        assert read({"model_type": "llava", "text_config": inner, **said}).tied is tied
    assert not read({"model_type": "gemma3", "text_config": text, "tie_word_embeddings": False}).tied
    # Older files have no text_config.
    flat = read(LLAMA, model_type="qwen2_5_vl", vision_config={"depth": 32})
    assert (flat.name, flat.layers) == ("qwen2_5_vl (its text model)", 32)
    for inner, why in (({"model_type": "mllama_text_model"}, "'mllama_text_model' are not counted"),
                       ({"model_type": "bert"}, "'seeing' is an encoder"), ({}, "model_type ''")):  # fmt: skip
        with pytest.raises(InputError, match=f"config.json: text_config: .*{why}"):
            read({"model_type": "seeing", "text_config": inner})


def test_layers_have_experts_where_fields_say() -> None:
    found = read(MAVERICK)
    assert found.parameters == pytest.approx(400_711_848_960, rel=1e-4)
    assert found.sparse_layers == frozenset(range(1, 48, 2))
    assert (found.dense_layers, found.dense_at) == (1, tuple(range(2, 48, 2)))
    assert read(MAVERICK, moe_layers=[3, 4, 5]).sparse_layers == {3, 4, 5}
    assert read(MAVERICK, mlp_layer_types=["dense"] * 47 + ["sparse"]).sparse_layers == {47}
    assert read(MAVERICK, moe_layers=[]).experts == 0
    qwen: dict[str, Any] = {**LLAMA, "model_type": "qwen2_moe", "num_hidden_layers": 6, "num_key_value_heads": 32}
    assert read(qwen, decoder_sparse_step=2, mlp_only_layers=[3]).sparse_layers == {1, 5}
    ernie = read(qwen, model_type="ernie4_5_moe", moe_layer_start_index=2, moe_layer_end_index=4)
    assert ernie.sparse_layers == {2, 3, 4}
    assert read(qwen, model_type="glm4_moe", moe_intermediate_size=64).sparse_layers == {1, 2, 3, 4, 5}


def test_layers_see_windows_where_fields_say() -> None:
    found = read(MAVERICK)
    assert (found.window, found.chunked) == (8192, True)
    assert found.windowed == tuple(place for place in range(48) if place % 4 != 3)
    small = {**LLAMA, "num_hidden_layers": 6}
    expected: dict[str, tuple[int, ...]] = {
        "llama": (), "mistral": (0, 1, 2, 3, 4, 5), "gemma2": (0, 2, 4), "gemma3_text": (0, 1, 2, 3, 4),
        "cohere2": (0, 1, 2, 4, 5), "olmo3": (0, 1, 2, 4, 5), "cwm": (1, 2, 3, 5), "qwen2": (),
    }  # fmt: skip
    for kind, places in expected.items():
        assert read(small, model_type=kind).windowed == places, kind
    assert read(small, model_type="qwen2", use_sliding_window=True, max_window_layers=4).windowed == (4, 5)
    assert read(small, model_type="exaone4", sliding_window_pattern="LLG").windowed == (0, 1, 3, 4)
    assert read(small, model_type="mistral", sliding_window=None).windowed == ()
    listed = ["sliding_attention", "full_attention"] * 3
    assert read(small, model_type="mistral", layer_types=listed).windowed == (0, 2, 4)
    neo = read(small, model_type="gpt_neo", attention_types=[[["global", "local"], 3]], max_position_embeddings=512)
    assert (neo.window, neo.windowed) == (256, (1, 3, 5))


def test_an_encoder_is_no_decoder() -> None:
    bert = read(BERT)
    assert (bert.causal, bert.tied, bert.positions) == (False, True, 512)
    assert bert.parameters == pytest.approx(109_514_298, rel=1e-6)
    assert read(BERT, is_decoder=True).causal
    assert read(LLAMA).causal
    assert not read(LLAMA, model_type="gemma3_text", use_bidirectional_attention=True).causal


def test_the_reference_names_every_type() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/files.md").read_text("utf-8")
    listed = page.split("as `model_type` names them:")[1].split("| what it says of")[0]
    assert sorted(listed.split("`")[1::2]) == sorted(MODEL_FAMILIES)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_NAMES = (
    "hidden_size num_attention_heads intermediate_size vocab_size num_key_value_heads head_dim sliding_window "
    "layer_types mlp_layer_types moe_layers mlp_only_layers moe_layer_freq first_k_dense_replace num_experts "
    "num_experts_per_tok attention_types attention_layers no_rope_layers sliding_window_pattern attn_config ffn_config "
    "dropout text_config kv_lora_rank v_head_dim n_inner tie_word_embeddings is_decoder moe_layer_end_index model_type "
    "max_position_embeddings use_sliding_window max_window_layers num_ln_in_parallel_attn expansion_ratio"
)


@given(st.sampled_from(sorted(MODEL_FAMILIES)), st.dictionaries(st.sampled_from(_NAMES.split()), JUNK, max_size=4))
def test_whatever_a_file_says_it_is_counted_or_refused(kind: str, fields: dict[str, Any]) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 4,
             "vocab_size": 100, "n_positions": 64, "num_layers": 4}  # fmt: skip
    try:
        found = read({"model_type": kind, **small, **fields})
    except InputError:
        return
    assert found.parameters > 0
    assert found.flops_per_token(64) > 0
