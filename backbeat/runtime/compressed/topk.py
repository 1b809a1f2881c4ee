"""Top-k: the places whose accumulated gradient is largest, gathered by every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from backbeat.runtime.compressed import message_bytes as wire
from backbeat.runtime.compressed import selection as select
from backbeat.runtime.compressed.cuda_graphs import Recordings
from backbeat.runtime.compressed.residual import Residual


class TopK:
    """One group's compression. Its message stays where it is from step to step, so that kernels can be recorded.

    `recordings`: those of the stream that all its work is done on; None on a host.
    """

    def __init__(self, density: float, recordings: Recordings | None = None) -> None:
        self.density = density
        self.fault: torch.Tensor | None = None
        """A place of the residual that was not finite in the last message, or -1. Nothing that is not finite leaves;
        what does not leave may be so still."""
        self._recordings = recordings
        self._kept: tuple[wire.Format, torch.Tensor, torch.Tensor] | None = None
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def encode(self, residual: Residual, density: float | None = None) -> torch.Tensor:
        """Take what is sent out of the residual, as a message that every rank gathers. `density` replaces the group's
        own while warming up.

        What is not finite counts as larger than anything, so that some of it is among what was selected if there is
        any: looking at that little is enough.
        """
        values = residual.values
        device = values.device
        form = wire.format_of(values.numel(), density or self.density)
        places = torch.int32 if form.numel < 2**31 else torch.int64
        if self._kept is None or self._kept[0] != form:
            message = torch.empty(form.bytes, dtype=torch.uint8, device=device)
            self._kept = (form, message, torch.empty(form.count, dtype=places, device=device))
            self.fault = torch.empty(1, dtype=places, device=device)
        _, message, kept = self._kept
        fault, sent = self.fault, wire.values_of(form, message)
        assert fault is not None

        def encode() -> None:
            short = select.largest(values, form.count).to(places)
            if form.blocks:
                # Half the passes that 64 bits take.
                short = short.sort().values
            kept.copy_(short)
            wire.write_places(form, short, message)
            index = short.long()
            held = values.index_select(0, index)
            bad = held.isfinite().logical_not_()
            torch.amax(torch.where(bad, short, -1), 0, keepdim=True, out=fault)
            sent.copy_(held.masked_fill_(bad, 0))
            residual.replace(index, held.sub_(sent), bad.logical_or_(sent != 0))

        where = _addresses(message, kept, fault, values, residual.velocity)
        self._run(("encode", *where, values.dtype, residual.masked, form), encode)
        self._taken = (kept, sent)
        return message

    def decode(self, gathered: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Write the mean of everybody's last messages, whatever was in `out` before. `scale` is one over the number of
        ranks."""
        assert self._kept is not None
        form = self._kept[0]

        def add() -> None:
            add_gathered(out, *wire.unpack(form, gathered), scale)

        self._run(("decode", *_addresses(gathered, out), gathered.numel(), out.dtype, form, scale), add)

    def give_back(self, residual: Residual) -> None:
        """Put what the last message took back, once: its step came to nothing."""
        if self._taken is not None:
            residual.put(*self._taken)
        self._taken = None

    def forget(self) -> None:
        """What the last message took will not be wanted back."""
        self._taken = None

    def _run(self, key: Hashable, function: Callable[[], None]) -> None:
        if self._recordings is None:
            function()
        else:
            self._recordings.run(key, function)


def add_gathered(out: torch.Tensor, index: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """The mean of one row a rank, dense.

    Rank by rank, since within one row no two values meet at a place: the order of the additions, and so every bit of
    the result, is the same on all ranks. One addition of all rows at once would leave it to the GPU's scheduling.
    """
    out.zero_()
    for places, row in zip(index, values.to(out.dtype), strict=True):
        out.index_add_(0, places, row, alpha=scale)


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
