"""How far off answers are: errors, ranges, choices, memory, fits. Pure functions of pairs of numbers.

An error is predicted over measured, less one. Medians and percentiles are of absolute errors, the bias is the median
with its sign.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LEVEL = 0.9
"""What a range is meant to hold: nine of ten."""
FALSE_FIT = 5.0
"""What "fits" that ran out of memory costs over "does not fit" that ran."""


def share_of(values: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed.

    >>> share_of([0.3, 0.1, 0.2], 0.9), share_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.5)
    (0.3, 6)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors(found: Sequence[float]) -> dict[str, Any]:
    """
    >>> errors([-0.1, 0.02, 0.3])
    {'n': 3, 'median': 0.1, 'p90': 0.3, 'worst': 0.3, 'bias': 0.02}
    """
    sizes = sorted(abs(error) for error in found)
    return {
        "n": len(found),
        "median": statistics.median(sizes),
        "p90": share_of(sizes, LEVEL),
        "worst": sizes[-1],
        "bias": statistics.median(found),
    }


def interval_score(low: float, high: float, measured: float, level: float = LEVEL) -> float:
    """Of a range in logarithms, smaller is better: its width, and 2/(1 - level) times how far outside the case lies.

    >>> round(interval_score(0.9, 1.1, 1.0), 3), round(interval_score(0.99, 1.01, 1.1), 3)
    (0.201, 1.727)
    """
    low, high, measured = math.log(low), math.log(high), math.log(measured)
    outside = max(low - measured, measured - high, 0.0)
    return (high - low) + 2 / (1 - level) * outside


def ranges(found: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Of (low, high, measured): the share inside, the median width high/low, and the mean score.

    >>> ranges([(0.9, 1.1, 1.0), (0.8, 1.2, 1.0), (0.9, 1.1, 1.2)])["inside"]
    0.6666666666666666
    """
    return {
        "inside": sum(low <= measured <= high for low, high, measured in found) / len(found),
        "width": statistics.median(high / low for low, high, _ in found),
        "score": statistics.mean(interval_score(*one) for one in found),
    }


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; of three and more.

    >>> rank_correlation([(1, 10), (2, 20), (3, 30)]), rank_correlation([(1, 10), (2, 20)])
    (1.0, None)
    """
    if len(pairs) < 3:
        return None

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for _, tied in itertools.groupby(enumerate(order), key=lambda at: values[at[1]]):
            places = list(tied)
            for _, place in places:
                found[place] = statistics.mean(rank for rank, _ in places)
        return found

    one, two = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    return statistics.correlation(one, two) if len(set(one)) > 1 and len(set(two)) > 1 else None


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (predicted, measured) of one job's ways: how much slower what is predicted fastest is than what was fastest.

    >>> round(regret([(1.0, 2.0), (1.1, 1.6), (3.0, 3.0)]), 3)
    0.25
    """
    return min(pairs)[1] / min(measured for _, measured in pairs) - 1


def ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Errors of how many times as long one way of a job takes as another, of each two; positive where the prediction
    sets them further apart than they are.

    >>> [round(error, 2) for error in ratios([(1.0, 1.0), (1.2, 1.1), (2.0, 2.2)])]
    [0.09, -0.09, -0.17]
    """
    found = []
    for one, two in itertools.combinations(pairs, 2):
        (first, fast), (second, slow) = sorted((one, two), key=lambda pair: pair[1])
        found.append((second / first) / (slow / fast) - 1)
    return found


def choosing(jobs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Of the ways of each job, two and more."""
    several = [pairs for pairs in jobs.values() if len(pairs) > 1]
    if not several:
        return {}
    lost = [regret(pairs) for pairs in several]
    apart = [abs(error) for pairs in several for error in ratios(pairs)]
    ranks = [rank for pairs in several if (rank := rank_correlation(pairs)) is not None]
    return {
        "jobs": len(several),
        "regret": statistics.median(lost),
        "regret p90": share_of(lost, LEVEL),
        "ratios": statistics.median(apart),
        "ratios p90": share_of(apart, LEVEL),
        "ranks": statistics.median(ranks) if ranks else None,
    }


def fits(found: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Of (said to fit, ran): the four counts, and their cost per case.

    >>> fits([(True, True), (True, False), (False, True), (False, False)])
    {'said fit, ran': 1, 'said fit, failed': 1, 'said not, ran': 1, 'said not, failed': 1, 'cost': 1.5}
    """
    if not found:
        return {}
    counts = {
        f"said {said}, {done}": sum(one == (said == "fit", done == "ran") for one in found)
        for said in ("fit", "not") for done in ("ran", "failed")
    }  # fmt: skip
    wrong = FALSE_FIT * counts["said fit, failed"] + counts["said not, ran"]
    return {**counts, "cost": wrong / len(found)}


def noise(groups: Sequence[Sequence[float]]) -> float | None:
    """The median spread of repeats of one measurement: half of the largest over the smallest, less one. Equal numbers
    are one number twice.

    >>> noise([[1.0, 1.1], [2.0, 2.04], [5.0], [3.0, 3.0]])
    0.03
    """
    spreads = [(max(group) / min(group) - 1) / 2 for group in groups if len(set(group)) > 1]
    return round(statistics.median(spreads), 6) if spreads else None


def rounded(found: Any, digits: int = 4) -> Any:
    """Numbers that are written to files."""
    if isinstance(found, float):
        return round(found, digits)
    if isinstance(found, Mapping):
        return {name: rounded(value, digits) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [rounded(value, digits) for value in found]
    return found
