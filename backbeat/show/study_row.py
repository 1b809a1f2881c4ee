"""One row of an answer: a strategy, plan or framework at one number of workers, and whether it fits the device; rows of
strong scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from backbeat.errors import InputError
from backbeat.model import Framework, Network, Plan, Prediction, Profile
from backbeat.model.accelerator import accelerator
from backbeat.model.batches import extrapolates, strong_scaling, with_sibling
from backbeat.model.gpu_memory import MemoryByKind, device_bytes
from backbeat.model.prediction import GapParts, Note
from backbeat.model.rule import MEMORY_ERROR, Fits, fits
from backbeat.planners import KNOWN_AS, SHARDED
from backbeat.planners.max_batch import largest_batch, with_blocks
from backbeat.planners.planned import predicted, resolved
from backbeat.steps.predict import predict
from backbeat.steps.step_memory import step_memory
from backbeat.units import format_bytes

Compared = Mapping[str, Any] | Plan | Framework
"""What to compare: a `strategy` with its choices, proposed anew at each number of workers; a plan, followed as it is;
or what a framework does."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What an answer is asked about."""

    given: Profile
    """With its gradients as they are on the device."""
    network: Network
    """As given; each prediction has moved it to its own number of workers."""
    baseline: str = "ddp"
    """Label of what everything else is compared with."""
    memory_budget: int | None = None
    """Bytes of the device to stay within, in place of what it has."""
    reduce_dtype: str | None = None
    """What fp32 gradients are sent in, where that is something else."""
    accumulation: int | None = None
    """Micro-batches; None for the profile's."""
    global_batch: int | None = None
    """Strong scaling: samples that all workers share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """Whether one worker's iteration fits the device it is to run on."""

    peak_bytes: int
    device: str
    device_bytes: int
    """What it has for tensors, or the budget."""
    error: float = MEMORY_ERROR["profile"]
    """How far off such peaks are."""
    optimizer: str | None = None
    """What the profile's memory was measured with."""

    @property
    def rating(self) -> Fits:
        return fits(self.peak_bytes, self.device_bytes, self.error)

    @property
    def fits(self) -> bool:
        """A tight one counts: nobody can tell that it does not."""
        return self.rating != "no"

    def __str__(self) -> str:
        if self.fits:
            whole, how = format_bytes(self.device_bytes), "tight" if self.rating == "tight" else "fits"
            return f"{format_bytes(self.peak_bytes)} of the {whole} of one {self.device}: {how}{self._given}"
        return self.too_much(": does not fit")

    def too_much(self, why: str = "") -> str:
        """For what does not fit: what it needs, and what to do."""
        peak, whole = format_bytes(self.peak_bytes), format_bytes(self.device_bytes)
        advice = "shard it (FSDP), or keep less (plan --memory)"
        return f"{peak} on one {self.device} of {whole}{why}{self._given}; {advice}"

    @property
    def _given(self) -> str:
        return f" (optimizer: {self.optimizer})" if self.optimizer else ""


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
    search_batch: Callable[[], int | None] = field(default=lambda: None, repr=False, compare=False)
    """Finds `largest_batch`, which takes a moment and is not always shown."""
    find_gap: Callable[[], GapParts | None] = field(default=lambda: None, repr=False, compare=False)
    """Finds what it takes above its bound by cause, as far as somebody asks."""

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
    def largest_batch(self) -> int | None:
        """Samples of one worker that would still fit with the same plan, 0 where not even one does; None where nobody
        knows how memory grows with the batch."""
        return self.search_batch()

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


