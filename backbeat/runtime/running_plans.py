"""Which plan each model runs: the one place that says it, whatever runs it. A user's model carries nothing of ours."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.nn import Module

from backbeat.model import Plan

_plans: WeakKeyDictionary[Module, Plan] = WeakKeyDictionary()
"""By the plain model, inside its wrapper; of units, the model that they are in."""


def runs(model: Module, plan: Plan | None) -> None:
    """The model runs this plan from now on; None: buckets of no plan."""
    if plan is None:
        _plans.pop(model, None)
    else:
        _plans[model] = plan


def plan_of(model: Module | None) -> Plan | None:
    """The plan that the model runs; None where it runs none."""
    return None if model is None else _plans.get(model)
