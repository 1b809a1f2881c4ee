"""A cluster whose cost is known, for tests of what calibration makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from backbeat.measure.network.case import Case


class Cluster:
    """A cluster with a known cost and a clock of its own; many ranks would see the same numbers as this one."""

    def __init__(self, cost: Callable[[Case], float], noise: float = 0.0, seed: int = 0) -> None:
        self.cost = cost
        self.noise = noise
        self.now = 0.0
        self.taken: list[Case] = []
        self._draw = random.Random(seed)

    def sample(self, case: Case) -> float:
        seconds = self.cost(case) * (1 + self.noise * abs(self._draw.gauss(0, 1)))
        self.now += seconds
        self.taken.append(case)
        return seconds

    def largest_over_ranks(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def elapsed(self) -> float:
        return self.now
