"""A sharded plan on a model: torch's own `fully_shard`, unit by unit. Nothing of ours runs in a training step, but for
BatchNorm that is in lower precision (`batchnorm`) or recomputed.

    from backbeat.runtime import fully_shard

    mesh = init_device_mesh("cuda", (8,))
    fully_shard(model, plan="plan.json", mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())      # after sharding: it updates shards

The model is torch's `FSDPModule` afterwards, and all that is said of FSDP2 holds: `clip_grad_norm_`, accumulation by
`model.set_requires_gradient_sync`, distributed checkpoints. Every rank must call every unit, in one order: ranks that
leave out different ones gather each other's weights.

- Weights and buffers are rank 0's on every rank, as DDP makes them. What is on the meta device is left alone: give it
  values with `load_full_state_dict`.
- Buffers are not synchronised in training. Each rank has its own running statistics, and rank 0's are those that DDP
  would have: DDP gives rank 0's to all before each forward. Evaluate with `SyncBatchNorm`, or load rank 0's state dict.
- Blocks that the plan recomputes are, by torch's own activation checkpointing; norms in them count each batch once.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_params_and_buffers

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators, backend_of
from backbeat.errors import CommunicationError, InputError, first_line
from backbeat.measure.model.chain import planned_module
from backbeat.model import Plan, Sharding
from backbeat.runtime.memory.forward_context import statistics_unchanged
from backbeat.runtime.plain_model import check_model
from backbeat.runtime.running_plans import runs
from backbeat.runtime.sharded.batchnorm import keep_statistics_dtype
from backbeat.runtime.sharded.torch_fsdp import check_settings, mixed_precision, set_settings
from backbeat.runtime.torch_internals import TorchDDP

logger = logging.getLogger("backbeat.runtime")

_BROADCAST_BYTES = 250 * 2**20
"""DDP's own."""
_NAMES = ("replicate", "shard")


