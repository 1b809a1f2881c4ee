"""Top-k: the places whose accumulated gradient is largest, gathered by every rank or merged in a tree."""

from __future__ import annotations

import torch

from backbeat.model.encoding import Encoding
from backbeat.sparse import select, wire
from backbeat.sparse.aggregate import add_gathered, keep_largest, member_of
from backbeat.sparse.exchange import Collective, Exchange
from backbeat.sparse.recordings import Recordings
from backbeat.sparse.residual import Residual


class _Taking:
    """Takes some places out of the residual, and can put them back."""

    masks_velocity = True
    fault: torch.Tensor | None = None
    _taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def give_back(self, residual: Residual) -> None:
        if self._taken is not None:
            residual.put(*self._taken)
        self._taken = None

    def forget(self) -> None:
        self._taken = None


class TopK(_Taking):
    """Compressor of `kind="topk"`."""

    def __init__(self, encoding: Encoding, *, rank: int, ranks: int, recordings: Recordings | None = None) -> None:
        self._encoding = encoding
        self._rank = rank
        self._ranks = ranks
        self._dtype = wire.DTYPES[encoding.values]
        self._recordings = recordings
        self._kept: tuple[wire.Format, torch.Tensor, torch.Tensor] | None = None
        self._again = recordings is not None and encoding.select == "exact" and not self._in_a_tree
        if self._again:
            self.fault = torch.empty(0)

    @property
    def _in_a_tree(self) -> bool:
        return self._encoding.aggregate == "tree" and self._ranks > 1

    def exchange(self, residual: Residual, *, step: int, scale: float, density: float | None = None) -> Exchange:
        numel = residual.values.numel()
        count = select.slots(density or self._encoding.density or 1.0, numel)
        form = wire.Format(numel, count, self._dtype)
        if self._in_a_tree:
            index, real = self._choose(residual, count, step)
            sent = _values_at(residual.values, index, real).to(self._dtype)
            residual.take(index, sent)
            self._taken = (index, sent)
            return (yield from self._tree(residual, form, index, sent, scale))
        if self._recordings is not None and self._again:
            message = self._encoded_again(self._recordings, residual, form)
        else:
            message = self._encoded(residual, form, step)
        gathered = yield Collective("all_gather", message)

        def write(out: torch.Tensor) -> None:
            def add() -> None:
                add_gathered(out, *wire.unpack(form, gathered), scale)

            if self._recordings is None:
                add()
            else:
                self._recordings.run(
                    ("write", *_addresses(gathered, out), gathered.numel(), out.dtype, form, scale), add
                )

        return write

    def _encoded(self, residual: Residual, form: wire.Format, step: int) -> torch.Tensor:
        index, real = self._choose(residual, form.count, step)
        if form.blocks:
            index, order = index.sort()
            real = None if real is None else real[order]
        message, sent = wire.frame(form, index)
        if real is None and self._dtype == residual.values.dtype:
            torch.index_select(residual.values, 0, index, out=sent)
        else:
            sent.copy_(_values_at(residual.values, index, real))
        residual.take(index, sent)
        self._taken = (index, sent)
        return message

    def _encoded_again(self, recordings: Recordings, residual: Residual, form: wire.Format) -> torch.Tensor:
        """The same, exactly selected, in memory that stays; one submission once it has been seen.

        What is not finite counts as larger than anything, so that some of it is among what was selected if there is
        any: looking at that little is enough.
        """
        values, velocity = residual.values, residual.velocity
        device = values.device
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
            wire.frame(form, short, message)
            index = short.long()
            held = values.index_select(0, index)
            bad = held.isfinite().logical_not_()
            torch.amax(torch.where(bad, short, -1), 0, keepdim=True, out=fault)
            sent.copy_(held.masked_fill_(bad, 0))
            residual.replace(index, held.sub_(sent), bad.logical_or_(sent != 0))

        where = _addresses(message, kept, fault, values, velocity)
        recordings.run(("encode", *where, values.dtype, residual.masked, form), encode)
        self._taken = (kept, sent)
        return message

    def _choose(self, residual: Residual, count: int, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places, and which of them are real (None: all)."""
        if self._encoding.select == "exact":
            return select.largest(residual.values, count), None
        return select.sampled(residual.values, count, step)

    def _tree(
        self, residual: Residual, form: wire.Format, index: torch.Tensor, sent: torch.Tensor, scale: float
    ) -> Exchange:
        """log2 N rounds. After round j the 2^(j+1) ranks of a subtree hold the same k places and sums.

        A merge drops up to k places of its subtree. Each rank of it that had sent something there takes its own part
        back into its residual, so that over all ranks nothing is lost; from then on it has no part in that place, even
        if another subtree brings it up again. From the second round on sums travel in fp32: what rounding them would
        lose belongs to no rank.
        """
        mine, alive = index, torch.ones_like(index, dtype=torch.bool)
        held = sent
        distance = 1
        while distance < self._ranks:
            peer = self._rank ^ distance
            packed = wire.pack(form, index, held)
            received = yield Collective("swap", packed, peer)
            # Both sides put the lower rank first, and so come to the same bits.
            pair = torch.stack([packed, received] if self._rank < peer else [received, packed])
            index, held = keep_largest(*wire.unpack(form, pair))
            still = member_of(mine, index)
            residual.put(mine, torch.where(alive & ~still, sent, 0))
            alive &= still
            self._taken = (mine, torch.where(alive, sent, 0))
            form = wire.Format(form.numel, form.count, torch.float32)
            distance *= 2
        final, total = index, held

        def write(out: torch.Tensor) -> None:
            add_gathered(out, final[None], total[None], scale)

        return write


class RandomK(_Taking):
    """Compressor of `kind="randomk"`: the same places on every rank, so that only values travel, and are summed."""

    def __init__(self, encoding: Encoding, *, seed: int) -> None:
        self._encoding = encoding
        self._seed = seed
        self._dtype = wire.DTYPES[encoding.values]

    def exchange(self, residual: Residual, *, step: int, scale: float, density: float | None = None) -> Exchange:
        values = residual.values
        count = select.slots(density or self._encoding.density or 1.0, values.numel())
        index = select.shared_random(values.numel(), count, seed=self._seed, step=step, device=values.device)
        sent = values[index].to(self._dtype)
        residual.take(index, sent)
        self._taken = (index, sent)
        # Scaled before the sum, as dense groups are; in the sum's own format, so that nothing more is rounded here
        # than any all-reduce rounds.
        summed = yield Collective("all_reduce", sent * scale)

        def write(out: torch.Tensor) -> None:
            out.zero_()
            out.index_copy_(0, index, summed.to(out.dtype))

        return write


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def _values_at(values: torch.Tensor, index: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    return values[index] if real is None else torch.where(real, values[index], 0)
