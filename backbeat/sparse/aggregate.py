"""From many ranks' places and values to one dense mean."""

from __future__ import annotations

import torch


def add_gathered(out: torch.Tensor, index: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """The mean of one row a rank, dense.

    Rank by rank, since within one row no two values meet at a place: the order of the additions, and so every bit of
    the result, is the same on all ranks. One addition of all rows at once would leave it to the GPU's scheduling.
    """
    out.zero_()
    for places, row in zip(index, values.to(out.dtype), strict=True):
        out.index_add_(0, places, row, alpha=scale)


def keep_largest(index: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of two sparse rows of k places, cut to its k largest."""
    count = index.shape[1]
    ordered, order = index.reshape(-1).sort(stable=True)
    runs = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])
    sums = torch.zeros_like(values.reshape(-1)).index_add_(0, runs, values.reshape(-1)[order])
    # Places that no run fills repeat the first, with nothing to add there.
    places = ordered[:1].repeat(2 * count).index_copy_(0, runs, ordered)
    best = sums.abs().topk(count).indices
    return places[best], sums[best]


def member_of(index: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Which places are among others."""
    ordered = among.sort().values
    found = torch.searchsorted(ordered, index).clamp_(max=len(ordered) - 1)
    return ordered[found] == index
