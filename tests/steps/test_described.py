"""A shape as a profile, against transformers' own module of that shape run without data, and against measured ones."""

from __future__ import annotations

from typing import Any

import pytest

from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.model import Profile
from backbeat.model.accelerator import operator_model
from backbeat.model.architecture import Architecture
from backbeat.steps.described import described

LLAMA_1B = Architecture(
    name="llama-1b", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=True
)  # fmt: skip
LLAMA_8B = read_architecture("llama-3-8b")


def gpt2(hidden: int = 768, layers: int = 12, heads: int = 12) -> Architecture:
    return Architecture(
        name="gpt2", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=50257, gated=False,
        rms_norm=False, bias=True, tied=True, positions=1024, dropout=True,
    )  # fmt: skip


def _described(model: Architecture, **told: Any) -> Profile:
    return described(model, operator_model("h200", "bf16"), **({"sequence": 1024} | told))


MEASURED = {
    "llama-8b-b1-bf16-adamw-h200": (LLAMA_8B, {"sequence": 4096}),
    "llama-1b-b4-bf16-adamw-h200": (LLAMA_1B, {"batch": 4}),
    "llama-1b-b2-bf16-h200": (LLAMA_1B, {"batch": 2, "optimizer": "sgd"}),
    "llama-1b-b4-bf16-adamw-compile-h200": (LLAMA_1B, {"batch": 4, "compiled": True}),
    "gpt2-b8-bf16-adamw-h200": (gpt2(), {"batch": 8}),
    "gpt2-b16-bf16-h200": (gpt2(), {"batch": 16, "optimizer": "sgd"}),
    "gpt2-medium-b8-bf16-adamw-h200": (gpt2(1024, 24, 16), {"batch": 8}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_described_step_is_as_long_as_the_measured_one(name: str) -> None:
    model, told = MEASURED[name]
    made, known = _described(model, **told), Profile.load(name)
    assert made.single_s == pytest.approx(known.single_s, rel=0.1)
    assert made.flops_per_sample == pytest.approx(known.flops_per_sample, rel=0.01)
    assert [block.name for block in made.blocks] == [block.name for block in known.blocks]
    if made.compiled:
        return
    assert [one.name for one in made.gradients] == [one.name for one in known.gradients]
    assert made.memory is not None
    assert known.memory is not None
    assert made.memory.activation_bytes == pytest.approx(known.memory.activation_bytes, rel=0.001)
    assert made.memory.head_bytes == pytest.approx(known.memory.head_bytes, rel=0.005)
    assert made.memory.peak_bytes == pytest.approx(known.memory.peak_bytes, rel=0.01)
    for one, other in zip(made.blocks[2:], known.blocks[2:], strict=True):
        assert one.saved_bytes == pytest.approx(other.saved_bytes, rel=0.001)
        assert (one.chained, one.saves_input) == (other.chained, other.saves_input)


@pytest.mark.parametrize(
    ("factory", "model", "told"),
    [
        ("llama_1b", LLAMA_1B, {"batch": 2}),
        pytest.param("gpt2", gpt2(), {"batch": 8, "optimizer": "sgd"}, marks=pytest.mark.long),
        pytest.param("llama_8b", LLAMA_8B, {"sequence": 4096}, marks=pytest.mark.long),
    ],
)
def test_a_described_profile_is_that_of_the_module_without_data(
    factory: str, model: Architecture, told: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    from backbeat.measure.model.analytic import analytic_profile
    from backbeat.measure.model.factory import load_factory

    layers = 2 if factory != "gpt2" else model.layers
    source = load_factory(f"backbeat.zoo.models:{factory}")
    source = source.with_layers(layers) if factory != "gpt2" else source
    model = Architecture(**{name: getattr(model, name) for name in model.__struct_fields__} | {"layers": layers})
    optimizer = told.get("optimizer", "adamw")
    known = analytic_profile(source, gpu="h200", batch_size=told.get("batch", 1), optimizer=optimizer)
    made = _described(model, **told)
    for field in ("forward_s", "backward_s", "update_s", "single_s"):
        assert getattr(made, field) == pytest.approx(getattr(known, field), rel=0.01)
    assert made.memory is not None
    assert known.memory is not None
    assert made.memory.activation_bytes == pytest.approx(known.memory.activation_bytes, rel=0.01)
    assert made.memory.peak_bytes == pytest.approx(known.memory.peak_bytes, rel=0.01)
    assert [block.name for block in made.blocks] == [block.name for block in known.blocks]
    layer, same = (next(one for one in profile.blocks if one.name.endswith(".1")) for profile in (made, known))
    for field in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "cast_saving_bytes"):
        assert getattr(layer, field) == pytest.approx(getattr(same, field), rel=0.03)
    assert made.host_s == pytest.approx(known.host_s, rel=0.1)


def test_larger_work_takes_longer() -> None:
    steps = [_described(LLAMA_1B, batch=batch).single_s for batch in (1, 2, 4)]
    assert steps == sorted(steps)
    lengths = [_described(LLAMA_1B, sequence=length).single_s for length in (512, 1024, 2048)]
    assert lengths == sorted(lengths)


def test_experts_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="experts: its kernels are not counted one by one; ask for it as a layout"):
        _described(read_architecture("mixtral-8x7b"))
