"""Kernels as a compiler fuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backbeat.cost.operators import Product, Traffic, element_bytes
from backbeat.steps.eager_tape import Kernel, Operand

_ALONE = ("sum_rows", "sum", "embedding_backward")
_ALIGNED = 16


def fused(half: Sequence[Kernel], whole: Sequence[Kernel]) -> list[Kernel]:
    """Forward or backward as a compiler runs it: chains of memory-bound kernels are one kernel each.

    A chain is a run of kernels over one iteration space with no product or attention in between. It reads each operand
    from outside once and writes what its last kernel makes. What its others make is written only where a kernel that is
    no part of any chain reads it later: a later chain computes it again from what it came from.
    """
    chain = _FusedChain({one.owner: id(kernel) for kernel in whole for one in (*kernel.reads, *kernel.makes)})
    found: list[Kernel] = []
    for kernel in half:
        if kernel.work is not None:
            found += chain.add(kernel)
    return [*found, *chain.flush()]


class _FusedChain:
    def __init__(self, last: dict[Operand, int]) -> None:
        self.last = last
        """The kernel that reads each operand last."""
        self.done: set[int] = set()
        self.elements = 0.0
        self.read: dict[Operand, float] = {}
        self.made: dict[Operand, float] = {}
        self.latest: set[Operand] = set()
        self.unwritten: dict[Operand, float] = {}
        self.like: Kernel | None = None

    def add(self, kernel: Kernel) -> list[Kernel]:
        assert kernel.work is not None
        reads, makes = {one.owner: one.bytes for one in kernel.reads}, {one.owner: one.bytes for one in kernel.makes}
        if not isinstance(kernel.work, Traffic) or kernel.work.kind in _ALONE:
            written = sum(self.unwritten.pop(one) for one in reads if one in self.unwritten)
            done = self.flush()
            written += sum(self.unwritten.pop(one) for one in reads if one in self.unwritten)
            if written:
                done.append(kernel._replace(work=Traffic("pointwise", written), views=0))
            self.done.add(id(kernel))
            return [*done, *_aligned(kernel)]
        finished: list[Kernel] = []
        elements = max((one.elements for one in (*kernel.reads, *kernel.makes)), default=0.0)
        if self.made and elements != self.elements and not reads.keys() <= self.made.keys():
            finished = self.flush()
        self.elements = max(self.elements, elements)
        self.read |= {one: size for one, size in reads.items() if one not in self.made}
        self.made |= makes
        self.latest = set(makes)
        self.like = kernel
        self.done.add(id(kernel))
        return finished

    def flush(self) -> list[Kernel]:
        if not self.made or self.like is None:
            return []
        moved = sum(self.read.values()) + sum(self.made[one] for one in self.latest)
        kept = {one: size for one, size in (self.unwritten | self.made).items() if self.last[one] not in self.done}
        self.unwritten = {one: size for one, size in kept.items() if one not in self.latest}
        self.elements, self.read, self.made, self.latest = 0.0, {}, {}, set()
        return [self.like._replace(work=Traffic("pointwise", moved), views=0)]


def _aligned(kernel: Kernel) -> list[Kernel]:
    """Operands whose rows begin at odd addresses are padded first."""
    work = kernel.work
    if not isinstance(work, Product) or work.alignment >= _ALIGNED:
        return [kernel]
    each = element_bytes(work.precision)
    padding = Traffic("strided", 2 * each * work.batch * (work.m * work.k + work.k * work.n), int(each))
    return [kernel._replace(work=padding), kernel._replace(work=replace(work, alignment=_ALIGNED), views=0)]
