"""Which modules of a model form the units of a plan.

One unit is one all-gather and one reduce-scatter over all parameters of its modules. What no unit holds is the root's.

Modules that share a parameter belong to one unit. Otherwise torch shards the parameter once for every unit that holds
it, and silently trains the copies apart.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from backbeat.errors import InputError
from backbeat.measure.model.chain import planned_module
from backbeat.model import Plan, Sharding

logger = logging.getLogger("backbeat.runtime")


@dataclass(slots=True, kw_only=True)
class UnitModules:
    """One `fully_shard` call."""

    names: list[str]
    modules: list[nn.Module]
    reshard: bool
    """torch's `reshard_after_forward`."""
    prefetch: int
    """All-gathers of this many following units are issued before this unit's forward."""


def find_units(model: nn.Module, plan: Plan, sharding: Sharding) -> list[UnitModules]:
    """The units in the plan's order, which is that of forward, without the root."""
    known = dict(model.named_modules(remove_duplicate=False))
    units = []
    for index, unit in enumerate(sharding.units):
        modules = [planned_module(known, f"sharding.units[{index}]", name, repr(plan.model)) for name in unit.modules]
        units.append(UnitModules(names=[*unit.modules], modules=modules, reshard=unit.reshard, prefetch=unit.prefetch))
    _check_once(units)
    return _joined(model, units)


def _check_once(units: list[UnitModules]) -> None:
    """A module may have several names; names that nest are refused with the plan."""
    names: dict[nn.Module, str] = {}
    for index, unit in enumerate(units):
        for name, module in zip(unit.names, unit.modules, strict=True):
            for inner in module.modules():
                if inner in names:
                    raise InputError(
                        f"sharding.units[{index}] names {name!r}, which shares a module with {names[inner]!r}: a "
                        "module is in one unit, once; remove one of the two"
                    )
            names |= dict.fromkeys(module.modules(), name)


def _joined(model: nn.Module, units: list[UnitModules]) -> list[UnitModules]:
    """Units whose modules share a parameter become one, and take such modules from the root."""
    owners: dict[nn.Parameter, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter][name] = module
    for tied in (found for found in owners.values() if len(found) > 1):
        unit_of = {inner: unit for unit in units for module in unit.modules for inner in module.modules()}
        held = [unit for unit in units if any(unit_of.get(module) is unit for module in tied.values())]
        rest = {name: module for name, module in tied.items() if module not in unit_of}
        if not held or (len(held) == 1 and not rest):
            continue
        first, *others = held
        for name, module in rest.items():
            if any(inner in unit_of for inner in module.modules()):
                raise InputError(
                    f"module {name!r} shares a parameter with {first.names[0]!r} and holds modules of the plan's "
                    f"units: FSDP2 cannot shard the two together; remove the unit of {first.names[0]!r} from the plan"
                )
        for other in others:
            first.names += other.names
            first.modules += other.modules
        first.names += rest
        first.modules += rest.values()
        units = [unit for unit in units if unit not in others]
        if dist.is_initialized() and dist.get_rank() > 0:
            continue
        logger.warning(
            "modules %s share a parameter, so that they are one unit (%s), which the plan does not say",
            " and ".join(map(repr, tied)),
            ", ".join(first.names),
        )
    return units
