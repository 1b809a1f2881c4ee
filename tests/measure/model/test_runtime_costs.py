"""What only the runtime can do is measured where a caller hands it in, and left out where none does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small_models import QUICK, classifier, images, loss
from torch import nn

from backbeat.measure import profile
from backbeat.runtime.compressed import topk_speed
from backbeat.runtime.memory import apply

RUNTIME = {"topk_speed": topk_speed.measure_topk, "apply_memory": apply}


@pytest.mark.parametrize("host_s", [2e-5, 6e-4])
def test_a_slow_host_is_not_taken_off_what_bytes_cost(monkeypatch: pytest.MonkeyPatch, host_s: float) -> None:
    def samples(training: object, elements: int, *, head_start: bool) -> tuple[float, float]:
        device_s = 5e-5 + 1e-11 * 4 * elements
        return host_s, device_s if head_start else max(host_s, device_s)

    monkeypatch.setattr(topk_speed, "_samples", samples)
    found = topk_speed.measure_topk(SimpleNamespace(device=torch.device("cuda")), 2**28)  # type: ignore[arg-type]
    assert found is not None
    assert found.s_per_byte == pytest.approx(1e-11, rel=1e-2)
    assert found.s_per_bucket == pytest.approx(max(host_s, 5e-5 + 1e-11 * 2**19), rel=1e-2)


def test_the_cost_of_topk_is_measured() -> None:
    found = profile(classifier(), images(), loss, **RUNTIME, **QUICK)
    assert found.compression_s_per_byte is not None
    assert found.compression_s_per_byte > 0
    assert found.compression_s_per_bucket is not None
    assert found.compression_s_per_bucket > 0
    # The host is the device here.
    assert (found.host_s, found.device_s, found.host_recompute_s, found.host_fetch_s) == (None, None, None, None)
    assert {block.host_forward_s for block in found.blocks} == {None}


def test_without_the_runtime_the_profile_does_not_say() -> None:
    found = profile(classifier(), images(), loss, **QUICK)
    assert (found.compression_s_per_byte, found.compression_s_per_bucket, found.host_recompute_s) == (None, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_on_a_gpu(precision: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    batch = torch.randn(256, 512), torch.randint(0, 4, (256,))
    result = profile(model, batch, loss, device="cuda", precision=precision, iterations=6, warmup=2, **RUNTIME)
    assert len(result.gradients) == 6
    assert result.gradients[0].name.startswith("4.")
    assert result.gradients[-1].name.startswith("0.")
    assert 0 < result.gradients[-1].ready_s <= result.backward_s
    assert result.memory is not None
    assert result.memory.peak_bytes > result.memory.steady_bytes
    assert any("-bound" in note for note in result.notes)
    assert result.host_s is not None
    assert result.host_s > 0
    assert result.host_recompute_s is not None
    assert result.host_fetch_s is not None
    assert all(block.host_forward_s and block.host_backward_s is not None for block in result.blocks)
