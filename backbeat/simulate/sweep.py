"""Many worker counts at once: the scaling curve and its knee."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backbeat.errors import InputError
from backbeat.model.prediction import Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORTH_IT = 0.5
"""Past the knee an added worker brings less than this share of what one worker does alone."""


def knee(curve: Sequence[Prediction]) -> Prediction | None:
    """The last point up to which every step still brought half of a worker's throughput per worker added.

    None where the whole curve does: the knee lies beyond it.
    """
    points = sorted(curve, key=lambda point: point.workers)
    if not points:
        raise InputError("a scaling curve needs at least one number of workers")
    previous = None
    for point in points:
        before, workers = (previous.samples_per_s, previous.workers) if previous else (0.0, 0)
        # Both sides times the scaling factor, which is 0 for a profile that computes nothing.
        added = (point.samples_per_s - before) * point.scaling_factor
        if added < _WORTH_IT * point.samples_per_s / point.workers * (point.workers - workers):
            return previous or point
        previous = point
    return None
