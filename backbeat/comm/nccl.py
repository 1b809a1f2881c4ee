"""NCCL with several communicators: when that is safe, and what makes it so."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
MOST_COMMUNICATORS = 16

_FIRST_VERSION = (2, 26)
"""The first NCCL that has the launch order."""


def set_nccl_launch_order(process_group: Any = None, device: torch.device | None = None) -> None:
    """Set `NCCL_LAUNCH_ORDER_IMPLICIT=1` in this process's environment, unless it is set already.

    Every NCCL communicator of the process, also those of other libraries, then launches its kernels in the order of the
    host's calls. Without it, collectives in flight on two communicators can start in another order on another rank, and
    both wait for ever. Processes started later inherit the variable.

    NCCL reads it with the first communicator, so call this before. Given a process group, it sets nothing where that
    group is not NCCL's on this device, or where it or the job's own has its communicator already.
    """
    if process_group is not None:
        world = dist.group.WORLD if dist.is_initialized() else None
        if _has_communicator(process_group, device) is not False or (world and _has_communicator(world, device)):
            return
    os.environ.setdefault(LAUNCH_ORDER, "1")


def _has_communicator(process_group: Any, device: torch.device | None) -> bool | None:
    """Whether NCCL has made it; None where the process group is not NCCL's on this device."""
    try:
        made = getattr(process_group._get_backend(device), "_is_initialized", None)
    except RuntimeError:
        return None
    # Made at once where a device was given, and in the background: until it is done the library says that it is not.
    return None if made is None else made() or _is_eager(process_group)


def _is_eager(process_group: Any) -> bool:
    return getattr(process_group, "bound_device_id", None) is not None


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def why_one_nccl() -> str | None:
    """Why this process may use only one NCCL communicator at a time; None where it may use several."""
    version = nccl_version()
    if version < _FIRST_VERSION:
        found = ".".join(str(part) for part in version)
        return f"NCCL {found} has no {LAUNCH_ORDER} (2.26 or newer does)"
    if os.environ.get(LAUNCH_ORDER) != "1":
        eager = dist.is_initialized() and _is_eager(dist.group.WORLD)
        which = " which init_process_group(device_id=…) makes," if eager else ""
        return (
            f"{LAUNCH_ORDER}=1 was not set before the first NCCL communicator,{which} and without it collectives on "
            "several communicators can deadlock"
        )
    return None
