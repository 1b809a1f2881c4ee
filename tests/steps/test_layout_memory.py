"""What a GPU holds, counted once more by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backbeat.model.architecture import Architecture
from backbeat.model.framework import Framework, framework_named
from backbeat.model.layout import Job, Layout
from backbeat.steps.layout_memory import LayerMemory, layout_memory

FLASH, SCORES = framework_named("megatron"), framework_named("megatron", flash_attention=False, loss_bytes=(26, 12))
S, B, H, A = 1024, 2, 512, 8
JOB = Job(global_batch=1024, sequence=S)
GPT = Architecture(
    name="gpt", layers=4, hidden=H, heads=A, ffn=4 * H, vocab=32000, gated=False, rms_norm=False, dropout=True
)
LLAMA = Architecture(name="llama", layers=4, hidden=H, heads=A, kv_heads=2, ffn=1536, vocab=32000)
EXPERTS = Architecture(
    name="experts", layers=4, hidden=H, heads=A, ffn=1536, vocab=32000, experts=16, experts_per_token=3,
    expert_ffn=256, shared_ffn=128,
)  # fmt: skip


def kept(model: Architecture, framework: Framework, *, sparse: bool = False, **fields: Any) -> float:
    """Bytes that a layer keeps of each token of a micro-batch."""
    layout = Layout(micro_batch=B, **fields)
    return LayerMemory(model, layout, JOB, framework).kept(sparse=sparse) / (S * B)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_gpt_layer_keeps_what_korthikanti_et_al_count(t: int) -> None:
    scores = 5 * A * S / H
    assert kept(GPT, SCORES, tp=t, sequence_parallel=False) == H * (10 + (24 + scores) / t)
    assert kept(GPT, SCORES, tp=t) == H * (34 + scores) / t
    for framework, recompute in ((SCORES, "selective"), (FLASH, "none"), (FLASH, "selective")):
        assert kept(GPT, framework, tp=t, recompute=recompute) == H * 34 / t
    assert kept(GPT, SCORES, tp=t, recompute="full") == 2 * H / t
    assert kept(GPT, SCORES, tp=t, recompute="full", sequence_parallel=False) == 2 * H
    # Each of two ranks has half of every sequence, and scores of that half with all of it.
    for recompute in ("none", "selective", "full"):
        assert kept(GPT, SCORES, tp=t, cp=2, recompute=recompute) == kept(GPT, SCORES, tp=t, recompute=recompute) / 2


@pytest.mark.parametrize("t", [1, 2])
def test_other_layers_keep_what_their_matrices_take(t: int) -> None:
    # Two norms with their inputs; queries and attention's output, keys and values; gate, up and their product.
    attention = 8 * H + 2 * (2 * H + 2 * H // 4)
    assert kept(LLAMA, FLASH, tp=t) == (attention + 2 * 3 * 1536) / t
    # Without dropout scores have no mask: they and their softmax in 16 bits, less what is computed again.
    assert kept(LLAMA, SCORES, tp=t) - kept(LLAMA, FLASH, tp=t) == 2 * A * S / t
    # A token's copy for each of three experts, sorted and as its expert left it; the MLP that all tokens take.
    experts = 8 * H + 2 * (2 * H + 2 * H) + 3 * 2 * (2 * H + 3 * 256) + 2 * 3 * 128
    assert kept(EXPERTS, FLASH, tp=t, sparse=True) == experts / t
    busy = LayerMemory(EXPERTS, Layout(micro_batch=B, tp=t), JOB, FLASH, 1.5).kept(sparse=True) / (S * B)
    assert busy - experts / t == 0.5 * 3 * 2 * (2 * H + 3 * 256) / t


def test_latent_attention_keeps_what_it_squeezes() -> None:
    fields: dict[str, Any] = {"layers": 1, "hidden": H, "heads": A, "ffn": 1536, "vocab": 100, "head_width": 64}
    plain = Architecture(name="plain", **fields)
    latent = Architecture(name="latent", query_rank=96, latent_width=32, **fields)
    assert kept(latent, FLASH) - kept(plain, FLASH) == 2 * (2 * 96 + 2 * 32)


def held(model: Architecture, layout: Layout, framework: Framework = FLASH, imbalance: float = 1.0) -> Any:
    """By kind."""
    return SimpleNamespace(**layout_memory(model, layout, JOB, framework, imbalance).by_kind)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_takes_eighteen_bytes_and_replicas_share_them(zero: int) -> None:
    """2 for itself, 4 for its gradient, 12 for Adam. Dense ones have dp · cp replicas, experts tp · cp · dp / ep."""
    # Of two ranks each has half of attention, the shared MLP, embedding and head, and all of norms and router.
    dense = 4 * (2 * H * H + 3 * H * 128 / 2 + 2 * H + 16 * H) + 32000 * H + H
    experts = 4 * 16 * 3 * H * 256 / 4
    found = held(EXPERTS, Layout(dp=4, cp=2, tp=2, ep=4, zero=zero))
    whole, shared = dense + experts, dense / 8 + experts / 4
    assert found.parameters == pytest.approx(2 * (shared if zero == 3 else whole), rel=1e-12)
    assert found.gradients == pytest.approx(4 * (shared if zero >= 2 else whole), rel=1e-12)
    assert found.optimizer == pytest.approx(12 * (shared if zero >= 1 else whole), rel=1e-12)
    # Both collectives' buffers of tp; what the rank lacks of a layer and the head: gradients, then both.
    lacking = (32000 * H / 2 + H + (dense - 32000 * H - H) / 4) * 7 / 8 + experts / 4 * 3 / 4
    tokens = S / 2
    assert found.buffers == pytest.approx(4 * tokens * H + (0, 0, 4, 6)[zero] * lacking, rel=1e-12)
    assert held(EXPERTS, Layout(dp=4, cp=2, ep=4, zero=1)).buffers == 0


def test_stages_hold_their_own_layers_and_only_the_last_has_logits() -> None:
    layer, token = kept(LLAMA, FLASH) * S * B, 4 * S * B * H
    alone = held(LLAMA, Layout(micro_batch=B))
    assert alone.activations == 4 * layer + token
    assert alone.loss == 5 * S * B * 32000
    assert held(LLAMA, Layout(micro_batch=B), SCORES).loss == 8 * S * B * 32000
    halved = held(LLAMA, Layout(micro_batch=B, tp=2))
    assert (halved.activations, halved.loss) == (alone.activations / 2, alone.loss / 2)
    between = held(LLAMA, Layout(micro_batch=B, tp=2, sequence_parallel=False)).activations - halved.activations
    assert between == 4 * 8 * H * S * B / 2 + token / 2
    # The first of two stages holds two micro-batches, the last one and the logits: these weigh more here.
    last = held(LLAMA, Layout(micro_batch=B, pp=2))
    assert last.activations == 2 * layer + token
    assert last.loss == alone.loss
    small = Architecture(name="small vocabulary", layers=4, hidden=H, heads=A, kv_heads=2, ffn=1536, vocab=100)
    first = held(small, Layout(micro_batch=B, pp=2))
    assert first.activations == 2 * 2 * layer
    assert first.loss == 0
    # Of a last stage in two parts, one has the logits.
    assert held(LLAMA, Layout(micro_batch=B, pp=2, chunks=2)).loss == alone.loss
    # Recomputed, a stage keeps every layer's input, and the rest of the layer that it is at.
    full = held(small, Layout(micro_batch=B, pp=2, recompute="full"))
    assert full.activations == 2 * 2 * 2 * S * B * H + layer - 2 * S * B * H


def test_a_stage_of_dense_layers_and_experts_holds_both() -> None:
    mixed = Architecture(
        name="mixed", layers=3, hidden=H, heads=A, ffn=1536, vocab=100, experts=16, experts_per_token=3,
        expert_ffn=256, shared_ffn=128, dense_layers=2,
    )  # fmt: skip
    dense, sparse = (kept(mixed, FLASH, sparse=each) * S * B for each in (False, True))
    assert held(mixed, Layout(micro_batch=B)).activations == 2 * dense + sparse + 4 * S * B * H
    again = held(mixed, Layout(micro_batch=B, recompute="full")).activations
    assert again == 3 * 2 * S * B * H + max(dense, sparse) - 2 * S * B * H + 4 * S * B * H
    # A first stage without experts computes none again.
    first = held(mixed, Layout(micro_batch=B, dp=64, ep=16, pp=3, recompute="full"))
    assert first.activations == 3 * 2 * S * B * H + dense - 2 * S * B * H
    # The busiest rank holds more of the tokens.
    busy = held(mixed, Layout(micro_batch=B), imbalance=1.5).activations
    assert busy - held(mixed, Layout(micro_batch=B)).activations == 0.5 * 3 * 2 * (2 * H + 3 * 256) * S * B


def test_stages_behind_a_large_head_hold_nothing() -> None:
    """nanotron gives the first stage three layers, the second one and the head, and the other two none."""
    found = held(LLAMA, Layout(pp=4, zero=3), framework_named("nanotron"))
    second = 2 * H * H + 2 * H * H // 4 + 3 * H * 1536 + 2 * H + 32000 * H + H
    assert found.parameters == 2 * second
    assert found.buffers == 0
    # Of two replicas each lacks half of what it gathers: of parameters, and of gradients, in 16 and in 32 bits.
    assert held(LLAMA, Layout(dp=2, pp=4, zero=3), framework_named("nanotron")).buffers == (2 + 6) * second / 2
