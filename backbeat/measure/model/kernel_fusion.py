"""What a compiler makes of memory-bound operators: chains of them become one kernel each.

A chain is a run of operators over one iteration space with no matrix product, convolution or attention in between. It
reads each tensor from outside once and writes what its last operator makes. What its other operators make is written
only where an operator that is no part of any chain reads it later: a later chain computes it again from what it came
from, which takes as much reading. Operands of a product whose rows begin at odd addresses are padded first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backbeat.cost.operators import Product, Traffic, Work, element_bytes

_ALIGNED = 16
# Reductions across rows, sorting and scattering are kernels of their own.
_ALONE = ("sum_rows", "sum", "embedding_backward", "max_pool", "max_pool_backward", "avg_pool_backward")


class Fusion:
    """Collects operators into chains; `add` and `flush` return the work that is now complete."""

    def __init__(self) -> None:
        self._elements = 0
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._last: set[int] = set()
        self._unwritten: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, works: tuple[Work, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[Work, ...]:
        if len(works) != 1 or not isinstance(works[0], Traffic) or works[0].kind in _ALONE:
            written = sum(
                self._unwritten.pop(storage)[1] for storage in _by_storage(inputs) if storage in self._unwritten
            )
            return (*self.flush(), *([Traffic("pointwise", written)] if written else []), *_padded(works))
        done: tuple[Work, ...] = ()
        elements = max(tensor.numel() for tensor in (*inputs, *outputs))
        if self._made and elements != self._elements and not set(_by_storage(inputs)) <= set(self._made):
            done = self.flush()
        self._elements = max(self._elements, elements)
        for storage, tensor in _by_storage(inputs).items():
            if storage not in self._made:
                self._read[storage] = tensor.numel() * tensor.element_size()
        self._last = set()
        for storage, tensor in _by_storage(outputs).items():
            self._made[storage] = (StorageWeakRef(tensor.untyped_storage()), tensor.numel() * tensor.element_size())
            self._last.add(storage)
        return done

    def flush(self) -> tuple[Work, ...]:
        """The chain so far, as one kernel."""
        if not self._made:
            return ()
        moved = sum(self._read.values()) + sum(self._made[storage][1] for storage in self._last)
        kept = {storage: made for storage, made in (self._unwritten | self._made).items() if not made[0].expired()}
        self._unwritten = {storage: made for storage, made in kept.items() if storage not in self._last}
        self._elements, self._read, self._made, self._last = 0, {}, {}, set()
        return (Traffic("pointwise", moved),)


def _padded(works: tuple[Work, ...]) -> tuple[Work, ...]:
    """Products with aligned rows, and the copies that it takes."""
    found: list[Work] = []
    for work in works:
        if isinstance(work, Product) and work.alignment < _ALIGNED:
            each = element_bytes(work.precision)
            found.append(Traffic("strided", 2 * each * work.batch * (work.m * work.k + work.k * work.n), each))
            work = replace(work, alignment=_ALIGNED)
        found.append(work)
    return tuple(found)


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """By storage: a view is the tensor that it looks at."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
