"""Which elements are sent. Results have a fixed size and nothing is read back by the host, so that a GPU never waits.

`largest` is exact, and cheap because of this: cut the tensor into blocks, and the k largest elements lie in the k
blocks with the largest maxima. With blocks of B elements only n/B maxima and k·B candidates are sorted out, least in
all for B = √(n/k). Blocks are strided, element i in block i mod (n/B), which keeps the maxima one linear pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from backbeat.cost.message import block_width

HOSTS = {"cpu"}
"""Kinds of device that may be asked at any time what came out."""
_SMALL = 4096


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` elements largest in magnitude, in no order."""
    numel = values.numel()
    if count >= numel:
        return torch.arange(numel, device=values.device)
    width = block_width(numel, count)
    if width < 4 or numel < _SMALL:
        return values.abs().topk(count, sorted=False).indices
    blocks = numel // width
    folded = values[: blocks * width].view(width, blocks)
    chosen = _magnitudes(folded).topk(count, sorted=False).indices
    candidates = (_steps(0, blocks * width, blocks, values.device).view(-1, 1) + chosen).view(-1)
    if blocks * width < numel:
        candidates = torch.cat([candidates, _steps(blocks * width, numel, 1, values.device)])
    best = values[candidates].abs_().topk(count, sorted=False).indices
    return candidates[best]


def _magnitudes(folded: torch.Tensor) -> torch.Tensor:
    """The largest of each column."""
    if folded.device.type in HOSTS:
        # Four passes, and a fifth of the time that the norm takes on a CPU.
        return torch.maximum(folded.amax(0), folded.amin(0).neg_())
    found: torch.Tensor = torch.linalg.vector_norm(folded, math.inf, 0)
    return found


@functools.cache
def _steps(start: int, end: int, step: int, device: torch.device) -> torch.Tensor:
    """A few whole numbers that every step of training needs again; never dropped, since recorded kernels read them."""
    return made_once(lambda: torch.arange(start, end, step, device="cpu"), device)


def made_once(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor for all streams: copied from the host, which waits for it, so that no stream reads it too soon."""
    with torch.inference_mode(False):
        return make().to(device)
