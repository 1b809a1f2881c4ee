"""Places and values as bytes, laid out as `backbeat.cost.message` says."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from backbeat.cost.message import BLOCK, block_ends, message_bytes, sent_elements
from backbeat.runtime.compressed.selection import made_once


@dataclass(frozen=True, slots=True)
class Format:
    """How `count` of `numel` elements travel."""

    numel: int
    count: int
    blocks: int
    """Blocks whose ends are sent; 0 where places are sent whole."""
    bytes: int

    @property
    def short(self) -> bool:
        """Places take 16 bits."""
        return self.numel <= BLOCK or self.blocks > 0

    @property
    def head(self) -> int:
        """Bytes before the values."""
        return 4 * self.blocks if self.short else 4 * self.count

    @property
    def middle(self) -> int:
        """Bytes up to the end of the values."""
        return self.head + 4 * self.count


@functools.cache
def format_of(numel: int, density: float) -> Format:
    """Of a group's message."""
    count, blocks = sent_elements(numel, density), block_ends(numel, density)
    return Format(numel, int(count), int(blocks), int(message_bytes(numel, density)))


def write_places(form: Format, index: torch.Tensor, message: torch.Tensor) -> None:
    """Write places, in order where the format has blocks, into a message."""
    if not form.short:
        message[: form.head].view(torch.int32).copy_(index)
        return
    if form.blocks:
        ends = message[: form.head].view(torch.int32)
        torch.searchsorted(index, _borders(form.blocks, index.dtype, index.device), out_int32=True, out=ends)
    # The lower 16 bits: what is above them, the block says.
    message[form.middle : form.middle + 2 * form.count].view(torch.int16).copy_(index)


def values_of(form: Format, message: torch.Tensor) -> torch.Tensor:
    """The room for values in a message."""
    return message[form.head : form.middle].view(torch.float32)


def unpack(form: Format, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (int64) and values of messages, one a row."""
    rows = messages.view(-1, form.bytes)
    values = rows[:, form.head : form.middle].view(torch.float32)
    if not form.short:
        return rows[:, : form.head].view(torch.int32).long(), values
    index = rows[:, form.middle : form.middle + 2 * form.count].view(torch.int16).long().bitwise_and_(BLOCK - 1)
    if form.blocks:
        ends = rows[:, : form.head].view(torch.int32).contiguous()
        order = _ramp(form.count, messages.device).expand(len(rows), -1).contiguous()
        index.add_(torch.searchsorted(ends, order, right=True), alpha=BLOCK)
    return index, values


@functools.cache  # and never dropped: recorded kernels read it
def _borders(blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The last may lie beyond what 32 bits hold, and so beyond every place.
    most = torch.iinfo(dtype).max
    return made_once(lambda: torch.arange(1, blocks + 1, device="cpu").mul_(BLOCK).clamp_(max=most).to(dtype), device)


_ramps: dict[torch.device, list[torch.Tensor]] = {}
"""0, 1, 2, … up to the most places that any message had: the last serves all groups in every step. Shorter ones stay,
since recorded kernels read them."""


def _ramp(count: int, device: torch.device) -> torch.Tensor:
    found = _ramps.setdefault(device, [])
    if not found or len(found[-1]) < count:
        found.append(made_once(lambda: torch.arange(count, dtype=torch.int32, device="cpu"), device))
    return found[-1][:count]
