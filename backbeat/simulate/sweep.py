"""Many worker counts at once: the scaling curve and its knee."""

from __future__ import annotations

from collections.abc import Sequence

from backbeat.errors import InputError
from backbeat.model.prediction import Prediction

_WORTH_IT = 0.5
"""Past the knee an added worker brings less than this share of what one worker does alone."""


def knee(curve: Sequence[Prediction]) -> int | None:
    """The number of workers past which an added one brings less than half of what one does alone.

    Counted from one worker: it is 1 where the first point of the curve does not pay either, however the curve goes on.
    None where all of it pays: the knee lies beyond.
    """
    points = sorted(curve, key=lambda point: point.workers)
    if not points:
        raise InputError("a scaling curve needs at least one number of workers")
    workers = 1
    previous = None
    for point in points:
        if point.workers > 1:
            # Both sides times the scaling factor, which is 0 for a profile that computes nothing.
            each = point.samples_per_s / point.workers
            before = each if previous is None else previous.samples_per_s * point.scaling_factor
            added = point.samples_per_s * point.scaling_factor - before
            if added < _WORTH_IT * each * (point.workers - workers):
                return workers
        workers, previous = point.workers, point
    return None
