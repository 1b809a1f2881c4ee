"""8 bits an element, with a scale for every 4,096 of them.

Every rank gathers every rank's bytes and adds them up, in fp32 and in the order of the ranks. Summing bytes on the wire
would need one scale for all ranks and sums of up to N·127, so wider integers: 32-bit ones save nothing. A gather
receives (N−1)·n bytes where an fp32 ring all-reduce moves 8·n·(N−1)/N: it is less for fewer than 8 ranks, equal at 8,
and beyond that this encoding does not pay.
"""

from __future__ import annotations

import torch

from backbeat.sparse.exchange import Collective, Exchange
from backbeat.sparse.residual import Residual

CHUNK = 4096
_MOST = 127.0


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, scales): the nearest of 255 even steps between ± the largest of each chunk."""
    rows = _rows(values.float())
    scales = torch.maximum(rows.amax(1), rows.amin(1).neg_()) / _MOST
    steps = rows / torch.where(scales > 0, scales, 1)[:, None]
    return steps.round_().clamp_(-_MOST, _MOST).to(torch.int8).view(-1)[: values.numel()], scales


def dequantise(steps: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = _rows(steps.float())
    return (rows * scales[:, None]).view(-1)[: steps.numel()]


def _rows(values: torch.Tensor) -> torch.Tensor:
    short = -values.numel() % CHUNK
    return (torch.nn.functional.pad(values, (0, short)) if short else values).view(-1, CHUNK)


class Int8:
    """Compressor of `kind="int8"`."""

    masks_velocity = False
    fault: torch.Tensor | None = None

    def __init__(self) -> None:
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def exchange(self, residual: Residual, *, step: int, scale: float, density: float | None = None) -> Exchange:
        steps, scales = quantise(residual.values)
        residual.values.sub_(dequantise(steps, scales))
        self._taken = (steps, scales)
        numel, head = steps.numel(), 4 * scales.numel()
        size = -(-(head + numel) // 4) * 4
        message = torch.zeros(size, dtype=torch.uint8, device=steps.device)
        message[:head].view(torch.float32).copy_(scales)
        message[head : head + numel].view(torch.int8).copy_(steps)
        gathered = yield Collective("all_gather", message)

        def write(out: torch.Tensor) -> None:
            out.zero_()
            for row in gathered.view(-1, size):
                theirs = row[head : head + numel].view(torch.int8)
                out.add_(dequantise(theirs, row[:head].view(torch.float32)), alpha=scale)

        return write

    def give_back(self, residual: Residual) -> None:
        if self._taken is not None:
            residual.values.add_(dequantise(*self._taken))
        self._taken = None

    def forget(self) -> None:
        self._taken = None
