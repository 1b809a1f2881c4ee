"""The matrix: models × plans × nodes × bandwidths, measured within a time limit and resumed where it stopped.

The nodes of a setting are started and calibrated once, and every model goes through them; all plans of a model take
turns. The file is written after each model, so that whatever was measured stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backbeat.errors import InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.experiment import Measured
from backbeat.lab.health import change
from backbeat.lab.jobs import seconds_of
from backbeat.lab.plans import Choice, shorthand
from backbeat.lab.records import Alone, Case, Compute, Place, Record
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting
from backbeat.model import Profile, files
from backbeat.units import format_seconds

PLANS = (
    "wfbp",
    "single",
    "ddp",
    "horovod",
    "mg-wfbp",
    "adaptive",
    "optimal",
    "random:8",
    "random:32",
    "asc-wfbp/2",
    "best/2",
)
MODELS = (
    "googlenet-b64-bf16-h200",
    "densenet121-b64-bf16-h200",
    "densenet201-b32-bf16-h200",
    "efficientnet-b0-b128-bf16-h200",
    "inception-v3-b64-bf16-h200",
    "resnet50-b64-bf16-h200",
    "resnet101-b64-bf16-h200",
    "resnet152-b64-bf16-h200",
    "convnext-tiny-b64-bf16-h200",
    "bert-base-b64-bf16-h200",
)
"""From 21 to 438 MB of gradients, from 161 to 604 of them; larger ones differ little from plan to plan here."""
_START_S = 30.0
"""A session takes about this long to start; with less time left than this and its calibration none is begun."""
_SLACK = 1.2
"""Predictions can be too low, and starting over costs more than leaving a model for the next run."""
_FAILURES = 2
"""Sessions of one setting that may break before it is given up."""
_ASK_S = 60.0
_THREADS = 2
"""Threads of NCCL that poll all the time, for each node and channel."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What to measure, and how long it may take."""

    settings: Sequence[Setting]
    models: Sequence[str]
    choices: Sequence[Choice]
    folder: Path
    seconds_each: float
    """Time for each plan, its repeats included."""
    budget_s: float
    """Time for each session's calibration."""
    limit_s: float
    command: str


def run(matrix: Matrix, say: Say) -> list[str]:
    """Measure what is missing; what is still missing afterwards, in words."""
    clock = _Clock(matrix.limit_s)
    profiles = {name: Profile.load(name) for name in matrix.models}
    matrix.folder.mkdir(parents=True, exist_ok=True)
    left = []
    for setting in matrix.settings:
        choices = allowed(matrix.choices, setting, say)
        failures = 0
        while pending(_record(matrix, setting), profiles, choices):
            if clock.left_s < _START_S + matrix.budget_s:
                break
            try:
                finished = _session(matrix, setting, profiles, choices, clock, say)
            except MeasurementError as error:
                failures += 1
                say(f"{setting.name}: {error}")
                log = "\n".join([str(error), *getattr(error, "__notes__", [])])
                files.write(matrix.folder / f"{setting.name}.failure{failures}.log", log.encode())
                if failures >= _FAILURES:
                    break
            else:
                if not finished:
                    break
        missing = pending(_record(matrix, setting), profiles, choices)
        left += [f"{setting.name}: {name} ({len(some)} plans)" for name, some in missing]
    return left


