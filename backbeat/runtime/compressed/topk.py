"""Top-k compression: every rank sends the k elements of its residual that are largest in magnitude, as a message of
their indices and values.

Sizes are fixed and the host reads nothing back, so a GPU never waits for the host.

Note on the selection. It is exact, and cheap: cut the tensor into blocks, and the k largest elements lie in the k
blocks with the largest maxima. Blocks of B elements leave n/B maxima and k·B candidates to search, least in all for
B = √(n/k). Blocks are strided (element i is in block i mod n/B), so that one linear pass finds the maxima.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from backbeat.cost.message import BLOCK, block_ends, block_width, message_bytes, sent_elements
from backbeat.runtime.compressed.cuda_graphs import CudaGraphs

HOSTS = {"cpu"}
"""Device types that the host reads without waiting."""
_SEARCHED_WHOLE = 4096
"""Below this many elements, blocks cost more than they save."""
_width = functools.cache(block_width)


class TopK:
    """Compresses one bucket. Its message keeps its address from step to step, so that CUDA graphs can be replayed.

    `graphs`: the graphs of the stream that does all its work; None on a host.
    """

    def __init__(self, density: float, graphs: CudaGraphs | None = None) -> None:
        self.density = density
        self.fault: torch.Tensor | None = None
        """The index of a selected element that was not finite, or -1. Such an element is never sent; one that was not
        selected may still be in the residual."""
        self._graphs = graphs
        self._buffers: tuple[MessageFormat, torch.Tensor, torch.Tensor] | None = None
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None
        """Indices and values of the last message, until its step has succeeded."""

    def encode(self, values: torch.Tensor, density: float | None = None) -> torch.Tensor:
        """Move the largest of the residual's values into a message, which every rank gathers. `density` replaces the
        bucket's own during warm-up.

        NaN and infinity count as larger than any number. If the residual has any, some are among those selected, so
        that only these few need a check.
        """
        form, message, indices, fault = self._buffers_for(values, density or self.density)
        sent = form.values(message)

        def encode() -> None:
            chosen = largest(values, form.count).to(indices.dtype)
            if form.blocks:
                # Sorting 32 bits takes half the passes that 64 bits take.
                chosen = chosen.sort().values
            indices.copy_(chosen)
            form.write_indices(chosen, message)
            index = chosen.long()
            held = values.index_select(0, index)
            bad = held.isfinite().logical_not_()
            torch.amax(torch.where(bad, chosen, -1), 0, keepdim=True, out=fault)
            sent.copy_(held.masked_fill_(bad, 0))
            values.index_copy_(0, index, held.sub_(sent))

        self._run(("encode", *_addresses(message, indices, fault, values), values.dtype, form), encode)
        self._sent = (indices, sent)
        return message

    def decode(self, gathered: torch.Tensor, out: torch.Tensor, scale: float, *, settled: bool = False) -> None:
        """Overwrite `out` with the mean of all ranks' last messages. `scale` is one over the number of ranks.
        `settled`: the message will not be given back."""
        assert self._buffers is not None
        if settled:
            self._sent = None
        form = self._buffers[0]

        def add() -> None:
            add_gathered(out, *form.unpack(gathered), scale)

        self._run(("decode", *_addresses(gathered, out), gathered.numel(), out.dtype, form, scale), add)

    def give_back(self, residual: torch.Tensor) -> None:
        """Return the last message to the residual, once: its step failed."""
        if self._sent is not None:
            indices, values = self._sent
            residual.index_add_(0, indices, values.to(residual.dtype))
        self._sent = None

    def _buffers_for(
        self, values: torch.Tensor, density: float
    ) -> tuple[MessageFormat, torch.Tensor, torch.Tensor, torch.Tensor]:
        form = format_of(values.numel(), density)
        if self._buffers is None or self._buffers[0] != form:
            dtype = torch.int32 if form.numel < 2**31 else torch.int64
            message = torch.empty(form.bytes, dtype=torch.uint8, device=values.device)
            self._buffers = (form, message, torch.empty(form.count, dtype=dtype, device=values.device))
            self.fault = torch.empty(1, dtype=dtype, device=values.device)
        assert self.fault is not None
        return (*self._buffers, self.fault)

    def _run(self, key: Hashable, function: Callable[[], None]) -> None:
        if self._graphs is None:
            function()
        else:
            self._graphs.run(key, function)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` elements largest in magnitude, in no order."""
    numel = values.numel()
    if count >= numel:
        return torch.arange(numel, device=values.device)
    width = _width(numel, count)
    if width < 4 or numel < _SEARCHED_WHOLE:
        return values.abs().topk(count, sorted=False).indices
    blocks = numel // width
    chosen = _block_maxima(values[: blocks * width].view(width, blocks)).topk(count, sorted=False).indices
    candidates = (_arange(0, blocks * width, blocks, values.device).view(-1, 1) + chosen).view(-1)
    if blocks * width < numel:
        candidates = torch.cat([candidates, _arange(blocks * width, numel, 1, values.device)])
    best = values[candidates].abs_().topk(count, sorted=False).indices
    return candidates[best]


def add_gathered(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Write the dense mean of all ranks' rows into `out`.

    Rank by rank: the indices of one row are distinct, so the order of additions, and every bit of the result, is the
    same on all ranks. One addition of all rows would leave the order to the GPU's scheduling.
    """
    out.zero_()
    for row_indices, row in zip(indices, values.to(out.dtype), strict=True):
        out.index_add_(0, row_indices, row, alpha=scale)


def _block_maxima(folded: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each column."""
    if folded.device.type in HOSTS:
        # Four passes, in a fifth of the time that the norm takes on a CPU.
        return torch.maximum(folded.amax(0), folded.amin(0).neg_())
    found: torch.Tensor = torch.linalg.vector_norm(folded, math.inf, 0)
    return found


@functools.cache
def _arange(start: int, end: int, step: int, device: torch.device) -> torch.Tensor:
    return constant(lambda: torch.arange(start, end, step, device="cpu"), device)


def _addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


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
