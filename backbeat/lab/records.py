"""Results of `backbeat validate`, one file per setting: enough to predict every case again without the machine.

A file holds the calibrations (`sessions`) and, for each case, the plan's groups and every iteration time. What was
predicted when it was measured is kept as well, but `cases` predicts anew, so that a better model can be judged on old
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from backbeat.errors import InputError
from backbeat.lab.plans import from_shorthand
from backbeat.lab.setting import scaled
from backbeat.measure.robust import quantile
from backbeat.model import CollectiveTimes, Gradient, Network, Profile
from backbeat.model.files import Document
from backbeat.simulate import predict

_DERIVED = ("summary.json", "choosing.json", "mixes.json")
"""Files in a results folder that were computed from the records."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One start of the nodes, with the calibration that its cases are predicted from."""

    network: Network
    timings: list[dict[str, Any]]
    calibration_s: float
    machine: str
    kernel: str
    date: str
    versions: dict[str, str]
    command: str
    environment: dict[str, str] = {}
    congestion_control: str | None = None
    spin: dict[str, float] = {}
    """GPU nodes: cycles a second of the spinning kernel, and what one costs beside its cycles; what the host needs to
    make an event and to queue a collective."""
    offset_s: float = 0.0
    """What every sample of the calibration turned out to contain beside the network's time; taken off again."""
    replaced_by: int | None = None
    """The session whose calibration counts instead of this one's."""
    why: str | None = None

    @cached_property
    def repaired(self) -> Network:
        """The network without the offset."""
        return self.network if self.offset_s == 0 else _earlier(self.network, self.offset_s)


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What of a profile was replayed; kept here, since the profile of that name may be measured anew one day."""

    forward_s: float
    backward_s: float
    update_s: float
    bytes: list[int]
    ready_s: list[float]
    layer_s: list[float] = []
    """Forward time of each gradient's module, where the profile has them: what decoupled plans are predicted from."""

    @classmethod
    def of(cls, profile: Profile) -> Compute:
        layers = [gradient.forward_s for gradient in profile.gradients if gradient.forward_s is not None]
        return cls(
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            update_s=profile.update_s,
            bytes=[gradient.bytes for gradient in profile.gradients],
            ready_s=[gradient.ready_s for gradient in profile.gradients],
            layer_s=layers if len(layers) == len(profile.gradients) else [],
        )

    def profile(self, name: str) -> Profile:
        layers: list[float] | list[None] = self.layer_s or [None] * len(self.bytes)
        rows = zip(self.bytes, self.ready_s, layers, strict=True)
        return Profile(
            name=name,
            model=name,
            batch_size=1,
            precision="",
            device="",
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            update_s=self.update_s,
            gradients=tuple(
                Gradient(name=str(place), bytes=size, ready_s=ready, forward_s=layer)
                for place, (size, ready, layer) in enumerate(rows)
            ),
        )


class Alone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model's compute replayed without any communication: how exact the replay itself is."""

    session: int
    model: str
    expected_s: float
    measured_s: float
    disturbed: dict[str, float] = {}
    """While all plans of the model were measured, over all nodes: see `lab.health`."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One plan of one model, measured."""

    session: int
    """Which of the file's sessions it was measured in."""
    model: str
    """The profile's name, as it was given."""
    plan: str
    channels: int
    groups: list[list[int]]
    """Of each group, as `plans.shorthand` writes them."""
    series_s: list[list[float]]
    """Iteration times of two interleaved series."""
    predicted_s: float
    """As predicted when it was measured."""
    finishes_us: list[int] = []
    """When each group was done after backward started, in the warm-up iteration, in microseconds."""

    @property
    def samples(self) -> list[float]:
        return sorted(sample for one in self.series_s for sample in one)

    @property
    def measured_s(self) -> float:
        return quantile(self.samples, 0.5)

    @property
    def spread_s(self) -> float:
        return quantile(self.samples, 0.9) - quantile(self.samples, 0.1)

    @property
    def repeat(self) -> float:
        """How far the medians of the two series lie apart, as a share."""
        first, second = (quantile(sorted(one), 0.5) for one in self.series_s)
        return abs(first - second) / self.measured_s


