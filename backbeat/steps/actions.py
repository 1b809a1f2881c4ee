"""What is done with each range of blocks: keep, recompute or offload. By number in searches, by name in plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from backbeat.errors import InputError
from backbeat.model import Profile
from backbeat.model.blocks import MemoryPlan, Segment

KEEP, RECOMPUTE, FETCH, OFFLOAD = range(4)
"""What is done with a range of blocks; FETCH is a recomputed one whose input waits on the host."""

BlockRange = tuple[int, int, int]
"""(first block, block after the last, action)."""
BlockRanges = tuple[BlockRange, ...]
"""What is done with a whole chain."""


def ranges_of(profile: Profile, memory_plan: MemoryPlan) -> list[BlockRange]:
    """The plan's segments as ranges; kept blocks become ranges of one block. Raises where the runtime could not run
    them."""
    index_of = {block.name: number for number, block in enumerate(profile.blocks)}
    ranges: list[BlockRange] = []
    reached = 0
    for index, segment in enumerate(memory_plan.segments):
        for name in segment.blocks:
            if name not in index_of:
                raise InputError(
                    f"memory.segments[{index}] names the block {name!r}, which the profile {profile.name!r} does not "
                    "have: make the plan for this profile with `backbeat plan --memory`"
                )
        first = index_of[segment.blocks[0]]
        last = first + len(segment.blocks)
        if [index_of[name] for name in segment.blocks] != list(range(first, last)) or first < reached:
            raise InputError(
                f"memory.segments[{index}] is not a run of consecutive blocks after those before it: "
                "list blocks and segments in the order of forward"
            )
        if segment.action == "recompute":
            _check_recomputed(profile, index, first, last)
        if profile.host_link is None and (segment.action == "offload" or segment.input == "offload"):
            raise InputError(
                f"memory.segments[{index}] offloads, but the profile {profile.name!r} has no host_link: "
                "profile it again on the device with `backbeat profile`"
            )
        ranges += [(k, k + 1, KEEP) for k in range(reached, first)]
        if segment.action == "keep":
            ranges += [(k, k + 1, KEEP) for k in range(first, last)]
        elif segment.action == "offload":
            ranges.append((first, last, OFFLOAD))
        else:
            ranges.append((first, last, FETCH if segment.input == "offload" else RECOMPUTE))
        reached = last
    ranges += [(k, k + 1, KEEP) for k in range(reached, len(profile.blocks))]
    return ranges


def segments_of(profile: Profile, ranges: Sequence[BlockRange]) -> tuple[Segment, ...]:
    """Ranges as segments by name; neighbours that are kept become one."""
    segments: list[Segment] = []
    names = tuple(block.name for block in profile.blocks)
    for kept, neighbours in groupby(ranges, key=lambda one: one[2] == KEEP):
        run = list(neighbours)
        if kept:
            segments.append(Segment(blocks=names[run[0][0] : run[-1][1]], action="keep"))
            continue
        segments += (
            Segment(
                blocks=names[first:last],
                action="offload" if what == OFFLOAD else "recompute",
                input="offload" if what == FETCH else "keep",
            )
            for first, last, what in run
        )
    return tuple(segments)


def _check_recomputed(profile: Profile, index: int, first: int, last: int) -> None:
    blocks = profile.blocks
    if blocks[first].changes_input:
        raise InputError(
            f"memory.segments[{index}] begins with {blocks[first].name!r}, which writes into its input: "
            "no recomputed segment can begin there; begin it one block earlier or keep the block"
        )
    for block in blocks[first + 1 : last]:
        if not block.chained:
            raise InputError(
                f"memory.segments[{index}] recomputes through {block.name!r}, whose input is not the output of the "
                "block before it: begin a segment there"
            )