def allowed(choices: Sequence[Choice], setting: Setting, say: Say) -> list[Choice]:
    """Plans that this machine has the cores for: NCCL's threads poll, and where they starve times explode."""
    if setting.backend != "nccl":
        return list(choices)
    cores = os.cpu_count() or 1
    widest = max(1, cores // (_THREADS * setting.nodes))
    kept = [choice for choice in choices if choice.widest("nccl") <= widest]
    if len(kept) < len(choices):
        names = ", ".join(choice.name for choice in choices if choice not in kept)
        say(f"{setting.name}: left out {names}: {cores} cores carry {widest} channel(s) on {setting.nodes} nodes")
    return kept


def pending(record: Record, models: Iterable[str], choices: Sequence[Choice]) -> list[tuple[str, list[Choice]]]:
    """Models with plans that have not been measured."""
    rows = [(name, [choice for choice in choices if (name, choice.name) not in record.done]) for name in models]
    return [(name, missing) for name, missing in rows if missing]


def _session(
    matrix: Matrix,
    setting: Setting,
    profiles: Mapping[str, Profile],
    choices: Sequence[Choice],
    clock: _Clock,
    say: Say,
) -> bool:
    """One start of a setting's nodes, through as many models as fit. False where time ran out."""
    record = _record(matrix, setting)
    width = max(choice.widest(setting.backend) for choice in choices)
    say(f"{setting.name}: starting, {format_seconds(clock.left_s)} left")
    with experiment.opened(setting, width) as session:
        place = _place(matrix, setting, session, choices, max(one.total_bytes for one in profiles.values()))
        say(f"{setting.name}: calibrated in {format_seconds(place.calibration_s)}, {format_seconds(clock.left_s)} left")
        record = msgspec.structs.replace(record, sessions=(*record.sessions, place))
        for name, missing in pending(record, profiles, choices):
            profile = profiles[name]
            made = experiment.planned(missing, setting.slowest(profile), place.network)
            expected = seconds_of([one.iteration_s for *_, one in made], matrix.seconds_each)
            if _SLACK * expected > clock.left_s:
                say(f"{setting.name}: {name} needs {format_seconds(expected)}: out of time")
                return False
            before = session.ask("health", _ASK_S)
            results, alone_s = experiment.measure(session, profile, setting, made, matrix.seconds_each)
            number = len(record.sessions) - 1
            alone = Alone(
                session=number,
                model=name,
                expected_s=setting.compute(profile).single_s,
                measured_s=alone_s,
                disturbed=_disturbed(before, session.ask("health", _ASK_S)),
            )
            record = msgspec.structs.replace(
                record,
                models={**record.models, name: Compute.of(profile)},
                alone=(*record.alone, alone),
                cases=(*record.cases, *(case_of(result, name, number) for result in results)),
            )
            record.save(_path(matrix, setting))
            worst = max(results, key=lambda one: abs(one.error))
            say(
                f"{setting.name}: {name}: {len(results)} plans, worst {worst.choice.name} {worst.error:+.1%}, repeats "
                f"within {max(one.repeat for one in results):.1%}, compute {alone_s / alone.expected_s - 1:+.2%}, "
                f"{format_seconds(clock.left_s)} left"
            )
    return True


def _disturbed(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over all nodes; what the whole machine counts is the same on each, and taken from the first."""
    changes = [change(*pair) for pair in zip(before, after, strict=True)]
    return {
        name: changes[0].get(name, 0.0) if name == "stolen_s" else round(sum(one.get(name, 0.0) for one in changes), 4)
        for name in sorted({name for one in changes for name in one})
    }


def case_of(result: Measured, model: str, session: int) -> Case:
    return Case(
        session=session,
        model=model,
        plan=result.choice.name,
        channels=result.plan.channels,
        groups=shorthand(result.plan),
        series_s=[[round(sample, 7) for sample in one] for one in result.series],
        predicted_s=result.prediction.iteration_s,
        finishes_us=[round(finish * 1e6) for finish in result.finishes],
    )


def _place(matrix: Matrix, setting: Setting, session: Session, choices: Sequence[Choice], largest_bytes: int) -> Place:
    facts = session.ask("describe", 60)[0]
    calibrated = experiment.calibrate(session, setting, choices, budget_s=matrix.budget_s, largest_bytes=largest_bytes)
    return Place(
        network=calibrated.network,
        timings=calibrated.timings,
        calibration_s=calibrated.elapsed_s,
        command=matrix.command,
        **facts,
    )


def _path(matrix: Matrix, setting: Setting) -> Path:
    return matrix.folder / f"{setting.name}.json"


def _record(matrix: Matrix, setting: Setting) -> Record:
    path = _path(matrix, setting)
    if not path.exists():
        return Record(
            setting=setting.name,
            backend=setting.backend,
            nodes=setting.nodes,
            bandwidth_bits=setting.rate_bits,
            dilation=setting.dilation,
        )
    record = Record.load(path)
    if record.dilation != setting.dilation:
        raise InputError(
            f"{path} was measured with dilation {record.dilation:g}, this run has {setting.dilation:g}: "
            "choose another --output folder"
        )
    return record


class _Clock:
    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())