class Record(Document, frozen=True, kw_only=True):
    """All cases of one setting."""

    SCHEMA: ClassVar[str] = "backbeat.validation/1"

    setting: str
    backend: str
    nodes: int
    bandwidth_bits: float
    dilation: float = 1.0
    sessions: tuple[Place, ...] = ()
    models: dict[str, Compute] = msgspec.field(default_factory=dict)
    alone: tuple[Alone, ...] = ()
    cases: tuple[Case, ...] = ()

    def __post_init__(self) -> None:
        known = len(self.sessions)
        for index, place in enumerate(self.sessions):
            if place.replaced_by is not None and not 0 <= place.replaced_by < known:
                raise InputError(
                    f"sessions[{index}].replaced_by is {place.replaced_by}, but there are {known} sessions: "
                    "number them from 0"
                )
        for index, case in enumerate(self.cases):
            if not 0 <= case.session < known:
                raise InputError(
                    f"cases[{index}].session is {case.session}, but there are {known} sessions: number them from 0"
                )
            if case.model not in self.models:
                raise InputError(f"cases[{index}].model is {case.model!r}, which models does not have: add its compute")

    def calibration(self, session: int) -> Network:
        """The network that a session's cases are predicted from."""
        place = self.sessions[session]
        return (place if place.replaced_by is None else self.sessions[place.replaced_by]).repaired

    @cached_property
    def done(self) -> set[tuple[str, str]]:
        return {(case.model, case.plan) for case in self.cases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case, predicted with the model as it is now."""

    setting: str
    backend: str
    nodes: int
    bandwidth_bits: float
    model: str
    plan: str
    channels: int
    groups: int
    measured_s: float
    predicted_s: float
    repeat: float
    single_s: float
    session: int = 0
    """Which of its setting's sessions it was measured in."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def _earlier(network: Network, offset_s: float) -> Network:
    """Every measured time shorter by the same amount."""

    def curve(times: CollectiveTimes | None) -> CollectiveTimes | None:
        if times is None:
            return None
        if times.points is None:
            return msgspec.structs.replace(times, alpha_s=max((times.alpha_s or 0.0) - offset_s, 0.0))
        return CollectiveTimes(points=tuple((size, max(seconds - offset_s, 1e-6)) for size, seconds in times.points))

    return msgspec.structs.replace(
        network,
        all_reduce=curve(network.all_reduce),
        all_gather=curve(network.all_gather),
        reduce_scatter=curve(network.reduce_scatter),
        broadcast=curve(network.broadcast),
        concurrency=tuple(
            msgspec.structs.replace(row, seconds=max(row.seconds - offset_s, 1e-6)) for row in network.concurrency
        ),
    )


def load(folder: Path) -> list[Record]:
    """The records in a folder, by setting."""
    return [Record.load(path) for path in sorted(folder.glob("*.json")) if path.name not in _DERIVED]


def outcomes(record: Record, *, network: Network | None = None) -> list[Outcome]:
    """Every case of a record, predicted from its own session's calibration (or from another network)."""
    profiles: dict[str, Profile] = {}
    found = []
    for case in record.cases:
        if case.model not in profiles:
            profiles[case.model] = scaled(record.models[case.model].profile(case.model), record.dilation)
        profile = profiles[case.model]
        cluster = network or record.calibration(case.session)
        plan = from_shorthand(case.groups, profile, case.plan, case.channels, record.nodes)
        result = predict(profile, cluster, plan, broadcast_buffers=False)
        found.append(
            Outcome(
                setting=record.setting,
                backend=record.backend,
                nodes=record.nodes,
                bandwidth_bits=record.bandwidth_bits,
                model=case.model,
                plan=case.plan,
                channels=case.channels,
                groups=len(case.groups),
                measured_s=case.measured_s,
                predicted_s=result.iteration_s,
                repeat=case.repeat,
                single_s=profile.single_s,
                session=case.session,
            )
        )
    return found


def extrapolated(records: list[Record]) -> list[Outcome]:
    """Cases on more nodes, predicted from the calibration of the fewest nodes with the same backend and bandwidth."""
    found = []
    for record in records:
        base = min(
            (one for one in records if (one.backend, one.bandwidth_bits) == (record.backend, record.bandwidth_bits)),
            key=lambda one: one.nodes,
        )
        if base.nodes < record.nodes and base.sessions:
            found += outcomes(record, network=base.calibration(-1).at(workers=record.nodes))
    return found
