"""Compares the mesh that a plan is sharded over with the ranks of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from backbeat.comm.communicators import backend_of
from backbeat.errors import InputError
from backbeat.model import Plan, Sharding

NAMES = ("replicate", "shard")


def mesh_of(plan: Plan, sharding: Sharding, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh given, if it is the plan's; without one, the plan's over all ranks."""
    replicate, shard = sharding.mesh.replicate, sharding.mesh.shard
    shape = (replicate, shard) if replicate > 1 else (shard,)
    size = dist.get_world_size() if mesh is None else mesh.size()
    if replicate * shard != size:
        raise InputError(
            f"the plan does not fit: replicate({replicate}) * shard({shard}) != "
            f"{'world' if mesh is None else 'mesh'}({size}); make a plan for this job with `backbeat plan … "
            f"--workers {size} --strategy {plan.strategy}`"
        )
    if mesh is None:
        return init_device_mesh(_device_type(), shape, mesh_dim_names=NAMES[-len(shape) :])
    given = tuple(mesh.shape)
    # torch asks for the names of two dimensions.
    unnamed = ", without names" if mesh.ndim > 1 and mesh.mesh_dim_names is None else ""
    if given != shape or unnamed:
        raise InputError(
            f"the plan's mesh is {_words(shape)}, the one given is {_words(given)}{unnamed}: "
            f"give init_device_mesh({mesh.device_type!r}, {shape}, mesh_dim_names={NAMES[-len(shape) :]})"
        )
    return mesh


@contextmanager
def all_ranks(mesh: DeviceMesh) -> Iterator[Any]:
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


def device_of(mesh: DeviceMesh) -> torch.device:
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
