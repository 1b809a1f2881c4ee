"""One data-parallel way of a profile, or of a shape that is described as one: its plan, its step under the framework's
habits, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from backbeat.answer.ways import Way
from backbeat.errors import InputError
from backbeat.model import Framework, MemoryPlan, Network, Plan, Prediction, Profile, Segment
from backbeat.model.batches import at_batch, with_sibling
from backbeat.model.gpu_memory import device_bytes, fitting
from backbeat.model.prediction import Note
from backbeat.planners import BUDGETED
from backbeat.planners.baselines import framework_plan
from backbeat.planners.layout_ways import MICRO_BATCHES
from backbeat.planners.planned import resolved
from backbeat.steps.model_chain import repeated
from backbeat.steps.predict import predict

if TYPE_CHECKING:
    from backbeat.answer.asked import Asked

"""Of a shape, where nobody says."""
_PLANNED = ("bucket", "communicators", "density", "memory")
_OPTIONS = {"bucket": "bucket_bytes", "memory": "memory_bytes"}


def data_parallel(asked: Asked, way: Way, gpus: int) -> Prediction:
    """The way at the micro-batch that is fastest and fits; where none fits, at the fastest."""
    found = [_recomputing(asked, way, gpus, *share) for share in _shares(asked, gpus)]
    best = min(found, key=lambda one: (one.fits == "no", one.step_s))
    return replace(
        best,
        cluster=asked.network.name,
        framework=asked.framework.name,
        runs_by=way.runs_by(asked.framework),
        peak_flops=None if asked.gpu is None else asked.gpu.rate(asked.precision),
    )


def _recomputing(asked: Asked, way: Way, gpus: int, profile: Profile, micro_batches: int) -> Prediction:
    """With the least recomputation that fits."""
    told = way.says.get("recompute") if way.plan is not None else asked.given.get("recompute")
    factor = asked.compute_factor
    if factor != 1:
        profile = replace(profile.slower(factor), update_s=profile.update_s * factor)
    step = ProfileStep(
        profile=profile,
        network=asked.on_network(gpus),
        way=way,
        framework=asked.framework,
        micro_batches=micro_batches,
        given=asked.acting(way),
    )
    found = None
    for recompute in ("none", "full") if told is None else (told,):
        if found is not None and not _repeated(profile):
            break
        found = _slowed(changed(step, recompute=recompute), max(asked.stragglers(gpus).values(), default=1.0))
        found = _fitted(asked, found, "shape" if profile.analytic else "profile")
        found = replace(found, recompute=_how_much(profile, found.plan))
        if found.fits != "no":
            break
    assert found is not None
    own = asked.profile
    if own is not None and profile.batch_size != own.batch_size:
        found = replace(found, notes=(*found.notes, Note("batch", {"text": profile.notes[-1]})))
    return found


def _fitted(asked: Asked, found: Prediction, known: str) -> Prediction:
    """The prediction with what the GPU has for it, or may take, and whether that is enough."""
    limit = asked.given.get("memory")
    if limit is None and asked.gpu is not None:
        limit = device_bytes(asked.gpu)
    return replace(found, device_bytes=limit, fits=fitting(found.memory, limit, known))


def _slowed(step: ProfileStep, slowest: float) -> Prediction:
    """Everybody waits for the rank that is said to be slowest."""
    found = step.predicted()
    if slowest == 1:
        return found
    late = changed(step, profile=step.profile.slower(slowest)).predicted()
    wait = late.iteration_s - found.iteration_s
    parts = replace(found.breakdown, stragglers_s=found.breakdown.stragglers_s + wait)
    return replace(
        late,
        single_s=found.single_s,
        scaling_factor=found.scaling_factor * found.iteration_s / late.iteration_s,
        exposed_s=found.exposed_s + wait,
        breakdown=parts,
    )


def _shares(asked: Asked, gpus: int) -> Iterator[tuple[Profile, int]]:
    """Profiles at the micro-batches that do this job's work, and how many of each one GPU computes."""
    given, whole = asked.given, asked.global_batch(gpus)
    if whole % gpus:
        raise InputError(f"global_batch({whole}) % gpus({gpus}) = {whole % gpus} != 0: choose a multiple of {gpus}")
    share, batch, profile = whole // gpus, given.get("batch"), asked.profile
    if profile is None and batch is None:
        sizes = [size for size in MICRO_BATCHES if share % size == 0]
    else:
        # Less work than one micro-batch for each GPU is strong scaling.
        sizes = [min(batch or asked.own_batch, share)]
    for size in sizes:
        if share % size:
            raise InputError(
                f"global_batch({whole}) % (gpus({gpus}) * batch({size})) = {whole % (gpus * size)} != 0: choose a "
                f"multiple of {gpus * size}, or another batch"
            )
        yield asked.described(size) if profile is None else asked.there(_at(profile, size)), share // size


