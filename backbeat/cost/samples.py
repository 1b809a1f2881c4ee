"""Statistics for repeated timings on machines that are never quite idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Half-width of a 95 % confidence interval, in standard deviations of a coin-flip count.
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What repeated samples of one thing amount to."""

    median_s: float
    jitter: float
    """Interquartile range over the median: 0.2 means that the middle half of the samples lies within 20 %."""
    uncertainty: float
    """Half-width of the median's 95 % confidence interval, over the median."""
    repeats: int


def summarise(samples: Sequence[float]) -> Timing:
    """Medians and quartiles only, so that a stray interruption moves nothing.

    >>> summarise([1.0, 1.0, 1.1, 50.0]).median_s
    1.05
    """
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    median = quantile(ordered, 0.5)
    if median <= 0:
        return Timing(median_s=median, jitter=0.0, uncertainty=0.0, repeats=len(ordered))
    # Order statistics that enclose the median in 95 of 100 repetitions, whatever the distribution.
    middle, reach = (len(ordered) - 1) / 2, _NORMAL_95 * math.sqrt(len(ordered)) / 2
    low = ordered[max(0, math.floor(middle - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(middle + reach))]
    return Timing(
        median_s=median,
        jitter=(quantile(ordered, 0.75) - quantile(ordered, 0.25)) / median,
        uncertainty=(high - low) / 2 / median,
        repeats=len(ordered),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nondecreasing sequence nearest to the values: neighbours that fall are pooled into their weighted mean.

    >>> monotone([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, count = pools.pop()
            mean = (before * heavy + mean * mass) / (heavy + mass)
            mass, length = heavy + mass, count + length
        pools.append((mean, mass, length))
    return [mean for mean, _, length in pools for _ in range(length)]
