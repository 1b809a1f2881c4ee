"""The bytes of a compressed bucket's message: where the indices of its elements lie, and their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backbeat.cost.message import BLOCK, block_ends, message_bytes, sent_elements


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The message that carries `count` of a bucket's `numel` elements."""

    numel: int
    count: int
    blocks: int
    """Blocks whose ends the message holds; 0 where it holds whole indices."""
    bytes: int

    @property
    def _short(self) -> bool:
        """Indices take 16 bits."""
        return self.numel <= BLOCK or self.blocks > 0

    @property
    def _values_start(self) -> int:
        return 4 * self.blocks if self._short else 4 * self.count

    @property
    def _values_end(self) -> int:
        return self._values_start + 4 * self.count

    @property
    def _short_indices(self) -> slice:
        return slice(self._values_end, self._values_end + 2 * self.count)

    def write_indices(self, indices: torch.Tensor, message: torch.Tensor) -> None:
        """Write the indices into a message; sorted, where the format has blocks."""
        head = message[: self._values_start].view(torch.int32)
        if not self._short:
            head.copy_(indices)
            return
        if self.blocks:
            bounds = _block_bounds(self.blocks, indices.dtype, indices.device)
            torch.searchsorted(indices, bounds, out_int32=True, out=head)
        # The cast keeps the lower 16 bits; the block gives the upper ones.
        message[self._short_indices].view(torch.int16).copy_(indices)

    def values(self, message: torch.Tensor) -> torch.Tensor:
        """A view of the values in a message."""
        return message[self._values_start : self._values_end].view(torch.float32)

    def unpack(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int64) and values of several messages, one per row."""
        rows = messages.view(-1, self.bytes)
        values = rows[:, self._values_start : self._values_end].view(torch.float32)
        head = rows[:, : self._values_start].view(torch.int32)
        if not self._short:
            return head.long(), values
        indices = rows[:, self._short_indices].view(torch.int16).long().bitwise_and_(BLOCK - 1)
        if self.blocks:
            order = _counting(self.count, messages.device).expand(len(rows), -1).contiguous()
            indices.add_(torch.searchsorted(head.contiguous(), order, right=True), alpha=BLOCK)
        return indices, values


@functools.cache
def format_of(numel: int, density: float) -> MessageFormat:
    """The format for a bucket of `numel` elements."""
    count, blocks = sent_elements(numel, density), block_ends(numel, density)
    return MessageFormat(numel, int(count), int(blocks), int(message_bytes(numel, density)))


def constant(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor that any stream may read at once: the copy from the host blocks until it is done.

    Callers cache it for good, because captured CUDA graphs hold its address.
    """
    with torch.inference_mode(False):
        return make().to(device)


@functools.cache
def _block_bounds(blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The last bound may exceed 32 bits; clamped, it is still no less than any index.
    most = torch.iinfo(dtype).max
    return constant(lambda: torch.arange(1, blocks + 1, device="cpu").mul_(BLOCK).clamp_(max=most).to(dtype), device)


_counts: dict[torch.device, list[torch.Tensor]] = {}
"""0, 1, 2, … per device. The longest serves all buckets; graphs captured earlier still read the shorter ones."""


def _counting(count: int, device: torch.device) -> torch.Tensor:
    found = _counts.setdefault(device, [])
    if not found or len(found[-1]) < count:
        found.append(constant(lambda: torch.arange(count, dtype=torch.int32, device="cpu"), device))
    return found[-1][:count]
