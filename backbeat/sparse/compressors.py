"""The compressor of an encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backbeat.errors import InputError
from backbeat.sparse.lowrank import LowRank
from backbeat.sparse.quantise import Int8
from backbeat.sparse.topk import RandomK, TopK

if TYPE_CHECKING:
    from backbeat.model.encoding import Encoding
    from backbeat.sparse.exchange import Compressor
    from backbeat.sparse.recordings import Recordings


def compressor_of(
    encoding: Encoding,
    shapes: Sequence[Sequence[int]],
    *,
    rank: int,
    ranks: int,
    seed: int = 0,
    recordings: Recordings | None = None,
) -> Compressor:
    """For a group of parameters of these shapes, on this rank of so many; `seed` is the same on all of them.
    `recordings`: those of the stream that all its work is done on."""
    if encoding.kind == "topk":
        if encoding.aggregate == "tree" and ranks & (ranks - 1):
            raise InputError(
                f"aggregate is 'tree' and there are {ranks} ranks: pairs merge only where their number is a power of "
                "two; use aggregate 'all_gather'"
            )
        return TopK(encoding, rank=rank, ranks=ranks, recordings=recordings)
    if encoding.kind == "randomk":
        return RandomK(encoding, seed=seed)
    if encoding.kind == "int8":
        return Int8()
    return LowRank(encoding.rank or 1, shapes, seed=seed)
