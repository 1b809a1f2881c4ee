"""NCCL with several communicators: when that is safe, and what makes it so."""

from __future__ import annotations

import os
from typing import Any

import torch

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
MOST_COMMUNICATORS = 16
_FIRST_VERSION = (2, 26)


def set_nccl_launch_order(process_group: Any = None, device: torch.device | None = None) -> None:
    """Set `NCCL_LAUNCH_ORDER_IMPLICIT=1` in this process's environment, unless it is set already.

    Every NCCL communicator of the process, also those of other libraries, then launches its kernels in the order of the
    host's calls. Without it, collectives in flight on two communicators can start in another order on another rank, and
    both wait for ever. Processes started later inherit the variable.

    NCCL reads it with the first communicator, so call this before. Given a process group, it sets nothing where that
    group is not NCCL's on this device, or has its communicator already.
    """
    if process_group is not None:
        is_initialized = getattr(process_group._get_backend(device), "_is_initialized", None)
        if is_initialized is None or is_initialized():
            return
    os.environ.setdefault(LAUNCH_ORDER, "1")


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def why_one_nccl() -> str | None:
    """Why this process may use only one NCCL communicator at a time; None where it may use several."""
    version = nccl_version()
    if version < _FIRST_VERSION:
        found = ".".join(str(part) for part in version)
        return f"NCCL {found} has no {LAUNCH_ORDER} (2.26 or newer does)"
    if os.environ.get(LAUNCH_ORDER) != "1":
        return (
            f"{LAUNCH_ORDER}=1 was not set before the first NCCL communicator, and without it collectives on several "
            "communicators can deadlock"
        )
    return None
