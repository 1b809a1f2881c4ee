"""Places and values as bytes.

    up to 65,536 elements    | values | 16-bit places |
    more                     | 32-bit places | values |
    more, where it is less   | ends, one a block of 65,536 | values, by place | 16-bit places within the block |

Every part begins where its own format may begin, and a message is a whole number of 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 2**16
_HALF = 2**15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Format:
    """How `count` of `numel` elements travel."""

    numel: int
    count: int
    dtype: torch.dtype

    @property
    def blocks(self) -> int:
        """Blocks whose ends are sent; 0 where places are sent whole."""
        found = -(-self.numel // _BLOCK)
        return found if found > 1 and 4 * found + 2 * self.count < 4 * self.count else 0

    @property
    def short(self) -> bool:
        """Places take 16 bits."""
        return self.numel <= _BLOCK or self.blocks > 0

    @property
    def head(self) -> int:
        """Bytes before the values."""
        return 4 * self.blocks if self.short else 4 * self.count

    @property
    def bytes(self) -> int:
        size = self.head + self.count * (self.dtype.itemsize + (2 if self.short else 0))
        return -(-size // 4) * 4


def pack(form: Format, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One message; the order of the elements may change."""
    if form.blocks:
        index, order = index.sort()
        values = values[order]
    out = torch.empty(form.bytes, dtype=torch.uint8, device=index.device)
    middle = form.head + form.count * form.dtype.itemsize
    out[form.head : middle].view(form.dtype).copy_(values)
    if not form.short:
        out[: form.head].view(torch.int32).copy_(index)
        return out
    if form.blocks:
        borders = torch.arange(1, form.blocks + 1, device=index.device).mul_(_BLOCK)
        out[: form.head].view(torch.int32).copy_(torch.searchsorted(index, borders))
        index = index.remainder(_BLOCK)
    out[middle : middle + 2 * form.count].view(torch.int16).copy_(index - _HALF)
    return out


def unpack(form: Format, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (int64) and values (fp32) of messages, one a row."""
    rows = messages.view(-1, form.bytes)
    middle = form.head + form.count * form.dtype.itemsize
    values = rows[:, form.head : middle].view(form.dtype).float()
    if not form.short:
        return rows[:, : form.head].view(torch.int32).long(), values
    index = rows[:, middle : middle + 2 * form.count].view(torch.int16).long().add_(_HALF)
    if form.blocks:
        ends = rows[:, : form.head].view(torch.int32).contiguous()
        order = torch.arange(form.count, dtype=torch.int32, device=messages.device).expand(len(rows), -1).contiguous()
        index.add_(torch.searchsorted(ends, order, right=True), alpha=_BLOCK)
    return index, values
