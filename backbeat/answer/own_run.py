"""What one run of one's own says of computation: by how much it takes longer than predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from backbeat.errors import InputError
from backbeat.model.measured_run import Run
from backbeat.units import format_seconds

if TYPE_CHECKING:
    from backbeat.answer.asked import Asked

_SLOWEST = 20.0
"""Computation that takes so many times as long as predicted, or as little of it, is another job's."""
_ENOUGH = 1e-6
_JOB = ("batch", "global_batch", "sequence", "precision", "framework", "accelerator")
"""What a run says of its own job."""
_OF_THE_COST = ("tokens", "samples", "epochs", "price", "deadline", "goodput")
_RESOLVED = ("across", "nics_per_node", "measured", "accelerator")


def corrected(asked: Asked, runs: Sequence[Run]) -> Asked:
    """The question with computation as long as these runs say; of several the mean."""
    return replace(asked, compute_factor=geometric_mean([compute_factor(asked, run) for run in runs]))


def compute_factor(asked: Asked, run: Run) -> float:
    """How many times as long computation takes as predicted, so that the run's step is met."""
    if run.model and run.model != asked.subject.name:
        raise InputError(f"measured is a run of {run.model!r}, not of {asked.subject.name!r}: give one of this model")
    job = _job(asked, run)
    way = job.way(run.way)
    if way.searched:
        raise InputError(f"measured is of {run.way!r}, which leaves sizes open: say those that it ran with")
    # What nobody said of the micro-batch stays as it is predicted.
    ran = job.predict(run.way, run.gpus)
    job = replace(job, given={**job.given, "batch": ran.batch, "global_batch": ran.global_batch})

    def step_s(factor: float) -> float:
        return replace(job, compute_factor=factor).predict(run.way, run.gpus).step_s

    low, high = 1 / _SLOWEST, _SLOWEST
    if not step_s(low) < run.step_s.median < step_s(high):
        raise InputError(
            f"measured is {run.word}, where {format_seconds(step_s(1.0))} is predicted: no computation explains that; "
            "check way, GPUs, batch and unit"
        )
    while high / low > 1 + _ENOUGH:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if step_s(middle) > run.step_s.median else (middle, high)
    return math.sqrt(low * high)


def _job(asked: Asked, run: Run) -> Asked:
    """The question of which the run is the answer."""
    told: dict[str, Any] = {
        name: value for name, value in asked.given.items() if name not in (*_OF_THE_COST, *_RESOLVED)
    }
    told |= {name: getattr(run, name) for name in _JOB if getattr(run, name) is not None}
    told.setdefault("accelerator", asked.gpu)
    return type(asked).of(asked.subject, asked.network, **told)
