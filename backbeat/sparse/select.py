"""Which elements are sent. Results have a fixed size and nothing is read back by the host, so that a GPU never waits.

`largest` is exact, and cheap because of this: cut the tensor into blocks, and the k largest elements lie in the k
blocks with the largest maxima. With blocks of B elements only n/B maxima and k·B candidates are sorted out, least in
all for B = √(n/k). Blocks are strided, element i in block i mod (n/B), which keeps the maxima one linear pass.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import torch

HOSTS = {"cpu"}
"""Kinds of device that may be asked at any time what came out."""
SAMPLE = 16384
"""Elements looked at for a threshold."""
_SMALL = 4096
_WIDEST = 64


def slots(density: float, numel: int) -> int:
    """How many elements travel.

    >>> slots(0.01, 1000), slots(0.001, 10), slots(1.0, 7)
    (10, 1, 7)
    """
    return min(numel, max(1, math.ceil(density * numel - 1e-9)))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` elements largest in magnitude, in no order."""
    numel = values.numel()
    if count >= numel:
        return torch.arange(numel, device=values.device)
    width = min(_WIDEST, 2 ** round(math.log2(math.sqrt(numel / count))))
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


def sampled(values: torch.Tensor, count: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Places above a threshold that a sample gave, and which of them are real.

    The threshold is the sample's quantile. One pass counts what it lets through; outside [count/2, 2·count] it is moved
    to the quantile that the count suggests. Of up to 2·count places that pass, the `count` largest are kept; where
    fewer pass, the first place is repeated and marked as not real. Where the sample holds too few elements of the
    share wanted to tell, the selection is exact.
    """
    numel = values.numel()
    size = min(SAMPLE, numel)
    rank = round(size * count / numel)
    if count >= numel or rank < 8 or numel <= 2 * SAMPLE:
        index = largest(values, count)
        return index, torch.ones_like(index, dtype=torch.bool)
    stride = numel // size
    # Another offset each step: what lies between the places sampled is looked at in its turn.
    looked = values[(step * 7919) % stride :: stride][:size].abs()
    ordered = looked.sort(descending=True).values
    # Zeros are never worth a place, even where most of the sample is zero.
    floor = torch.finfo(values.dtype).tiny
    mask = _above(values, ordered[rank - 1].clamp(min=floor))
    passed = torch.count_nonzero(mask)
    if values.device.type in HOSTS:
        if not count / 2 <= int(passed) <= 2 * count:
            mask = _above(values, ordered[_moved(rank, count, passed, size)].clamp(min=floor))
    else:
        outside = (passed * 2 < count) | (passed > 2 * count)
        moved = torch.where(outside, _moved(rank, count, passed, size), rank - 1)
        mask = _above(values, ordered.gather(0, moved.view(1)).clamp(min=floor))
    places = torch.nonzero_static(mask, size=2 * count, fill_value=numel).view(-1)
    real = places < numel
    first = torch.where(real[:1], places[:1], 0)
    places = torch.where(real, places, first)
    sizes = torch.where(real, values[places].abs_(), -1.0)
    best = sizes.topk(count, sorted=False).indices
    return places[best], real[best]


def _above(values: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return (values >= threshold).logical_or_(values <= -threshold)


def _moved(rank: int, count: int, passed: torch.Tensor, size: int) -> torch.Tensor:
    """The rank in the sample that would have let `count` through, if what lies there is spread evenly."""
    return (rank * count / passed.clamp(min=1)).round().clamp(min=1, max=size).long() - 1


def shared_random(numel: int, count: int, *, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """`count` different places, the same on every rank and device, each as likely as any other.

    They are the first images of a random affine permutation: ranks whose devices differ in kind still agree.
    """
    chosen = random.Random(f"{seed}/{step}/{numel}")
    factor = chosen.randrange(1, numel) if numel > 1 else 1
    while math.gcd(factor, numel) != 1:
        factor = chosen.randrange(1, numel)
    start = chosen.randrange(numel)
    return torch.arange(count, device=device).mul_(factor).add_(start).remainder_(numel)
