"""Seconds over a grid of sizes, read off between its points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np


class Grid:
    """Seconds at every combination of sizes along a few axes.

    Between points the logarithm of the seconds is a straight line in the logarithms of the sizes, so that a power of
    a size stays what it is. Past the last point of an axis time grows as the size does: large operators have reached
    the efficiency they will reach. Before the first point it stays: small ones wait for latency. Where a smaller
    operator was measured slower than a larger one, it counts as quick as that: a library that has a better kernel for
    more work could have padded less.

    >>> grid = Grid([(1, 4)], [1.0, 2.0])
    >>> [round(grid.seconds(size), 3) for size in (0.5, 1, 2, 4, 8)]
    [1.0, 1.0, 1.414, 2.0, 4.0]
    """

    def __init__(self, axes: Sequence[Sequence[float]], seconds: Any, rising: bool = True) -> None:
        self._axes = [[math.log(size) for size in axis] for axis in axes]
        values = np.array(seconds, dtype=float).reshape([len(axis) for axis in axes])
        for axis in range(values.ndim) if rising else ():
            values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
        self._values = np.log(values)

    def seconds(self, *sizes: float) -> float:
        beyond = 0.0
        values: Any = self._values
        for axis, size in zip(self._axes, sizes, strict=True):
            log_size = math.log(max(size, 1e-9))
            if len(axis) == 1 or log_size <= axis[0]:
                values = values[0]
            elif log_size >= axis[-1]:
                values = values[-1]
            else:
                cell = bisect_right(axis, log_size) - 1
                share = (log_size - axis[cell]) / (axis[cell + 1] - axis[cell])
                values = values[cell] * (1 - share) + values[cell + 1] * share
            beyond += max(0.0, log_size - axis[-1])
        return math.exp(float(values) + beyond)
