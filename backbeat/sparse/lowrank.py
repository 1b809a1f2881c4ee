"""Low rank, as PowerSGD does: a gradient matrix M travels as two thin ones, P = M·Q and Q = Mᵀ·P.

One step of power iteration, begun where the last step ended, with P made orthonormal in between: two all-reduces of a
group's factors. Rank w sends P·Q_wᵀ of its own M_w, and keeps M_w − P·Q_wᵀ; since P is the same everywhere the parts
add up to what every rank receives, P·(ΣQ_w)ᵀ, and nothing is lost. Vectors, and matrices that are not larger than their
factors, travel as they are with the first all-reduce.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from backbeat.sparse.exchange import Collective, Exchange
from backbeat.sparse.residual import Residual


class _Piece(NamedTuple):
    """One parameter in the group's buffer."""

    start: int
    rows: int
    columns: int


class LowRank:
    """Compressor of `kind="powersgd"`."""

    masks_velocity = False
    fault: torch.Tensor | None = None

    def __init__(self, rank: int, shapes: Sequence[Sequence[int]], *, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._matrices: list[_Piece] = []
        self._plain: list[tuple[int, int]] = []
        start = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            numel = 1
            for size in shape:
                numel *= size
            columns = numel // rows if rows else 0
            if min(rows, columns) > rank and rank * (rows + columns) < numel:
                self._matrices.append(_Piece(start, rows, columns))
            else:
                self._plain.append((start, start + numel))
            start += numel
        self._factors: list[torch.Tensor] | None = None
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bare: list[torch.Tensor] = []

    def exchange(self, residual: Residual, *, step: int, scale: float, density: float | None = None) -> Exchange:
        values = residual.values
        matrices = [values[p.start : p.start + p.rows * p.columns].view(p.rows, p.columns) for p in self._matrices]
        if self._factors is None:
            self._factors = [self._first(number, piece, values) for number, piece in enumerate(self._matrices)]
        left = [matrix @ factor for matrix, factor in zip(matrices, self._factors, strict=True)]
        dense = [values[start:end] for start, end in self._plain]
        first = yield Collective("all_reduce", torch.cat([part.reshape(-1) for part in (*left, *dense)]) * scale)
        self._bare = [part.clone() for part in dense]
        for part in dense:
            part.zero_()
        left = [orthonormal(part) for part in _cut(first, [part.shape for part in left])]
        bare = first[sum(part.numel() for part in left) :]
        right = [matrix.t() @ part for matrix, part in zip(matrices, left, strict=True)]
        for matrix, one, other in zip(matrices, left, right, strict=True):
            matrix.sub_(one @ other.t())
        self._taken = list(zip(left, right, strict=True))
        if right:
            second = yield Collective("all_reduce", torch.cat([part.reshape(-1) for part in right]) * scale)
            self._factors = _cut(second, [part.shape for part in right])
        factors = list(self._factors)

        def write(out: torch.Tensor) -> None:
            for piece, one, other in zip(self._matrices, left, factors, strict=True):
                target = out[piece.start : piece.start + piece.rows * piece.columns]
                target.view(piece.rows, piece.columns).copy_(one @ other.t())
            start = 0
            for begin, end in self._plain:
                out[begin:end].copy_(bare[start : start + end - begin])
                start += end - begin

        return write

    def give_back(self, residual: Residual) -> None:
        for piece, (one, other) in zip(self._matrices, self._taken, strict=bool(self._taken)):
            residual.values[piece.start : piece.start + piece.rows * piece.columns].add_((one @ other.t()).view(-1))
        for (start, end), part in zip(self._plain, self._bare, strict=bool(self._bare)):
            residual.values[start:end].add_(part)
        self.forget()

    def forget(self) -> None:
        self._taken, self._bare = [], []

    def _first(self, number: int, piece: _Piece, like: torch.Tensor) -> torch.Tensor:
        # From the host's generator: devices of different kinds must begin alike.
        source = torch.Generator().manual_seed(random.Random(f"{self._seed}/{number}/{piece}").randrange(2**63))
        return torch.randn(piece.columns, self._rank, generator=source, dtype=torch.float32).to(like)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Gram–Schmidt, column by column; a column that depends on those before becomes zero, not noise."""
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(1):
        before = column.norm()
        rest = column
        # Twice is enough to be orthogonal to working precision.
        for _ in range(2):
            for done in columns:
                rest = rest - done * (done @ rest)
        length = rest.norm()
        columns.append(torch.where(length > before * 1e-5, rest / length.clamp(min=1e-30), 0))
    return torch.stack(columns, dim=1)


def _cut(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    parts = []
    start = 0
    for shape in shapes:
        parts.append(flat[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return parts