def study_row(label: str, schedule: Compared, profile: Profile, network: Network, question: Question) -> StudyRow:
    """One schedule on the network's workers."""
    accumulation = question.accumulation
    if isinstance(schedule, Framework) and schedule.way is not None:
        schedule = {"strategy": schedule.way}
    if isinstance(schedule, Framework):
        plan = None
        prediction = predicted(profile, network, framework=schedule, accumulation=accumulation)
        framework: Framework | None = schedule
        find_gap: Callable[[], GapParts | None] = lambda: None  # noqa: E731
    else:
        choices: dict[str, Any] = {"strategy": schedule} if isinstance(schedule, Plan) else {**schedule}
        choices |= {"accumulation": accumulation, "reduce_dtype": question.reduce_dtype}
        sent, plan = resolved(profile, network, choices.pop("strategy"), **choices)
        prediction = predict(sent, network, plan, accumulation=accumulation)
        framework = None
        find_gap = partial(_gap_parts, sent, network, plan, accumulation)

    fit = device_fit(profile, prediction.memory, budget_bytes=question.memory_budget)
    if profile is not question.given:
        # Moved to another batch size, with a note on how. Without shards, what it then takes of memory is known well
        # enough to say that it does not fit, not that it fits.
        note = Note("batch", {"text": profile.notes[-1]})
        extrapolated = prediction.extrapolated or extrapolates(question.given, profile.batch_size)
        prediction = msgspec.structs.replace(prediction, notes=(*prediction.notes, note), extrapolated=extrapolated)
        if fit is not None and fit.fits and (plan is None or (plan.sharding is None and plan.memory is None)):
            fit = None
    return StudyRow(
        label=label,
        plan=plan,
        prediction=prediction,
        fit=fit,
        names_groups=isinstance(schedule, Plan),
        search_batch=partial(fitting_batch, fit, question, plan, network.workers, framework),
        find_gap=find_gap,
    )


def _gap_parts(profile: Profile, network: Network, plan: Plan, accumulation: int | None) -> GapParts | None:
    return predict(profile, network, plan, accumulation=accumulation, gap_parts=True).gap_parts


def by_whole_batch(rows: Sequence[StudyRow], question: Question, global_batch: int) -> list[StudyRow]:
    """Rows of strong scaling whose scaling is by what one GPU takes for all samples, which it computes faster than its
    share of them, sample by sample. Where that is not known, it stays by what one GPU takes for its share."""
    profile, accumulation = question.given, question.accumulation
    whole = alone_s = None
    why = Note("share_of_batch")
    with suppress(InputError):
        whole = strong_scaling(profile, global_batch, 1, accumulation=accumulation)
    if whole is not None:
        alone_s = predicted(whole, question.network.at(workers=1), "ddp", accumulation=accumulation).iteration_s
        how = f": {whole.notes[-1]}" if extrapolates(profile, whole.batch_size) else ""
        why = Note("whole_batch", {"samples": global_batch, "how": how})
    found = []
    for row in rows:
        one, band = row.prediction, row.prediction.network_band
        share_s = one.scaling_factor * one.iteration_s
        by = alone_s / (one.workers * share_s) if alone_s is not None and share_s > 0 else 1.0
        if band is not None:
            band = msgspec.structs.replace(
                band,
                quiet_scaling_factor=band.quiet_scaling_factor * by,
                busy_scaling_factor=band.busy_scaling_factor * by,
            )
        scaled = {"scaling_factor": one.scaling_factor * by, "network_band": band, "notes": (*one.notes, why)}
        found.append(replace(row, prediction=msgspec.structs.replace(one, **scaled)))
    return found


def device_fit(
    profile: Profile, held: MemoryByKind | None = None, *, budget_bytes: int | None = None
) -> DeviceFit | None:
    """The peak against what the device has, or a budget of it; None where the profile or the table of accelerators does
    not say. Without a peak that is known it is that of stock DDP."""
    device = accelerator(profile.device)
    held = held or step_memory(profile, None, workers=1)
    if held is None or device is None:
        return None
    limit = device_bytes(device) if budget_bytes is None else budget_bytes
    return DeviceFit(
        peak_bytes=held.peak_bytes,
        device=device.name if budget_bytes is None else f"{device.name} (as budgeted)",
        device_bytes=limit,
        error=MEMORY_ERROR["shape" if profile.analytic else "profile"],
        optimizer=profile.optimizer,
    )


def fitting_batch(
    fit: DeviceFit | None,
    question: Question,
    plan: Plan | None,
    workers: int,
    framework: Framework | None = None,
) -> int | None:
    """`StudyRow.largest_batch`."""
    if fit is None or not question.given.blocks:
        return None
    given = with_blocks(with_sibling(question.given))
    sent = question.reduce_dtype if plan is not None and plan.sharding is None else None

    def peak(there: Profile) -> int:
        held = step_memory(
            there if sent is None else there.with_reduce_dtype(sent),
            plan,
            workers=workers,
            micro_batches=question.accumulation or given.accumulation,
            framework=framework,
        )
        assert held is not None
        return held.peak_bytes

    return largest_batch(given, fit.device_bytes, peak)
