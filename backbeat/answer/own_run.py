"""What own runs say of a job: by how much its computation, and its communication, take longer than predicted.

One run tells one of the two. Of a profile that was measured on these GPUs computation is known, so that a run with
enough exposed communication says how slow that is; of a shape, or a computed profile, a run says how slow computation
is. Several runs tell them apart where one of them exposes little and another one much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as changed

from backbeat.cost.collectives import COLLECTIVES
from backbeat.cost.curve import stretched
from backbeat.errors import InputError
from backbeat.model import Network, Prediction, Profile, WorkersRow
from backbeat.model.accelerator import accelerator
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.measured_run import Run
from backbeat.units import format_seconds

if TYPE_CHECKING:
    from backbeat.answer.asked import Asked

ERROR, LAYOUT_ERROR = 0.15, 0.35
"""How far nine of ten answers with an own run are off: sharded ways, and layouts, of the judge's development rows."""
_MOST = 20.0
"""What takes so many times as long as predicted, or as little of it, is another job."""
_ENOUGH = 1e-6
_TELLING = 0.1
"""Of a step: exposed communication below this share says nothing of how slow communication is."""
_JOB = ("batch", "global_batch", "sequence", "precision", "framework", "accelerator")
"""What a run says of its own job."""
_OF_THE_ANSWER = (
    "tokens", "samples", "epochs", "price", "deadline", "goodput", "across", "nics_per_node", "measured", "accelerator",
)  # fmt: skip
"""What is resolved already, or no part of a job."""


def corrected(asked: Asked, runs: Sequence[Run]) -> Asked:
    """The question with computation and communication as long as these runs say."""
    told = sorted(((_exposed(_job(asked, run), run), run) for run in runs), key=lambda one: one[0])
    (least, quiet), (most, loud) = told[0], told[-1]
    if most >= _TELLING and _knows_computation(asked):
        return _with_communication(asked, loud)
    found = _with_computation(asked, quiet)
    if most >= _TELLING and least < most / 2:
        # Each changes a little what the other run says.
        for _ in range(2):
            found = _with_computation(_with_communication(found, loud), quiet)
    return found


def with_own_range(found: Prediction) -> Prediction:
    """The range as wide as such answers were off, where it was wider."""
    if found.range_s is None:
        return found
    error = LAYOUT_ERROR if found.layout is not None else ERROR
    low, high = found.range_s
    step_s = found.step_s
    return changed(found, range_s=(max(low, step_s / (1 + error)), min(high, step_s * (1 + error))))


def _with_computation(asked: Asked, run: Run) -> Asked:
    job = _job(asked, run)

    def step_s(factor: float) -> float:
        return replace(job, compute_factor=factor).predict(run.way, run.gpus).step_s

    return replace(asked, compute_factor=_solved(step_s, run, "computation"))


def _with_communication(asked: Asked, run: Run) -> Asked:
    job = _job(asked, run)

    def step_s(factor: float) -> float:
        return replace(job, network=_slower(asked.network, factor)).predict(run.way, run.gpus).step_s

    return replace(asked, network=_slower(asked.network, _solved(step_s, run, "communication")))


def _solved(step_s: Callable[[float], float], run: Run, what: str) -> float:
    low, high, wanted = 1 / _MOST, _MOST, run.step_s.median
    if not step_s(low) < wanted < step_s(high):
        raise InputError(
            f"measured is {run.word}, where {format_seconds(step_s(1.0))} is predicted: no {what} explains that; check "
            "way, GPUs, batch and unit"
        )
    below, above = step_s(low) - wanted, step_s(high) - wanted
    while high / low > 1 + _ENOUGH:
        # A step is all but straight in either, so that a line leads near; halving what is left ends it in any case.
        for middle in (low - below * (high - low) / (above - below), math.sqrt(low * high)):
            off = step_s(middle) - wanted
            if abs(off) <= _ENOUGH * wanted:
                return middle
            low, high, below, above = (low, middle, below, off) if off > 0 else (middle, high, off, above)
    return math.sqrt(low * high)


def _exposed(job: Asked, run: Run) -> float:
    """The share of the run's step, as it is predicted, that is no computation."""
    found = job.predict(run.way, run.gpus)
    return max(found.exposed_s, 0.0) / found.step_s


def _job(asked: Asked, run: Run) -> Asked:
    """The question of which the run is the answer."""
    subject = asked.subject
    known = {subject.name, *((subject.model,) if isinstance(subject, Profile) else ())}
    known |= set() if asked.shape is None else {asked.shape.name}
    if run.model and run.model not in known:
        raise InputError(f"measured is a run of {run.model!r}, not of {subject.name!r}: give one of this model")
    told: dict[str, Any] = {name: value for name, value in asked.given.items() if name not in _OF_THE_ANSWER}
    told |= {name: getattr(run, name) for name in _JOB if getattr(run, name) is not None}
    told.setdefault("accelerator", asked.gpu)
    plain = type(asked).of(asked.subject, asked.network, **told)
    if plain.way(run.way).searched:
        raise InputError(f"measured is of {run.way!r}, which leaves sizes open: say those that it ran with")
    # What nobody said of the micro-batch stays as it is predicted.
    ran = plain.predict(run.way, run.gpus)
    given = {**plain.given, "batch": ran.batch, "global_batch": ran.global_batch}
    return replace(plain, given=given, compute_factor=asked.compute_factor)


def _knows_computation(asked: Asked) -> bool:
    """Whether it was measured on the very GPUs."""
    profile = asked.profile
    if profile is None or profile.analytic or asked.gpu is None:
        return False
    device = accelerator(profile.device)
    return device is not None and device.name == asked.gpu.name


def _slower(network: Network, factor: float) -> Network:
    """Every collective takes so many times as long."""

    def times(one: CollectiveTimes | None) -> CollectiveTimes | None:
        return None if one is None else CollectiveTimes.of(stretched(one.curve, latency=factor, transfer=factor))

    def fields(of: Network | WorkersRow) -> dict[str, Any]:
        points = tuple(changed(one, seconds=one.seconds * factor) for one in of.concurrency)
        return {name: times(getattr(of, name)) for name in COLLECTIVES} | {"concurrency": points}

    base = network.as_measured
    rows = tuple(changed(row, **fields(row)) for row in base.rows)
    topology = changed(base.topology, inside=times(base.topology.inside))
    there = changed(base, rows=rows, topology=topology, **fields(base))
    return there.at(workers=network.workers, load=network.how_busy)
