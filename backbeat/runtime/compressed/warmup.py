"""Density over the first steps: from a quarter down to the target, a quarter of the stage before each time (as DGC)."""

from __future__ import annotations

import math

FIRST = 0.25


def density_at(step: int, target: float, warmup_steps: int) -> float:
    """The density of a step, counted from 1.

    >>> [density_at(step, 0.01, 6) for step in (1, 2, 3, 4, 5, 6, 7)]
    [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01]
    """
    if step > warmup_steps or target >= FIRST:
        return target
    stages = max(1, math.ceil(math.log(FIRST / target, 4) - 1e-9))
    stage = (step - 1) * stages // warmup_steps
    return float(max(target, FIRST / 4**stage))
