"""Waiting for the slowest of N workers.

Each worker's compute time is a draw from the profile's own iteration times; a synchronous step takes the largest of N
draws. The largest of N draws from 30 samples stops growing at 30. So above the 80th percentile a generalised Pareto
tail, fitted by L-moments, replaces the samples. Few samples pull its shape towards the exponential (shape 0): six
exceedances cannot tell a bounded tail from a heavy one. Where the largest sample comes up again and again, iterations
take one of a few times, and nothing is taken to lie beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_TAIL_SHARE = 0.2
_SHAPE_PRIOR_SAMPLES = 30
"""Exceedances needed before the fitted shape counts for half."""
_SHAPE_LIMIT = 0.4
"""Heavier tails than this have means too wild to predict from a few hundred samples."""
_OFTEN = 3
"""Samples that equal the largest, from which on it is a limit."""
LEAST_SAMPLES = 5
"""Below this a spread cannot be told from a fluke: no stragglers are predicted."""


@dataclass(frozen=True, slots=True)
class Straggling:
    """What the slowest of N workers adds to an iteration, and how much that varies from step to step."""

    wait_s: float
    """Mean of the largest of N draws, less the mean of one."""
    p10_s: float
    """10th percentile of the largest of N draws, less the mean of one; may be negative for few workers."""
    p90_s: float
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """The distribution of one worker's iteration time: samples below the threshold, a fitted tail above."""

    levels: NDArray[np.float64]
    """Rising probabilities of `samples`, the last being the threshold's."""
    samples: NDArray[np.float64]
    tail_share: float
    scale_s: float
    shape: float
    count: int
    limit_s: float
    """No iteration takes longer."""

    @classmethod
    def fit(cls, iteration_s: Sequence[float]) -> ComputeTimes | None:
        """None where there are too few samples, or no spread in them."""
        samples = np.sort(np.asarray(iteration_s, dtype=np.float64))
        count = len(samples)
        if count < LEAST_SAMPLES or samples[-1] <= samples[0]:
            return None
        tail = max(round(_TAIL_SHARE * count), 2)
        body = count - tail
        threshold = float((samples[body - 1] + samples[body]) / 2)
        scale, shape = _pareto(samples[body:] - threshold)
        # Sample i of n stands for probabilities (i, i+1)/n; its middle is where the quantile curve passes through it.
        levels = np.append((np.arange(body) + 0.5) / count, body / count)
        often = np.count_nonzero(samples == samples[-1]) >= _OFTEN
        limit = float(samples[-1]) if often else math.inf
        return cls(levels, np.append(samples[:body], threshold), tail / count, scale, shape, count, limit)

    def quantile(self, exceedance: NDArray[np.float64]) -> NDArray[np.float64]:
        """The time that is exceeded with these probabilities. Small ones are given as such: 1 - p would lose them."""
        body = np.interp(1 - exceedance, self.levels, self.samples)
        share = np.minimum(exceedance / self.tail_share, 1.0)
        if abs(self.shape) < 1e-9:
            over = -self.scale_s * np.log(share)
        else:
            over = self.scale_s * np.expm1(-self.shape * np.log(share)) / self.shape
        found = np.where(exceedance < self.tail_share, self.samples[-1] + over, body)
        return np.minimum(found, self.limit_s)

    def slowest(self, workers: int) -> Straggling:
        """The largest of `workers` draws.

        The largest of N is below q with probability F(q)^N: its p-quantile is F's at p^(1/N), and its mean is the
        integral of that over p.
        """
        nodes, weights = _nodes()
        mean = float(weights @ self.quantile(nodes))
        levels = np.log1p(-nodes)
        largest = float(weights @ self.quantile(-np.expm1(levels / workers)))
        p10, p90 = self.quantile(-np.expm1(np.log(np.array([0.1, 0.9])) / workers))
        return Straggling(max(largest - mean, 0.0), float(p10) - mean, float(p90) - mean, workers > self.count)


_fitted = lru_cache(maxsize=256)(ComputeTimes.fit)


def straggling(iteration_s: tuple[float, ...], workers: int, draws: float = 1.0) -> Straggling | None:
    """The wait for the slowest of `workers`; None where the profile's times cannot say.

    An iteration that is the sum of so many `draws`, as with more micro-batches, has a spread that grows with the square
    root of their number.
    """
    times = _fitted(iteration_s)
    if times is None:
        return None
    one, by = times.slowest(workers), math.sqrt(draws)
    return Straggling(one.wait_s * by, one.p10_s * by, one.p90_s * by, one.extrapolated)


def between_ranks(iteration_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Iterations of every rank, timed in step, without what slowed all ranks alike: nobody waits for that.

    Each iteration is taken relative to its mean over the N ranks. That mean moves with every rank, so what is left is
    smaller than the spread of one rank, by √(1 - 1/N), and is stretched by as much. Four ranks, of which one was slower
    once; that the second iteration took all of them 10 s longer is left out.

    >>> between_ranks([[10.0, 20.0], [10.0, 20.0], [10.0, 20.0], [10.0, 23.0]])[-2:]
    (15.375, 17.973076211353316)
    """
    if len(iteration_s) == 1:
        return tuple(iteration_s[0])
    times = np.asarray(iteration_s, dtype=np.float64)
    common = times.mean(axis=0)
    apart = (times - common) / math.sqrt(1 - 1 / len(times))
    return tuple(np.maximum(float(common.mean()) + apart, 0.0).ravel().tolist())


def _pareto(excess: NDArray[np.float64]) -> tuple[float, float]:
    """Scale and shape of the generalised Pareto distribution with these excesses' first two L-moments."""
    count = len(excess)
    mean = float(excess.mean())
    half_difference = float((2 * np.arange(count) - count + 1) @ np.sort(excess)) / (count * (count - 1))
    raw = 2 - mean / half_difference if half_difference > 0 else -1.0
    shape = float(np.clip(raw, -1.0, _SHAPE_LIMIT)) * count / (count + _SHAPE_PRIOR_SAMPLES)
    return mean * (1 - shape), shape


@lru_cache(maxsize=1)
def _nodes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quadrature over exceedance probability, dense where it is small.

    With exceedance exp(-y) a tail is a straight line or an exponential in y, which panels of Gauss nodes take exactly.
    """
    edges = np.concatenate([np.linspace(0, 4, 33), np.linspace(4, 40, 19)[1:]])
    x, w = np.polynomial.legendre.leggauss(4)
    half = np.diff(edges) / 2
    y = (edges[:-1] + half)[:, None] + half[:, None] * x
    exceedance = np.exp(-y).ravel()
    weights = (half[:, None] * w).ravel() * exceedance
    return exceedance, weights / weights.sum()
