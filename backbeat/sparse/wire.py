"""Places and values as bytes.

    up to 65,536 elements    | values | 16-bit places |
    more                     | 32-bit places | values |
    more, where it is less   | ends, one a block of 65,536 | values, by place | 16-bit places within the block |

Every part begins where its own format may begin, and a message is a whole number of 32-bit words.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from backbeat.sparse.select import made_once

_BLOCK = 2**16
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
    message, room = frame(form, index)
    room.copy_(values)
    return message


def frame(form: Format, index: torch.Tensor, message: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A message that holds these places, in order where the format has blocks, and the room in it for their values."""
    if message is None:
        message = torch.empty(form.bytes, dtype=torch.uint8, device=index.device)
    middle = form.head + form.count * form.dtype.itemsize
    if not form.short:
        message[: form.head].view(torch.int32).copy_(index)
    else:
        if form.blocks:
            ends = message[: form.head].view(torch.int32)
            torch.searchsorted(index, _borders(form.blocks, index.dtype, index.device), out_int32=True, out=ends)
        # The lower 16 bits: what is above them, the block says.
        message[middle : middle + 2 * form.count].view(torch.int16).copy_(index)
    return message, values_of(form, message)


def values_of(form: Format, message: torch.Tensor) -> torch.Tensor:
    """The room for values in a message."""
    return message[form.head : form.head + form.count * form.dtype.itemsize].view(form.dtype)


def unpack(form: Format, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (int64) and values (fp32) of messages, one a row."""
    rows = messages.view(-1, form.bytes)
    middle = form.head + form.count * form.dtype.itemsize
    values = rows[:, form.head : middle].view(form.dtype).float()
    if not form.short:
        return rows[:, : form.head].view(torch.int32).long(), values
    index = rows[:, middle : middle + 2 * form.count].view(torch.int16).long().bitwise_and_(_BLOCK - 1)
    if form.blocks:
        ends = rows[:, : form.head].view(torch.int32).contiguous()
        order = _ramp(form.count, messages.device).expand(len(rows), -1).contiguous()
        index.add_(torch.searchsorted(ends, order, right=True), alpha=_BLOCK)
    return index, values


@functools.cache  # and never dropped: recorded kernels read it
def _borders(blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The last may lie beyond what 32 bits hold, and so beyond every place.
    most = torch.iinfo(dtype).max
    return made_once(lambda: torch.arange(1, blocks + 1, device="cpu").mul_(_BLOCK).clamp_(max=most).to(dtype), device)


_ramps: dict[torch.device, list[torch.Tensor]] = {}
"""0, 1, 2, … up to the most places that any message had: the last serves all groups in every step. Shorter ones stay,
since recorded kernels read them."""


def _ramp(count: int, device: torch.device) -> torch.Tensor:
    found = _ramps.setdefault(device, [])
    if not found or len(found[-1]) < count:
        found.append(made_once(lambda: torch.arange(count, dtype=torch.int32, device="cpu"), device))
    return found[-1][:count]
