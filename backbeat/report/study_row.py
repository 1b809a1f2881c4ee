"""One row of an answer: a strategy, plan or framework at one number of workers; and rows of strong scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from backbeat import api
from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile, Reduction
from backbeat.planners import KNOWN_AS, SHARDED
from backbeat.report.words.device_memory import DeviceFit, device_fit
from backbeat.simulate import predict, strong_scaling

Schedule = Mapping[str, Any] | Plan | Reduction
"""What to compare: a `strategy` with its choices, proposed anew at each number of workers; a plan, followed as it is;
or what a framework does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """A strategy, plan or framework with its prediction and whether it fits, at one number of workers."""

    label: str
    """The strategy's name, a plan's or a framework's."""
    plan: Plan | None
    """None for what a framework does."""
    prediction: Prediction
    fit: DeviceFit | None
    """None where nobody knows the profile's memory or the device's."""
    names_groups: bool = False
    """Its name says how many GPUs hold one copy of the model, though its label does not."""

    @property
    def workers(self) -> int:
        return self.prediction.workers

    @property
    def fits(self) -> bool:
        return self.fit is None or self.fit.fits

    @property
    def peak_bytes(self) -> int | None:
        return self.prediction.peak_bytes if self.fit is None else self.fit.peak_bytes

    @property
    def sharded(self) -> bool:
        return self._kind in SHARDED if self.plan is None else self.plan.sharding is not None

    @property
    def name(self) -> str:
        """What people call it; a plan with a name of its own keeps that."""
        shards = self.label.partition(":")[2]
        if self._kind not in KNOWN_AS or not (shards or "0").isdecimal():
            return self.label
        if self.names_groups and self.plan is not None and self.plan.sharding is not None:
            mesh = self.plan.sharding.mesh
            shards = str(mesh.shard) if mesh.replicate > 1 else shards
        return KNOWN_AS[self._kind] + (f" in groups of {shards}" if shards else "")

    @property
    def simplicity(self) -> int:
        """Lower is simpler. Plans with names of their own count as `best` or, where they shard, as `sharded`."""
        like = "sharded" if self.sharded else "best"
        return list(KNOWN_AS).index(self._kind if self._kind in KNOWN_AS else like)

    @property
    def _kind(self) -> str:
        return self.label.partition(":")[0]


def study_row(
    label: str,
    schedule: Schedule,
    profile: Profile,
    network: Network,
    *,
    accumulation: int | None,
    reduce_dtype: str | None,
    budget_bytes: int | None,
) -> StudyRow:
    """One schedule on the network's workers."""
    if isinstance(schedule, Reduction):
        plan = None
        prediction = api.predict(profile, network, framework=schedule, accumulation=accumulation)
        # It may hold its share of the optimizer's state alone, or a second buffer of gradients.
        held = schedule.on_device(profile, network.workers)
    else:
        choices: dict[str, Any] = {"strategy": schedule} if isinstance(schedule, Plan) else {**schedule}
        held, plan = api.resolve(
            profile, network, choices.pop("strategy"), accumulation=accumulation, reduce_dtype=reduce_dtype, **choices
        )
        prediction = predict(held, network, plan, accumulation=accumulation)
    fit = device_fit(held, plan, network.workers, budget_bytes=budget_bytes)
    if fit is not None and prediction.peak_bytes is not None:
        fit = replace(fit, peak_bytes=prediction.peak_bytes)
    given = isinstance(schedule, Plan)
    return StudyRow(label=label, plan=plan, prediction=prediction, fit=fit, names_groups=given)


def by_whole_batch(
    rows: Sequence[StudyRow],
    profile: Profile,
    network: Network,
    global_batch: int,
    accumulation: int | None,
    other: Profile | None,
) -> list[StudyRow]:
    """Rows of strong scaling whose scaling is by what one GPU takes for all samples, which it computes faster than its
    share of them, sample by sample. Where that is not known, it stays by what one GPU takes for its share."""
    try:
        whole = strong_scaling(profile, global_batch, 1, accumulation=accumulation, other=other)
    except InputError:
        why = "scaling is by one GPU's time for its share: a second profile says what it takes for the whole batch"
        return [_noted(row, why) for row in rows]
    alone_s = api.predict(whole, network.at(workers=1), "ddp", accumulation=accumulation).iteration_s
    why = f"scaling is by one GPU's time for {global_batch} samples"
    if whole is not profile and "extrapolated" in whole.notes[-1]:
        why += f": {whole.notes[-1]}"
    found = []
    for row in rows:
        one = row.prediction
        by = alone_s / (one.workers * one.single_s) if one.single_s > 0 else 1.0
        band = one.network_band
        if band is not None:
            band = msgspec.structs.replace(
                band,
                quiet_scaling_factor=band.quiet_scaling_factor * by,
                busy_scaling_factor=band.busy_scaling_factor * by,
            )
        scaled = msgspec.structs.replace(one, scaling_factor=one.scaling_factor * by, network_band=band)
        found.append(_noted(replace(row, prediction=scaled), why))
    return found


def _noted(row: StudyRow, note: str) -> StudyRow:
    return replace(row, prediction=msgspec.structs.replace(row.prediction, notes=(*row.prediction.notes, note)))


def at_another_batch(row: StudyRow, note: str) -> StudyRow:
    """With the note on how its batch size was reached. What it takes of memory is known of sharded rows only."""
    noted = _noted(row, note).prediction
    moved = msgspec.structs.replace(noted, extrapolated=noted.extrapolated or "extrapolated" in note)
    return replace(row, prediction=moved, fit=row.fit if moved.peak_bytes is not None else None)
