"""Top-k: the largest elements are sent, the rest stays in the residual, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.cost.message import kept_bytes, sent_elements
from backbeat.runtime.compressed import topk
from backbeat.runtime.compressed.cuda_graphs import CudaGraphs
from backbeat.runtime.compressed.residual import add_all
from backbeat.runtime.compressed.stores import drop_infinite
from backbeat.runtime.compressed.topk import TopK, largest

NUMEL = 24 * 17 + 9 + 12 * 3 * 3 * 3 + 31
seeds = st.integers(0, 10_000)
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(seed: int, ranks: int = 1, numel: int = NUMEL) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=source) * 10 ** (rank - 1) for rank in range(ranks)]


@given(seed=seeds, numel=st.integers(1, 20_000), density=st.floats(1e-4, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_largest_are_the_largest(seed: int, numel: int, density: float) -> None:
    (values,) = gradients(seed, numel=numel)
    count = int(sent_elements(numel, density))
    found = largest(values, count)
    assert len(set(found.tolist())) == count
    expected = values.abs().topk(count).values
    assert torch.equal(values[found].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_a_device_selects_what_the_host_does(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    (values,) = gradients(3, numel=50_021)
    count = int(sent_elements(values.numel(), density))
    expected = largest(values, count).sort().values
    monkeypatch.setattr(topk, "HOSTS", set())
    assert torch.equal(largest(values, count).sort().values, expected)


def together(compressors: list[TopK], residuals: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mean that every rank comes to."""
    messages = [compressor.encode(residual) for compressor, residual in zip(compressors, residuals, strict=True)]
    gathered = torch.cat(messages)
    outs = [torch.full_like(residual, float("nan")) for residual in residuals]
    for compressor, out in zip(compressors, outs, strict=True):
        compressor.decode(gathered, out, 1 / len(residuals))
    return outs


@pytest.mark.parametrize("density", [0.05, 0.2])
@given(seed=seeds, steps=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_one_rank_sends_or_keeps_every_gradient(density: float, seed: int, steps: int) -> None:
    compressor = TopK(density)
    residual = torch.zeros(NUMEL)
    for gradient in gradients(seed, steps):
        residual += gradient
        before = residual.clone()
        (out,) = together([compressor], [residual])
        assert torch.equal(out + residual, before)


@pytest.mark.parametrize("density", [0.05, 0.2])
@pytest.mark.parametrize("ranks", [2, 4])
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_the_sum_over_ranks_is_conserved_and_ranks_agree(density: float, ranks: int, seed: int) -> None:
    compressors = [TopK(density) for _ in range(ranks)]
    residuals = [torch.zeros(NUMEL) for _ in range(ranks)]
    for step in (1, 2):
        for residual, gradient in zip(residuals, gradients(seed + step, ranks), strict=True):
            residual += gradient
        before = sum(residual.double() for residual in residuals)
        outs = together(compressors, residuals)
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        after = sum(residual.double() for residual in residuals)
        torch.testing.assert_close(outs[0].double() * ranks + after, before, rtol=1e-5, atol=1e-4)


def test_what_a_failed_step_took_comes_back_once() -> None:
    compressors = [TopK(0.05) for _ in range(2)]
    residuals = [gradient.clone() for gradient in gradients(3, 2)]
    before = [residual.clone() for residual in residuals]
    together(compressors, residuals)
    for compressor, residual, held in zip(compressors, residuals, before, strict=True):
        assert not torch.equal(residual, held)
        for _ in range(2):
            compressor.give_back(residual)
            torch.testing.assert_close(residual, held)


def test_everything_sent_is_the_dense_mean() -> None:
    sent = gradients(5, 2)
    residuals = [gradient.clone() for gradient in sent]
    out, _ = together([TopK(1.0), TopK(1.0)], residuals)
    assert torch.equal(out, sent[0] * 0.5 + sent[1] * 0.5)
    assert not residuals[0].any()


def test_what_rounding_keeps_back_stays() -> None:
    held = gradients(7)[0].double() + 1e-9
    residual = held.clone()
    (out,) = together([TopK(0.2)], [residual])
    assert torch.equal(out, out.float().double())
    assert residual[out != 0].any()
    assert torch.equal(out + residual, held)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("numel", [3_000, 300_000])
@pytest.mark.parametrize(
    "planted", [{17: "nan"}, {2_999: "inf"}, {0: "-inf", 2_000: "nan"}, dict.fromkeys(range(1_000, 2_500), "nan")]
)
def test_what_is_not_finite_is_found_and_not_sent(device: str, numel: int, planted: dict[int, str]) -> None:
    torch.manual_seed(0)
    values = torch.randn(numel)
    for index, what in planted.items():
        values[index] = float(what)
    residual = values.to(device, copy=True)
    compressor = TopK(0.01, CudaGraphs())
    result = torch.empty(numel, device=device)
    compressor.decode(compressor.encode(residual), result, 1.0)
    assert compressor.fault is not None
    assert int(compressor.fault) in planted
    assert bool(result.isfinite().all())
    left = int((~residual.isfinite()).sum())
    assert left == max(0, len(planted) - numel // 100)
    drop_infinite(residual)
    assert bool(residual.isfinite().all())
    compressor.decode(compressor.encode(residual), result, 1.0)
    assert int(compressor.fault) == -1


@pytest.mark.parametrize("numel", [1, 700, 65_536, 300_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 1.0])
def test_a_bucket_keeps_the_bytes_that_the_planner_counts(numel: int, density: float) -> None:
    residual = torch.randn(numel)
    # What all buckets share is there after the first.
    TopK(density).encode(residual)
    compressor = TopK(density)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        compressor.encode(residual)
    events = profiler.profiler.kineto_results.events()
    left = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert compressor.fault is not None
    assert left == kept_bytes(numel, density) + compressor.fault.nbytes


class Launches(TorchDispatchMode):
    """The operations that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in {"detach", "empty", "expand", "slice", "unbind", "view"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_bucket_launches_as_much_with_one_gradient_as_with_fifty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "HOSTS", set())
    numel = 50 * 4096

    def launches(count: int) -> list[str]:
        residual, result = torch.zeros(numel), torch.empty(numel)
        targets = list(residual.split(numel // count))
        compressor = TopK(0.01, CudaGraphs())
        for step in range(2):
            arrived = list(gradients(step, numel=numel)[0].split(numel // count))
            # What is made once is there after the first step.
            with torch.no_grad(), Launches() as launched:
                add_all(residual, targets, arrived)
                compressor.decode(compressor.encode(residual), result, 1.0)
        return launched.names

    assert launches(1) == launches(50)
