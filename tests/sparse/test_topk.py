"""Top-k: nothing is lost, on one rank and over many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backbeat.runtime.compressed.residual import Residual  # noqa: E402
from backbeat.runtime.compressed.topk import TopK  # noqa: E402

NUMEL = 24 * 17 + 9 + 12 * 3 * 3 * 3 + 31
seeds = st.integers(0, 10_000)


def gradients(seed: int, ranks: int = 1, numel: int = NUMEL) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=source) * 10 ** (rank - 1) for rank in range(ranks)]


def together(compressors: list[TopK], residuals: list[Residual]) -> list[torch.Tensor]:
    """The mean that every rank comes to."""
    messages = [compressor.encode(residual) for compressor, residual in zip(compressors, residuals, strict=True)]
    gathered = torch.cat(messages)
    outs = [torch.full_like(residual.values, float("nan")) for residual in residuals]
    for compressor, out in zip(compressors, outs, strict=True):
        compressor.decode(gathered, out, 1 / len(residuals))
    return outs


@pytest.mark.parametrize("density", [0.05, 0.2])
@given(seed=seeds, steps=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_one_rank_sends_or_keeps_every_gradient(density: float, seed: int, steps: int) -> None:
    compressor = TopK(density)
    residual = Residual(torch.zeros(NUMEL))
    for gradient in gradients(seed, steps):
        residual.values += gradient
        before = residual.values.clone()
        (out,) = together([compressor], [residual])
        assert torch.equal(out + residual.values, before)


@pytest.mark.parametrize("density", [0.05, 0.2])
@pytest.mark.parametrize("ranks", [2, 4])
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_the_sum_over_ranks_is_conserved_and_ranks_agree(density: float, ranks: int, seed: int) -> None:
    compressors = [TopK(density) for _ in range(ranks)]
    residuals = [Residual(torch.zeros(NUMEL)) for _ in range(ranks)]
    for step in (1, 2):
        for residual, gradient in zip(residuals, gradients(seed + step, ranks), strict=True):
            residual.values += gradient
        before = sum(residual.values.double() for residual in residuals)
        outs = together(compressors, residuals)
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        after = sum(residual.values.double() for residual in residuals)
        torch.testing.assert_close(outs[0].double() * ranks + after, before, rtol=1e-5, atol=1e-4)


def test_what_a_failed_step_took_comes_back_once() -> None:
    compressors = [TopK(0.05) for _ in range(2)]
    residuals = [Residual(gradient.clone()) for gradient in gradients(3, 2)]
    before = [residual.values.clone() for residual in residuals]
    together(compressors, residuals)
    for compressor, residual, held in zip(compressors, residuals, before, strict=True):
        assert not torch.equal(residual.values, held)
        for _ in range(2):
            compressor.give_back(residual)
            torch.testing.assert_close(residual.values, held)


def test_everything_sent_is_the_dense_mean() -> None:
    sent = gradients(5, 2)
    residuals = [Residual(gradient.clone()) for gradient in sent]
    out, _ = together([TopK(1.0), TopK(1.0)], residuals)
    assert torch.equal(out, sent[0] * 0.5 + sent[1] * 0.5)
    assert not residuals[0].values.any()


def test_what_rounding_keeps_back_stays() -> None:
    held = gradients(7)[0].double() + 1e-9
    residual = Residual(held.clone())
    (out,) = together([TopK(0.2)], [residual])
    assert torch.equal(out, out.float().double())
    assert residual.values[out != 0].any()
    assert torch.equal(out + residual.values, held)


def test_masked_velocity_of_places_that_are_sent_starts_anew() -> None:
    velocity = torch.arange(1.0, 7.0)
    residual = Residual(torch.tensor([0.0, 5.0, 0.1, -7.0, 0.2, 0.0]), velocity, masked=True)
    TopK(2 / 6).encode(residual)
    assert velocity.tolist() == [1, 0, 3, 0, 5, 6]