def _at(profile: Profile, batch: int) -> Profile:
    """The profile at another batch, between or beyond those that were measured."""
    if batch == profile.batch_size:
        return profile
    known = with_sibling(profile)
    if not known.batches:
        raise InputError(
            f"batch is {batch}, and profile {profile.name!r} was measured at {profile.batch_size} alone: profile it at "
            f"both (`backbeat profile --batch {profile.batch_size},{2 * profile.batch_size}`)"
        )
    return at_batch(known, batch)


@dataclass(frozen=True, kw_only=True)
class ProfileStep:
    """A way of one profile on one network."""

    profile: Profile
    network: Network
    way: Way
    framework: Framework
    micro_batches: int
    given: Mapping[str, Any]
    recompute: str = "none"

    def predicted(self) -> Prediction:
        """Its step; where nothing keeps the memory budget, without it."""
        try:
            sent, plan, reduction = self._planned()
        except InputError:
            if "memory" not in self.given:
                raise
            given = {name: value for name, value in self.given.items() if name != "memory"}
            return changed(self, given=given).predicted()
        if self.recompute == "full":
            plan = recomputed(self.profile, plan) if self.way.plan is None else plan
        found = predict(
            sent,
            self.network,
            plan,
            accumulation=self.micro_batches,
            broadcast_buffers=reduction is None or reduction.broadcast_buffers,
            reduction=reduction,
        )
        return replace(found, strategy=self.way.word, parameters=self.profile.trained)

    def _planned(self) -> tuple[Profile, Plan, Framework | None]:
        """The profile with its gradients as they are sent, the plan, and the framework that reduces by its own habits;
        None where it is torch."""
        way, given, habits = self.way, self.given, self.framework
        name = "horovod" if habits.fuses and way.name == "ddp" else way.name
        if way.plan is None and name in ("ddp", "zero1") and not habits.by_unit and not habits.fuses:
            return self._by_framework(habits.staged(1 if name == "zero1" else 0))
        choices = {_OPTIONS.get(one, one): given[one] for one in _PLANNED if one in given}
        if way.plan is not None or name == "ddp" or (way.kind == "units" and name not in BUDGETED):
            choices.pop("memory_bytes", None)
        sent, plan = resolved(
            self.profile,
            self.network,
            way.plan or (way.word if way.name == "hsdp" else name),
            accumulation=self.micro_batches,
            reduce_dtype=given.get("reduce_dtype"),
            **choices,
        )
        if given.get("overlap") == "none" and way.kind == "buckets":
            return sent, plan, replace(habits, zero=0, overlap="none", reduce_dtype=sent.gradient_dtype)
        return sent, plan, None

    def _by_framework(self, habits: Framework) -> tuple[Profile, Plan, Framework]:
        given = self.given
        if "bucket" in given:
            habits = replace(habits, bucket_bytes=(given["bucket"],), bucket_elements=None)
        if "communicators" in given:
            raise InputError(f"communicators is {given['communicators']}: {habits.name} uses one; leave it out")
        if "reduce_dtype" in given:
            habits = replace(habits, reduce_dtype=given["reduce_dtype"])
        return habits.sent(self.profile), framework_plan(self.profile, self.network, habits), habits


def _repeated(profile: Profile) -> list[str]:
    return repeated([block.name for block in profile.blocks])


def _how_much(profile: Profile, plan: Plan | None) -> str:
    """What a plan recomputes of the blocks that are alike: all, some or none."""
    segments = plan.memory.segments if plan is not None and plan.memory is not None else ()
    names = {name for one in segments if one.action == "recompute" for name in one.blocks}
    return "none" if not names else "full" if names.issuperset(_repeated(profile)) else "selective"


def recomputed(profile: Profile, plan: Plan) -> Plan:
    """The plan with every repeated block recomputed."""
    if plan.memory is not None and plan.memory.segments:
        return plan
    names = _repeated(profile)
    if not names:
        raise InputError(
            f"recompute is full, but profile {profile.name!r} has no blocks to recompute: profile it again with them"
        )
    held = plan.memory or MemoryPlan()
    segments = tuple(Segment(blocks=(name,), action="recompute") for name in names)
    return replace(plan, memory=replace(held, segments=segments), predicted=None)
