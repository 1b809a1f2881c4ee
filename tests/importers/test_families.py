"""Every type of model that transformers has: counted as transformers builds it, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.importers.config_json.families import MODEL_FAMILIES
from backbeat.importers.config_json.fields import WAY_OUT
from backbeat.model.architecture import Architecture

pytest.importorskip("transformers", minversion="5", reason="before, its classes do not list their fields")
from tests.importers.hf_models import CONFIG_MAPPING, NEEDED, config_of, counted, drawn, written

_WIDELY_USED = (
    "llama llama4_text qwen2 qwen2_moe qwen3 qwen3_moe mistral mixtral gemma gemma2 gemma3_text phi phi3 phimoe falcon "
    "gpt_bigcode starcoder2 olmo olmo2 olmoe deepseek_v2 deepseek_v3 gpt2 gpt_neox gptj opt bloom mpt cohere cohere2 "
    "granite granitemoe smollm3 glm glm4 glm4_moe nemotron dbrx gpt_oss"
)
WIDELY_USED = _WIDELY_USED.split()
WITHOUT_A_CLASS = {"baichuan", "chatglm", "deepseek", "exaone", "internlm2", "kimi_k2", "qwen"}
WITH_A_CLASS = sorted(set(MODEL_FAMILIES) - WITHOUT_A_CLASS)
PARTS = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Of models that see: built with them only."""


def read(config: dict[str, Any]) -> Architecture | None:
    """None where it is refused, which takes one line that names the type and the way out."""
    try:
        return read_architecture(config)
    except InputError as error:
        kinds = [each.get("model_type") for each in (config, config.get("text_config") or {})]
        text = str(error)
        assert "\n" not in text
        assert any(repr(kind) in text for kind in kinds if kind)
        assert WAY_OUT in text
        return None


def windows(config: Any) -> tuple[int, ...]:
    """Layers that see a window, as the class says."""
    names = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
    if not any(getattr(config, name, None) for name in names):
        return ()
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    whole = ("full_attention", "global")
    return tuple(place for place in range(config.num_hidden_layers) if kinds is None or kinds[place] not in whole)


@pytest.mark.long
def test_every_type_is_counted_as_it_is_built_or_refused() -> None:
    right, wrong = [], []
    for kind in sorted(CONFIG_MAPPING):
        try:
            config = config_of(kind, **NEEDED.get(kind, {}))
        except Exception:
            continue
        found = read(written(config))
        if found is None:
            continue
        nested = kind not in MODEL_FAMILIES
        count = counted(config, language=nested)
        if count is None:
            # A part of a larger model, or one that needs a package which is not here.
            assert nested or kind in PARTS, kind
        elif abs(found.parameters / count - 1) > 0.01:
            wrong.append(f"{kind} {found.parameters / count - 1:+.1%}")
        elif not nested:
            right.append(kind)
    assert not wrong
    assert len(right) >= 85
    assert set(WIDELY_USED) <= set(right)


def check(config: Any) -> None:
    """Right as it is written today, and as it was before layers had types."""
    count = counted(config)
    assume(count is not None)
    fields = written(config)
    found = read(fields)
    assume(found is not None)
    assert found.parameters == pytest.approx(count, rel=0.01)
    assert found.windowed == windows(config)
    if "layer_types" in fields and not fields.get("use_sliding_window"):
        assert read({name: value for name, value in fields.items() if name != "layer_types"}) == found


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(WITH_A_CLASS) - PARTS))
def test_fields_of_every_family_are_read(kind: str) -> None:
    @settings(max_examples=12)
    @given(drawn(kind))
    def right(config: Any) -> None:
        assume(config is not None)
        check(config)

    right()


@settings(max_examples=60)
@given(st.sampled_from(WIDELY_USED).flatmap(drawn))
def test_fields_of_the_families_in_wide_use_are_read(config: Any) -> None:
    assume(config is not None)
    check(config)
