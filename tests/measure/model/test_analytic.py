"""Profiles computed without a GPU: the same gradients as measured, and times that follow from the rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from backbeat.errors import InputError
from backbeat.measure import profile
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory

WIDTH = 256


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        query, key, value = (
            part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.projections(hidden).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        return self.head(self.frozen(self.norm(mixed.transpose(1, 2).flatten(2))))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def network(batch_size: int = 4, device: str = "cpu") -> Any:
    return Network().to(device), torch.randint(0, 50, (batch_size, 16), device=device), loss


def without_device(batch_size: int = 4) -> Any:
    return network(batch_size)


def conditional(batch_size: int = 4) -> Any:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = model(batch).sum()
        return value if value > 0 else -value

    return nn.Linear(3, 3), torch.randn(batch_size, 3), loss


def computed(call: Any = network, **options: Any) -> Any:
    return analytic_profile(inspect_factory(call, f"tests:{call.__name__}"), **{"gpu": "h100", **options})


@pytest.mark.parametrize("call", [network, without_device])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_has_the_measured_profiles_gradients(call: Any, precision: str) -> None:
    model, batch, _ = network()
    measured = profile(model, batch, loss, precision=precision, iterations=1, warmup=1)
    result = computed(call, precision=precision)
    assert {gradient.name: gradient.bytes for gradient in result.gradients} == {
        gradient.name: gradient.bytes for gradient in measured.gradients
    }
    assert result.gradients[-1].name == "embedding.weight"
    assert any("frozen.weight" in note for note in result.notes)
    assert sum(gradient.forward_s for gradient in result.gradients) == pytest.approx(result.forward_s, abs=1e-7)
    assert result.memory is not None
    assert measured.memory is not None
    assert result.memory.parameter_bytes == measured.memory.parameter_bytes
    assert result.memory.activation_bytes == pytest.approx(measured.memory.activation_bytes, rel=0.25)


def test_it_is_flagged_everywhere() -> None:
    result = computed(precision="bf16")
    assert result.analytic
    assert result.name == "network-b4-bf16-h100-analytic"
    assert result.device.endswith("(analytic)")
    assert any(note.startswith("analytic:") for note in result.notes)
    assert any("measured one by one on an H200" in note for note in result.notes)
    assert result.iteration_s == ()
    assert computed(name="mine").name == "mine-analytic"


def test_it_is_the_same_every_time() -> None:
    assert computed(precision="bf16") == computed(precision="bf16")


def test_accumulation_and_batch_size() -> None:
    small, large = (computed(batch_size=size, launch_overhead=False) for size in (4, 4096))
    assert large.forward_s > small.forward_s
    assert large.update_s == small.update_s
    assert computed(batch_size=4, accumulation=4).accumulation == 4


def test_a_large_product_is_near_peak_and_twice_as_long_in_backward() -> None:
    n = 16384

    def one(device: str = "cpu") -> Any:
        model = nn.Linear(n, n, bias=False, device=device)
        inputs = torch.randn(n, n, device=device, requires_grad=True)
        return model, inputs, lambda model, batch: model(batch).sum()

    result = computed(one, gpu=None, tflops=100, gbps=1e6, precision="bf16")
    peak_s = 2 * n**3 / 100e12
    assert peak_s < result.forward_s < 1.5 * peak_s
    assert result.backward_s == pytest.approx(2 * result.forward_s, rel=0.1)
    assert result.compute_shares is not None
    assert result.compute_shares.matmul > 0.95


def test_shares_flops_and_tokens_are_part_of_it() -> None:
    result = computed(batch_size=64)
    shares = result.compute_shares
    assert shares is not None
    assert shares.matmul + shares.attention + shares.memory == pytest.approx(1, abs=1e-5)
    assert min(shares.matmul, shares.attention, shares.memory) > 0
    assert result.sequence_length == 16
    assert result.flops_per_sample is not None


def test_a_small_model_waits_for_the_host_unless_told_otherwise() -> None:
    waiting, ahead = computed(), computed(launch_overhead=False)
    assert waiting.host_s is not None
    assert waiting.single_s >= waiting.host_s * 0.9
    assert ahead.host_s is None
    assert ahead.single_s < waiting.single_s / 2


def test_a_compiled_model_moves_less_and_launches_less() -> None:
    eager, compiled = (computed(batch_size=2048, precision="bf16", compiled=each) for each in (False, True))
    assert compiled.name.endswith("-compiled-analytic")
    assert compiled.forward_s < eager.forward_s
    assert compiled.single_s < eager.single_s
    assert compiled.host_s < eager.host_s
    assert {gradient.name for gradient in compiled.gradients} == {gradient.name for gradient in eager.gradients}


@pytest.mark.parametrize(
    ("options", "words"), [({}, "foreach"), ({"fused": True}, "fused"), ({"foreach": False}, "loop")]
)
def test_the_update_follows_the_optimizer(options: dict[str, Any], words: str) -> None:
    def adam(batch_size: int = 4) -> Any:
        model, batch, loss = network(batch_size)
        return model, batch, loss, torch.optim.AdamW(model.parameters(), **options)

    result = computed(adam, launch_overhead=False)
    assert (result.optimizer or "").startswith("AdamW")
    assert any(words in note for note in result.notes)
    plain = computed(launch_overhead=False)
    assert result.update_s > plain.update_s


def test_an_optimizer_by_name_updates_fused() -> None:
    named = computed(launch_overhead=False, optimizer="adamw")
    assert named.optimizer == "AdamW, fused"
    assert computed(launch_overhead=False).optimizer == "SGD with momentum"
    assert named.memory is not None
    assert named.memory.optimizer_bytes == 2 * named.memory.gradient_bytes


def test_a_faster_gpu_is_faster_and_fp8_needs_one_that_has_it() -> None:
    times = [computed(gpu=gpu, batch_size=1024, precision="bf16").single_s for gpu in ("a100", "h100", "b200")]
    assert times == sorted(times, reverse=True)
    assert computed(batch_size=1024, precision="fp8").precision == "fp8"
    with pytest.raises(InputError, match="A100 has no fp8"):
        computed(gpu="a100", precision="fp8")


def test_work_that_depends_on_data_is_refused() -> None:
    with pytest.raises(InputError, match="depends on its data"):
        computed(conditional)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "b400"}, "known are a10, a100"),
        ({"gpu": None}, "both --tflops and --gbps"),
        ({"gpu": None, "tflops": 10}, "both --tflops and --gbps"),
        ({"gpu": None, "tflops": 0, "gbps": 1}, "--tflops is 0"),
        ({"gpu": None, "tflops": 1, "gbps": float("nan")}, "--gbps is nan"),
        ({"gpu": "v100", "precision": "tf32"}, "has no tf32"),
        ({"gpu": "v100", "precision": "bf16"}, "has no bf16"),
        ({"precision": "int4"}, "int4"),
        ({"accumulation": 0}, "accumulation is 0"),
    ],
)
def test_bad_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        computed(**options)


def mixture(batch_size: int = 1, device: str = "cpu") -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        tokens = torch.randint(0, 100, (batch_size, 16))
        made = transformers.MixtralForCausalLM(config).train()
    return made, {"input_ids": tokens, "labels": tokens}, lambda module, batch: module(**batch).loss


def test_experts_in_groups_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"by experts in groups|depends on its data"):
        analytic_profile(inspect_factory(mixture, "mixture"), gpu="h200", precision="bf16")