def fully_shard(model: nn.Module, plan: Plan | str | os.PathLike[str], mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard the model in place as the plan says; returns it. Every rank of the mesh calls it with the same plan.

    Without a mesh, the plan's own is made over all ranks. A plan that does not fit the model, the ranks or the
    installed torch is refused before anything is changed.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    loaded.need_ours("fully_shard")
    sharding = loaded.sharding
    if sharding is None:
        raise InputError(
            f"the plan of strategy {loaded.strategy!r} has buckets and no sharding: run it with "
            "backbeat.runtime.DistributedDataParallel, or make a plan of strategy fsdp or sharded"
        )
    _check(model)
    check_settings(loaded, sharding)
    units = find_units(model, loaded, sharding)
    recomputed = _recomputed(model, loaded)
    mesh = mesh_of(loaded, sharding, mesh)
    device = _device_of(mesh)
    with _all_ranks(mesh) as group:
        _compare(model, loaded, sharding, group, device)
        _check_dtypes(model, units)
        for block in recomputed:
            checkpoint(block, context_fn=partial(_contexts, block))
        # The root takes what is left, and torch decides whether it is resharded.
        for modules, reshard in [*((unit.modules, unit.reshard) for unit in units), ([model], None)]:
            _synchronise(modules, group, device)
            own = [one for module in modules for one in module.parameters() if not isinstance(one, DTensor)]
            policy = mixed_precision(sharding, own)
            together = modules if len(modules) > 1 else modules[0]
            torch_fully_shard(together, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            keep_statistics_dtype(modules, policy.param_dtype)
        if dist.get_rank(group) == 0:
            _tell_loop(sharding)
    firsts: list[Any] = [unit.modules[0] for unit in units]
    for index, unit in enumerate(units):
        if ahead := firsts[index + 1 : index + 1 + unit.prefetch]:
            firsts[index].set_modules_to_forward_prefetch(ahead)
    set_settings(model, sharding)
    runs(model, loaded)
    return model


def _tell_loop(sharding: Sharding) -> None:
    """Log what the training loop must do under accumulation: `fully_shard` cannot do it."""
    for differs, call in (
        (sharding.gradient_sync == "last", "model.set_requires_gradient_sync(last)"),
        (not sharding.reshard_after_backward, "model.set_reshard_after_backward(last)"),
    ):
        if differs:
            logger.warning("with gradient accumulation, call %s before each backward: the plan counts on it", call)


def _check(model: nn.Module) -> None:
    if isinstance(model, TorchDDP):
        raise InputError("the model is wrapped in DistributedDataParallel: give the model inside, model.module")
    check_model(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise InputError(f"parameter {name!r} is a scalar, which FSDP2 cannot shard: give it one dimension")


def _recomputed(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The blocks that are computed again in backward."""
    if plan.memory is None:
        return []
    modules = dict(model.named_modules())
    found = []
    for index, segment in enumerate(plan.memory.segments):
        if segment.action == "keep":
            continue
        if segment.action != "recompute" or segment.input != "keep" or len(segment.blocks) > 1:
            raise InputError(
                f"memory.segments[{index}] is {segment.action!r} over {len(segment.blocks)} blocks, with its input "
                f"{segment.input!r}: in a sharded plan torch's own checkpoint recomputes one block at a time; make the "
                "plan again with a sharded strategy"
            )
        (name,) = segment.blocks
        found.append(planned_module(modules, f"memory.segments[{index}]", name, repr(plan.model)))
    return found


@dataclass(slots=True, kw_only=True)
class UnitModules:
    """One `fully_shard` call: one all-gather and one reduce-scatter over all parameters of its modules. What no unit
    holds is the root's."""

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


def _check_dtypes(model: nn.Module, units: list[UnitModules]) -> None:
    """FSDP2 wants one dtype in a unit, and says so only when it is used."""
    unit_of = {id(one): unit for unit in units for module in unit.modules for one in module.parameters()}
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            unit = unit_of.get(id(parameter))
            other, dtype = first.setdefault(id(unit), (name, parameter.dtype))
            if parameter.dtype != dtype:
                where = "the root (what no unit has)" if unit is None else f"the unit of {unit.names[0]!r}"
                raise InputError(
                    f"{where} holds {other!r} in {dtype} and {name!r} in {parameter.dtype}: FSDP2 shards one dtype "
                    "together; give the module of one of them a unit of its own, or convert it"
                )


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
    """Units whose modules share a parameter become one, and take such modules from the root. Otherwise torch shards the
    parameter once for every unit that holds it, and silently trains the copies apart."""
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


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a block's forward, and around its second run, in which torch alone would count each batch again."""
    return nullcontext(), statistics_unchanged(block.modules())


def _compare(model: nn.Module, plan: Plan, sharding: Sharding, group: Any, device: torch.device) -> None:
    """Raise where ranks have different models or plans: they would wait for each other for ever."""
    kept = plan.memory.segments if plan.memory is not None else ()
    lines = [
        *(f"{name}={value}" for name, value in asdict(sharding).items() if name != "units"),
        *(f"units[{index}] of {asdict(unit)}" for index, unit in enumerate(sharding.units)),
        *(f"memory.segments[{index}] of {asdict(segment)}" for index, segment in enumerate(kept)),
    ]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype} trained {parameter.requires_grad}")
    try:
        communicators = Communicators(group, device, 1)
        RankStore(communicators, "fully_shard").agree(lines, "the model or its plan")
    except dist.DistStoreError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}: fully_shard waited for the other ranks of the mesh in vain: one ended, hangs, or "
            "did not call it; look at what each printed last, and start again on every rank (the library says: "
            f"{first_line(error)})"
        ) from error
    communicators.close()


def _synchronise(modules: Sequence[nn.Module], group: Any, device: torch.device) -> None:
    """Rank 0's values on every rank. Unit by unit: on the device, only one is whole at a time."""
    states: dict[torch.Tensor, None] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                # As torch's fully_shard does it next.
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
                states[tensor] = None
    if dist.get_world_size(group) > 1:
        _sync_params_and_buffers(group, [tensor.detach() for tensor in states], _BROADCAST_BYTES, 0)


def mesh_of(plan: Plan, sharding: Sharding, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh given, if it is the plan's; without one, the plan's over all ranks."""
    replicate, shard = sharding.mesh.replicate, sharding.mesh.shard
    shape = (replicate, shard) if replicate > 1 else (shard,)
    size = dist.get_world_size() if mesh is None else mesh.size()
    if replicate * shard != size:
        raise InputError(
            f"the plan does not fit: replicate({replicate}) * shard({shard}) != "
            f"{'world' if mesh is None else 'mesh'}({size}); make a plan for this job with `backbeat plan … "
            f"--gpus {size} --way {plan.strategy}`"
        )
    if mesh is None:
        return init_device_mesh(_device_type(), shape, mesh_dim_names=_NAMES[-len(shape) :])
    given = tuple(mesh.shape)
    # torch asks for the names of two dimensions.
    unnamed = ", without names" if mesh.ndim > 1 and mesh.mesh_dim_names is None else ""
    if given != shape or unnamed:
        raise InputError(
            f"the plan's mesh is {_words(shape)}, the one given is {_words(given)}{unnamed}: "
            f"give init_device_mesh({mesh.device_type!r}, {shape}, mesh_dim_names={_NAMES[-len(shape) :]})"
        )
    return mesh


@contextmanager
def _all_ranks(mesh: DeviceMesh) -> Iterator[Any]:
    """One process group over all ranks of a mesh."""
    if mesh.ndim == 1:
        yield mesh.get_group()
    elif mesh.size() == dist.get_world_size():
        yield dist.group.WORLD
    else:
        made = dist.new_group([int(rank) for rank in mesh.mesh.flatten()], use_local_synchronization=True)
        yield made
        # Only after success: taking down a group whose peer is gone can wait for ever.
        dist.destroy_process_group(made)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device, as torch finds it: the current one of the mesh's kind."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _device_type() -> str:
    """The accelerator's, where the process group has a library of its kind; gloo's is for CPU tensors."""
    found = torch.accelerator.current_accelerator(check_available=True)
    world: Any = dist.group.WORLD
    return found.type if found is not None and backend_of(world, found) not in ("", "gloo") else "cpu"


def _words(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} ranks in one dimension" if len(shape) == 1 else " x ".join(map(str, shape))
