"""Where the middle of a long pipeline step repeats itself.

After the first micro-batches every stage does the same again and again, later by the same time. How many micro-batches
one turn has depends on schedule and streams. Often it is one, so that a round of as many as there are stages repeats,
too. Transfers that take turns in a queue have turns of their own: of two micro-batches, say, which on three stages
repeat only after two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from backbeat.layouts.pipeline import Performed

_SAME = 1e-9
"""Of the time of a turn: what rounding may make of equal ones."""


class PipelineTurn(NamedTuple):
    """Micro-batches in the middle of a step, which repeat."""

    first: int
    size: int
    seconds: float
    """From one turn to the next."""


def turn_of(performed: Iterable[Performed], stages: int, count: int, *, by_rounds: bool) -> PipelineTurn | None:
    """The turn that a step of `count` micro-batches has settled into by its middle; None where it has not.

    `by_rounds`: interleaved steps take micro-batches by rounds, and whole rounds repeat.
    """
    starts: list[dict[int, float]] = [{} for _ in range(stages)]
    for each in performed:
        if each.operation.kind == "F" and each.operation.chunk == 0:
            starts[each.stage][each.operation.micro_batch] = each.start_s
    first = count // stages // 2 * stages
    # A round first: where it repeats, a step of any length ends as a short one does.
    step = stages if by_rounds else 1
    for size in (stages, *range(step, (count - first) // 2 + 1, step)):
        # The slowest stage sets the pace; others may still be ahead of it.
        seconds = max(own[first + size] - own[first] for own in starts)
        if all(
            math.isclose(own[micro + size] - own[micro], seconds, rel_tol=_SAME)
            for own in starts
            for micro in range(first, count - size)
        ):
            return PipelineTurn(first, size, seconds)
    return None
