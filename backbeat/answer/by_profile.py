"""One data-parallel way of a profile: its plan, its step under the framework's habits, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from backbeat.answer.ways import Way
from backbeat.errors import InputError
from backbeat.model import Framework, MemoryPlan, Network, Plan, Prediction, Profile, Segment
from backbeat.planners import BUDGETED
from backbeat.planners.baselines import framework_plan
from backbeat.planners.planned import resolved
from backbeat.steps.model_chain import repeated
from backbeat.steps.predict import predict

_PLANNED = ("bucket", "communicators", "density", "memory")
_OPTIONS = {"bucket": "bucket_bytes", "memory": "memory_bytes"}


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
        """Its step."""
        sent, plan, reduction = self._planned()
        if self.recompute == "full":
            plan = recomputed(self.profile, plan)
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
        own = way.plan is None and name in ("ddp", "zero1") and not habits.by_unit and not habits.fuses
        late = given.get("overlap") == "none" and way.kind == "buckets"
        if own:
            habits = habits.staged(1 if name == "zero1" else 0)
            if "bucket" in given:
                habits = replace(habits, bucket_bytes=(given["bucket"],), bucket_elements=None)
            if "communicators" in given:
                raise InputError(f"communicators is {given['communicators']}: {habits.name} uses one; leave it out")
            if "reduce_dtype" in given:
                habits = replace(habits, reduce_dtype=given["reduce_dtype"])
            plan = framework_plan(self.profile, self.network, habits)
            return habits.sent(self.profile), plan, habits
        choices = {_OPTIONS.get(one, one): given[one] for one in _PLANNED if one in given}
        if way.kind == "units" and name not in BUDGETED:
            choices.pop("memory_bytes", None)
        sent, plan = resolved(
            self.profile,
            self.network,
            way.plan or (way.word if way.name == "hsdp" else name),
            accumulation=self.micro_batches,
            reduce_dtype=given.get("reduce_dtype"),
            **choices,
        )
        reduction = None
        if late:
            reduction = replace(self.framework, zero=0, overlap="none", reduce_dtype=sent.gradient_dtype)
        return sent, plan, reduction


def recomputed(profile: Profile, plan: Plan) -> Plan:
    """The plan with every repeated block recomputed."""
    if plan.memory is not None and plan.memory.segments:
        return plan
    names = repeated([block.name for block in profile.blocks])
    if not names:
        raise InputError(
            f"recompute is full, but profile {profile.name!r} has no blocks to recompute: profile it again with them"
        )
    held = plan.memory or MemoryPlan()
    segments = tuple(Segment(blocks=(name,), action="recompute") for name in names)
    return replace(plan, memory=replace(held, segments=segments), predicted=None)
