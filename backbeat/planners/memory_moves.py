"""Memory plans to try for a chain of blocks: every block treated alike, every plan there is, and those one change away.

A plan is a tuple of ranges (first block, block after the last, action): blocks kept or offloaded one by one, or a
segment recomputed together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from backbeat.simulate.actions import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange, BlockRanges
from backbeat.simulate.memory_timeline import Chain


def uniform(chain: Chain) -> dict[str, BlockRanges]:
    """Every block treated alike, where its position in the chain allows it."""
    policies = {"keep": one_by_one(chain, KEEP), "recompute": _each_recomputed(chain, RECOMPUTE)}
    if chain.has_host:
        policies["recompute, inputs offloaded"] = _each_recomputed(chain, FETCH)
        policies["offload"] = one_by_one(chain, OFFLOAD)
    return policies


def count(chain: Chain) -> int:
    """How many plans there are for the chain."""
    from_block = [1] * (chain.count + 1)
    for first in reversed(range(chain.count)):
        from_block[first] = sum(from_block[last] for _, last, _ in _ranges_from(chain, first))
    return from_block[0]


def every(chain: Chain, first: int = 0) -> Iterator[BlockRanges]:
    """All plans from block `first` on; only for chains that have few."""
    if first == chain.count:
        yield ()
        return
    for one in _ranges_from(chain, first):
        for rest in every(chain, one[1]):
            yield (one, *rest)


def _ranges_from(chain: Chain, first: int) -> Iterator[BlockRange]:
    """Every range that may begin with this block."""
    yield from ((first, first + 1, action) for action in chain.alone)
    last = first + 1
    while chain.may_begin[first]:
        yield from ((first, last, action) for action in chain.again)
        if last == chain.count or not chain.joined[last]:
            break
        last += 1


def one_by_one(chain: Chain, action: int) -> BlockRanges:
    return tuple((k, k + 1, action) for k in range(chain.count))


def _each_recomputed(chain: Chain, action: int) -> BlockRanges:
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


def changes(chain: Chain, ranges: BlockRanges) -> Iterator[BlockRanges]:
    """Every plan one change away, starting with the first blocks, whose tensors are largest."""
    for index in range(len(ranges)):
        for replaced, by in _at(chain, ranges, index):
            yield (*ranges[:index], *by, *ranges[index + replaced :])


def random_change(chain: Chain, ranges: BlockRanges, draw: random.Random) -> BlockRanges | None:
    """A plan one change away from a range drawn at random; None where that range allows no change."""
    index = draw.randrange(len(ranges))
    options = list(_at(chain, ranges, index))
    if not options:
        return None
    replaced, by = options[draw.randrange(len(options))]
    return (*ranges[:index], *by, *ranges[index + replaced :])


def _at(chain: Chain, ranges: BlockRanges, index: int) -> Iterator[tuple[int, BlockRanges]]:
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
