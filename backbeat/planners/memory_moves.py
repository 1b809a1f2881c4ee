"""Memory plans to try for a chain of blocks: every block treated alike, every plan there is, those one change away, and
the least added time within a budget.

A plan is a tuple of ranges (first block, block after the last, action): blocks kept or offloaded one by one, or a
segment recomputed together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange, BlockRanges
from backbeat.steps.memory_timeline import BlockChain
from backbeat.steps.schedule import running_sums

_FRONT = 128
"""Pairs kept for each block by `Segmenter`; a longer front is thinned."""


def uniform(chain: BlockChain) -> dict[str, BlockRanges]:
    """Every block treated alike, where its position in the chain allows it."""
    policies = {"keep": one_by_one(chain, KEEP), "recompute": _each_recomputed(chain, RECOMPUTE)}
    if chain.has_host:
        policies["recompute, inputs offloaded"] = _each_recomputed(chain, FETCH)
        policies["offload"] = one_by_one(chain, OFFLOAD)
    return policies


def count(chain: BlockChain) -> int:
    """How many plans there are for the chain."""
    from_block = [1] * (chain.count + 1)
    for first in reversed(range(chain.count)):
        from_block[first] = sum(from_block[last] for _, last, _ in _ranges_from(chain, first))
    return from_block[0]


def every(chain: BlockChain, first: int = 0) -> Iterator[BlockRanges]:
    """All plans from block `first` on; only for chains that have few."""
    if first == chain.count:
        yield ()
        return
    for one in _ranges_from(chain, first):
        for rest in every(chain, one[1]):
            yield (one, *rest)


def _ranges_from(chain: BlockChain, first: int) -> Iterator[BlockRange]:
    """Every range that may begin with this block."""
    yield from ((first, first + 1, action) for action in chain.alone)
    last = first + 1
    while chain.may_begin[first]:
        yield from ((first, last, action) for action in chain.again)
        if last == chain.count or not chain.joined[last]:
            break
        last += 1


def one_by_one(chain: BlockChain, action: int) -> BlockRanges:
    return tuple((k, k + 1, action) for k in range(chain.count))


def _each_recomputed(chain: BlockChain, action: int) -> BlockRanges:
    """Every block a segment of its own. A block that cannot begin a segment joins the one before it, or is kept."""
    ranges: list[BlockRange] = []
    for k in range(chain.count):
        if chain.may_begin[k]:
            ranges.append((k, k + 1, action))
        elif ranges and chain.joined[k] and ranges[-1][2] != KEEP:
            ranges[-1] = (ranges[-1][0], k + 1, action)
        else:
            ranges.append((k, k + 1, KEEP))
    return tuple(ranges)


def changes(chain: BlockChain, ranges: BlockRanges) -> Iterator[BlockRanges]:
    """Every plan one change away, starting with the first blocks, whose tensors are largest."""
    for index in range(len(ranges)):
        for replaced, by in _at(chain, ranges, index):
            yield (*ranges[:index], *by, *ranges[index + replaced :])


def random_change(chain: BlockChain, ranges: BlockRanges, draw: random.Random) -> BlockRanges | None:
    """A plan one change away from a range drawn at random; None where that range allows no change."""
    index = draw.randrange(len(ranges))
    options = list(_at(chain, ranges, index))
    if not options:
        return None
    replaced, by = options[draw.randrange(len(options))]
    return (*ranges[:index], *by, *ranges[index + replaced :])


def _at(chain: BlockChain, ranges: BlockRanges, index: int) -> Iterator[tuple[int, BlockRanges]]:
    """(how many ranges from `index` on are replaced, by which)."""
    first, last, what = ranges[index]
    again, begins = chain.again, chain.may_begin[first]
    if last - first == 1:
        for action in (KEEP, *(again if begins else ()), *((OFFLOAD,) if chain.has_host else ())):
            if action != what:
                yield 1, ((first, last, action),)
    elif what in again:
        for action in again:
            if action != what:
                yield 1, ((first, last, action),)
        yield 1, tuple((k, k + 1, KEEP) for k in range(first, last))
        for middle in dict.fromkeys((first + 1, (first + last) // 2, last - 1)):
            if chain.may_begin[middle]:
                for action in again:
                    yield 1, ((first, middle, what), (middle, last, action))
            if middle == last - 1:
                yield 1, ((first, middle, what), (middle, last, KEEP))
            if middle == first + 1 and chain.may_begin[middle]:
                yield 1, ((first, middle, KEEP), (middle, last, what))
    if index + 1 == len(ranges):
        return
    _, beyond, other = ranges[index + 1]
    # The two become one, or the boundary between them moves.
    if chain.joined[last] and begins:
        if (what in again or other in again) and all(chain.joined[first + 1 : beyond]):
            for action in again:
                yield 2, ((first, beyond, action),)
        if what in again and other in again:
            for moved in (last - 1, last + 1):
                if first < moved < beyond and chain.may_begin[moved]:
                    yield 2, ((first, moved, what), (moved, beyond, other))
    # The two swap actions, so that a kept block can move along the chain.
    may_swap = (what not in again or chain.may_begin[last]) and (other not in again or begins)
    if other != what and beyond - first == 2 and may_swap:
        yield 2, ((first, last, other), (last, beyond, what))


class _Front(NamedTuple):
    """Pairs for the blocks up to one, and the range that led to each."""

    held: NDArray[np.float64]
    seconds: NDArray[np.float64]
    start: NDArray[np.intp]
    """First block of the range that led here."""
    action: NDArray[np.intp]
    parent: NDArray[np.intp]
    """Its index in the front of `start`."""


class Segmenter:
    """The least added time within a budget, by a programme over one chain.

    Blocks are taken in the order of forward. All that later ranges need to know of earlier ones is how many bytes these
    hold for backward. A range fits if what is held before it, its own bytes, and the most that its backward needs stay
    within the budget together. So for every block k there is a Pareto front of (bytes held, seconds added) pairs:

        front[k] = undominated  { (held + own, seconds + added) : (held, seconds) in front[i], range i..k fits }

    for ranges that are kept (own: saved tensors, nothing added), recomputed (own: their input; added: their forward) or
    offloaded (own: nothing; added: a price per byte copied). Copies of different ranges compete for the link to the
    host, which a front cannot represent. The price stands for that: several are tried, and the simulation decides.
    """

    def __init__(self, chain: BlockChain) -> None:
        self.chain = chain
        self.needs = [recompute_needs(chain, first) for first in range(chain.count)]
        self.forward_sums = running_sums(chain.forward)

    def least_time(self, room: float, price_s_per_byte: float, ahead: float) -> list[BlockRange] | None:
        """Ranges that hold no more than `room` bytes at any moment and add the least time; None where none fit.

        `ahead` says how many further tensors of the same size are assumed to be on their way back from the host.
        """
        chain = self.chain
        fronts = [_Front(np.zeros(1), np.zeros(1), *(np.zeros(1, dtype=np.intp) for _ in range(3)))]
        for k in range(1, chain.count + 1):
            fronts.append(self._extend(fronts, k, room, price_s_per_byte, ahead))
        last = fronts[-1]
        fits = np.flatnonzero(last.held + chain.loss <= room)
        if not fits.size:
            return None
        index = int(fits[np.argmin(last.seconds[fits])])
        ranges: list[BlockRange] = []
        k = chain.count
        while k > 0:
            front = fronts[k]
            start, action, index = int(front.start[index]), int(front.action[index]), int(front.parent[index])
            ranges.append((start, k, action))
            k = start
        return ranges[::-1]

    def _extend(self, fronts: list[_Front], k: int, room: float, price: float, ahead: float) -> _Front:
        chain = self.chain
        parts: list[_Front] = []

        def offer(first: int, own: float, need: float, seconds: float, action: int) -> None:
            front = fronts[first]
            if own + need > room:
                return
            fits = np.flatnonzero(front.held <= room - own - need)
            if fits.size:
                starts, actions = np.full((2, len(fits)), [[first], [action]], dtype=np.intp)
                parts.append(_Front(front.held[fits] + own, front.seconds[fits] + seconds, starts, actions, fits))

        block = k - 1
        entering = chain.input[block] if chain.saves_input[block] else 0
        next_keeps = k < chain.count and chain.joined[k] and chain.saves_input[k]
        leaving = chain.output[block] if chain.saves_output[block] and not next_keeps else 0
        kept = chain.saved[block] + entering + leaving
        own_backward = chain.output[block] + chain.backward_peak[block]
        offer(block, kept, own_backward, 0.0, KEEP)
        if chain.has_host:
            offer(block, 0, kept * (1 + ahead) + own_backward, price * kept, OFFLOAD)
        for first in range(block, -1, -1):
            if first < block and not chain.joined[first + 1]:
                break
            if not chain.may_begin[first]:
                continue
            need = self.needs[first][block - first]
            seconds = float(self.forward_sums[k] - self.forward_sums[first])
            size = chain.input[first]
            offer(first, size, need, seconds, RECOMPUTE)
            if chain.has_host and size:
                offer(first, 0, need + size * (1 + ahead), seconds + price * size, FETCH)
        return _undominated(parts)


def recompute_needs(chain: BlockChain, first: int, *, gives_up_input: bool = False) -> list[int]:
    """The most that a recomputed segment from `first` needs beyond its input, for every block it may end with.
    `gives_up_input`: where its first block does not save it, the input goes once it has been read."""
    needs: list[int] = []
    # After recomputing: saved tensors and what lies between the blocks; `highest` while doing so.
    level = highest = 0
    for last in range(first, chain.count):
        if last > first and not chain.joined[last]:
            break
        highest = max(highest, level + chain.forward_peak[last])
        level += chain.saved[last] + chain.output[last]
        goes = not chain.saves_output[last - 1] if last > first else gives_up_input
        if goes and not chain.saves_input[last]:
            level -= chain.input[last]
        there = level if chain.saves_output[last] else level - chain.output[last]
        most = highest + chain.output[last]
        for k in range(last, first - 1, -1):
            most = max(most, there + chain.output[k] + chain.backward_peak[k])
            there -= chain.saved[k]
            if chain.saves_output[k]:
                there -= chain.output[k]
            if k > first and chain.saves_input[k] and not chain.saves_output[k - 1]:
                there -= chain.input[k]
        needs.append(most)
    return needs


def _undominated(parts: list[_Front]) -> _Front:
    if not parts:
        return _Front(np.zeros(0), np.zeros(0), *(np.zeros(0, dtype=np.intp) for _ in range(3)))
    pairs = _Front(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    order = np.lexsort((pairs.seconds, pairs.held))
    seconds = pairs.seconds[order]
    better = np.ones(len(order), dtype=bool)
    better[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1]
    chosen = order[better]
    if len(chosen) > _FRONT:
        chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, _FRONT).round().astype(np.intp))]
    columns: list[Any] = [column[chosen] for column in pairs]
    return _Front(*columns)
