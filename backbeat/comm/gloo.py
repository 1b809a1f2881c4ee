"""Reduce-scatter on gloo, with the bytes of one.

Gloo's own `reduce_scatter` is an all-reduce of which each rank keeps its part: on 2 and on 4 ranks (torch 2.13) it
moves as many bytes as the all-reduce. Here each rank sends every other rank that one's part and adds up what it
receives, which moves (N - 1)/N of the message, as a ring's reduce-scatter does. It takes a second buffer of the
message's size. Half of the bytes is not always half of the time: what it takes, calibration says.
"""

from __future__ import annotations

from typing import Any

import torch

PRIMITIVE = "all-to-all and a local sum"


class Summed:
    """A reduce-scatter on its way; the sum is made by the thread that received the last part."""

    def __init__(self, work: Any, parts: torch.Tensor, shard: torch.Tensor) -> None:
        def add(done: Any) -> torch.Tensor:
            done.wait()
            return torch.sum(parts, dim=0, out=shard)

        self._future = work.get_future().then(add)

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Any:
        return self._future


def reduce_scatter(gloo: Any, shard: torch.Tensor, whole: torch.Tensor) -> Summed:
    """Sum `whole` over the ranks and leave this rank's part in `shard`; returns at once."""
    parts = torch.empty_like(whole)
    return Summed(gloo.alltoall_base(parts, whole, [], []), parts.view(gloo.size(), shard.numel()), shard)
