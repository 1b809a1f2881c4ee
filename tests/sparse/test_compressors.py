"""Every encoding: nothing is lost, on one rank and over many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backbeat.errors import InputError  # noqa: E402
from backbeat.model.encoding import Encoding  # noqa: E402
from backbeat.sparse.compressors import compressor_of  # noqa: E402
from backbeat.sparse.exchange import alone  # noqa: E402
from backbeat.sparse.residual import Residual  # noqa: E402
from tests.sparse.ranks import together  # noqa: E402

SHAPES = [(24, 17), (9,), (12, 3, 3, 3), (31,)]
NUMEL = sum(int(torch.Size(shape).numel()) for shape in SHAPES)
SPARSE = [
    Encoding(kind="topk", density=0.05, select="exact"),
    Encoding(kind="topk", density=0.05),
    Encoding(kind="topk", density=0.2, values="bf16", select="exact"),
    Encoding(kind="topk", density=0.03, aggregate="tree", select="exact"),
    Encoding(kind="topk", density=0.03, aggregate="tree", values="bf16"),
    Encoding(kind="randomk", density=0.1),
    Encoding(kind="randomk", density=0.1, values="bf16"),
]
ALL = [*SPARSE, Encoding(kind="int8"), Encoding(kind="powersgd", rank=2)]
seeds = st.integers(0, 10_000)


def words(encoding: Encoding) -> str:
    return f"{encoding.kind}-{encoding.values}-{encoding.select}-{encoding.aggregate}"


def gradients(seed: int, ranks: int = 1, numel: int = NUMEL) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=source) * 10 ** (rank - 1) for rank in range(ranks)]


@pytest.mark.parametrize("encoding", ALL, ids=words)
@given(seed=seeds, steps=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_one_rank_sends_or_keeps_every_gradient(encoding: Encoding, seed: int, steps: int) -> None:
    compressor = compressor_of(encoding, SHAPES, rank=0, ranks=1)
    residual = Residual(torch.zeros(NUMEL))
    out = torch.empty(NUMEL)
    for step, gradient in enumerate(gradients(seed, steps)):
        residual.values += gradient
        before = residual.values.clone()
        alone(compressor.exchange(residual, step=step, scale=1.0))(out)
        if encoding.kind == "powersgd":
            torch.testing.assert_close(out + residual.values, before)
        else:
            assert torch.equal(out + residual.values, before)


@pytest.mark.parametrize("encoding", ALL, ids=words)
@pytest.mark.parametrize("ranks", [2, 4])
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_the_sum_over_ranks_is_conserved_and_ranks_agree(encoding: Encoding, ranks: int, seed: int) -> None:
    compressors = [compressor_of(encoding, SHAPES, rank=rank, ranks=ranks) for rank in range(ranks)]
    residuals = [Residual(torch.zeros(NUMEL)) for _ in range(ranks)]
    for step in (1, 2):
        for residual, gradient in zip(residuals, gradients(seed + step, ranks), strict=True):
            residual.values += gradient
        before = sum(residual.values.double() for residual in residuals)
        writes = together(
            [c.exchange(r, step=step, scale=1 / ranks) for c, r in zip(compressors, residuals, strict=True)]
        )
        outs = [torch.full((NUMEL,), float("nan")) for _ in range(ranks)]
        for write, out in zip(writes, outs, strict=True):
            write(out)
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        after = sum(residual.values.double() for residual in residuals)
        # A bf16 all-reduce rounds its sum, as it does for dense gradients.
        loose = encoding.kind == "randomk" and encoding.values == "bf16"
        torch.testing.assert_close(
            outs[0].double() * ranks + after, before, rtol=2e-2 if loose else 1e-5, atol=1e-1 if loose else 1e-4
        )


@pytest.mark.parametrize("encoding", ALL, ids=words)
def test_what_a_failed_step_took_comes_back_once(encoding: Encoding) -> None:
    compressors = [compressor_of(encoding, SHAPES, rank=rank, ranks=2) for rank in range(2)]
    residuals = [Residual(gradient.clone()) for gradient in gradients(3, 2)]
    before = [residual.values.clone() for residual in residuals]
    together([c.exchange(r, step=1, scale=0.5) for c, r in zip(compressors, residuals, strict=True)])
    for compressor, residual, held in zip(compressors, residuals, before, strict=True):
        assert not torch.equal(residual.values, held)
        for _ in range(2):
            compressor.give_back(residual)
            torch.testing.assert_close(residual.values, held)


@pytest.mark.parametrize("select", ["exact", "sampled"])
@pytest.mark.parametrize("kind", ["topk", "randomk"])
def test_everything_sent_is_the_dense_mean(kind: str, select: str) -> None:
    encoding = Encoding(kind=kind, density=1.0, select=select)  # type: ignore[arg-type]
    sent = gradients(5, 2)
    compressors = [compressor_of(encoding, SHAPES, rank=rank, ranks=2) for rank in range(2)]
    residuals = [Residual(gradient.clone()) for gradient in sent]
    writes = together([c.exchange(r, step=1, scale=0.5) for c, r in zip(compressors, residuals, strict=True)])
    out = torch.empty(NUMEL)
    writes[0](out)
    assert torch.equal(out, sent[0] * 0.5 + sent[1] * 0.5)
    assert not residuals[0].values.any()


def test_a_tree_keeps_the_largest_of_all_ranks() -> None:
    encoding = Encoding(kind="topk", density=2 / 8, select="exact", aggregate="tree")
    held = [[9.0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 5, 4, 0, 0, 0, 0], [0, 0, 5, 0, 3, 0, 0, 0], [-8, 0, 0, 0, 0, 6, 0, 0]]
    residuals = [Residual(torch.tensor(row)) for row in held]
    compressors = [compressor_of(encoding, [(8,)], rank=rank, ranks=4) for rank in range(4)]
    writes = together([c.exchange(r, step=1, scale=1.0) for c, r in zip(compressors, residuals, strict=True)])
    out = torch.empty(8)
    writes[2](out)
    # (9, 5) of the first pair and (-8, 6) of the second; then 9-8=1, 5 and 6: place 0 is dropped.
    assert out.tolist() == [0, 0, 5, 0, 0, 6, 0, 0]
    assert [residual.values.tolist() for residual in residuals] == [
        [9, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 4, 0, 0, 0, 0],
        [0, 0, 5, 0, 3, 0, 0, 0],
        [-8, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_a_tree_of_three_is_refused() -> None:
    with pytest.raises(InputError, match="there are 3 ranks: pairs merge only where their number is a power of two"):
        compressor_of(Encoding(kind="topk", density=0.1, aggregate="tree"), SHAPES, rank=0, ranks=3)


def test_masked_velocity_of_places_that_are_sent_starts_anew() -> None:
    velocity = torch.arange(1.0, 7.0)
    residual = Residual(torch.tensor([0.0, 5.0, 0.1, -7.0, 0.2, 0.0]), velocity, masked=True)
    encoding = Encoding(kind="topk", density=2 / 6, select="exact")
    alone(compressor_of(encoding, [(6,)], rank=0, ranks=1).exchange(residual, step=1, scale=1.0))
    assert velocity.tolist() == [1, 0, 3, 0, 5, 6]


def test_low_rank_finds_a_matrix_of_its_rank() -> None:
    source = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 2, generator=source) @ torch.randn(2, 30, generator=source)
    compressor = compressor_of(Encoding(kind="powersgd", rank=2), [(40, 30)], rank=0, ranks=1)
    out = torch.empty(1200)
    for _ in range(3):
        alone(compressor.exchange(Residual(matrix.view(-1).clone()), step=1, scale=1.0))(out)
    torch.testing.assert_close(out.view(40, 30), matrix, rtol=1e-3, atol=1e-3)
