"""Candidates of `parallelize(plan="auto")`: the best plan of each kind by prediction."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import torch

from backbeat.errors import BackbeatError, InputError
from backbeat.model import Network, Plan, PlanPrediction, Profile
from backbeat.model.framework import FRAMEWORKS
from backbeat.model.rule import simplicity
from backbeat.planners import BUDGETED, unit_strategies
from backbeat.planners.planned import planned as make_plan
from backbeat.steps.predict import predict
from backbeat.units import counted

SHARDED_KINDS = ("units", "copies")
"""Units of one sharded copy of the model, and of several: HSDP."""
KINDS = ("stock", "buckets", *SHARDED_KINDS, "compressed")
STOCK_FRAMEWORK = FRAMEWORKS["torch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    kind: str
    plan: Plan

    @property
    def _predicted(self) -> PlanPrediction:
        return self.plan.predicted or PlanPrediction()

    @property
    def predicted_s(self) -> float:
        return self._predicted.iteration_s or 0.0

    @property
    def bound_s(self) -> float:
        return self._predicted.bound_s or 0.0

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Lower is simpler."""
        plan, mesh = self.plan, {}
        if plan.sharding is not None:
            mesh = {"replicate": plan.sharding.mesh.replicate, "shard": plan.sharding.mesh.shard}
        way = {"stock": "ddp", "compressed": "compressed"}.get(self.kind, plan.strategy)
        pieces = len(plan.buckets) if plan.sharding is None else len(plan.sharding.units)
        return simplicity(way, mesh, communicators=plan.communicators, buckets=pieces)

    @property
    def name(self) -> str:
        """In words."""
        plan = self.plan
        if self.kind == "stock":
            return "stock DDP"
        recomputed = plan.memory is not None and not plan.memory.keeps_all
        ending = " within the memory budget" if recomputed else ""
        if plan.sharding is not None:
            dtype = plan.sharding.param_dtype
            gathered = "" if dtype == "fp32" else f", parameters in {dtype}"
            units = counted(len(plan.sharding.units), "unit")
            return f"{units} of {plan.strategy} on {plan.sharding.mesh}{gathered}{ending}"
        compressed = ", some compressed," if plan.compressed else ""
        on = counted(plan.communicators, "communicator")
        return f"{counted(len(plan.buckets), 'bucket')}{compressed} of {plan.strategy} on {on}{ending}"


def predicted_candidates(
    profile: Profile,
    network: Network,
    *,
    memory_bytes: int | None,
    compression: bool,
    communicators: int | None,
    units: bool = True,
) -> list[Candidate]:
    """The best by prediction of each kind, stock DDP first. Raises where nothing fits the memory.

    units: False where ranks use different parameters. FSDP2 gathers a unit on the ranks that call it, and ranks that
        call different ones would wait for each other, or take each other's weights.

    Predictions of one kind share their errors. So one candidate of each of two kinds says more than two of one kind.
    """
    found: list[Candidate] = []
    why: dict[str, str] = {}

    def add(kind: str, strategy: str, **choices: Any) -> None:
        try:
            plan = make_plan(profile, network, strategy, **choices)
        except BackbeatError as error:
            why[strategy] = str(error)
            return
        several = plan.sharding is not None and plan.sharding.mesh.replicate > 1
        found.append(Candidate(kind="copies" if several else kind, plan=plan))

    add("stock", "ddp", memory_bytes=memory_bytes)
    add("buckets", "best", communicators=communicators, memory_bytes=memory_bytes)
    version = _release(torch.__version__)
    if not units:
        why["sharded"] = "ranks use different parameters, and FSDP2 must gather the same units on all"
    for strategy in unit_strategies(network) if units else ():
        choices = {"memory_bytes": memory_bytes, "torch_version": version} if strategy in BUDGETED else {}
        add("units", strategy, **choices)
    if compression:
        add("compressed", "compressed", communicators=communicators, memory_bytes=memory_bytes)
    fitting = [
        _as_stock(one, profile, network) if one.kind == "stock" else one
        for one in found
        # Where no bucket is compressed after all, the plan is one of buckets.
        if _fits(one, memory_bytes) and (one.kind != "compressed" or one.plan.compressed)
    ]
    if not fitting:
        raise InputError(
            "; ".join(f"{strategy}: {why[strategy]}" for strategy in ("best", "sharded") if strategy in why)
        )
    best = {
        kind: min((one for one in fitting if one.kind == kind), key=attrgetter("predicted_s"), default=None)
        for kind in KINDS
    }
    stock, planned = best["stock"], best["buckets"]
    if stock is not None and planned is not None and stock.plan.buckets == planned.plan.buckets:
        best["buckets"] = None
    return [one for one in best.values() if one is not None]


def _release(version: str) -> str:
    """
    >>> _release("2.13.0a0+git12")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def _fits(candidate: Candidate, memory_bytes: int | None) -> bool:
    """Whether it keeps to the budget; stock DDP does only where all activations may be kept."""
    plan = candidate.plan
    if memory_bytes is None:
        return True
    if candidate.kind == "stock":
        return plan.memory is None or plan.memory.keeps_all
    peak = plan.predicted.peak_bytes if plan.predicted is not None else None
    return peak is None or peak <= memory_bytes


def _as_stock(candidate: Candidate, profile: Profile, network: Network) -> Candidate:
    """Stock DDP runs without a memory plan, and without what the wrapper adds to a step: its status message."""
    found = predict(profile, network, candidate.plan, reduction=STOCK_FRAMEWORK)
    predicted = found.kept(network.name)
    return Candidate(kind="stock", plan=msgspec.structs.replace(candidate.plan, memory=None, predicted=predicted))
