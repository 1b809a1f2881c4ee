"""The plan, running: a drop-in `DistributedDataParallel`, and sharded plans on torch's own `fully_shard`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backbeat.errors import CommunicationError, MissingPartError

try:
    import torch.distributed as _distributed
except ImportError as error:
    raise MissingPartError(
        "backbeat.runtime needs PyTorch, which is not installed: pip install 'backbeat[torch]'"
    ) from error

if not _distributed.is_available():
    raise MissingPartError("backbeat.runtime needs a PyTorch built with torch.distributed: install another build")

from backbeat.runtime.reduce.failures import BrokenStepError, StepMismatchError
from backbeat.runtime.reduce.wrapper import DistributedDataParallel
from backbeat.runtime.watch import Watch

if TYPE_CHECKING:
    from backbeat.runtime.sharded.full_state import full_state_dict, load_full_state_dict
    from backbeat.runtime.sharded.shard import fully_shard

__all__ = [
    "BrokenStepError",
    "CommunicationError",
    "DistributedDataParallel",
    "StepMismatchError",
    "Watch",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
]

_SHARDED = {"fully_shard": "shard", "full_state_dict": "full_state", "load_full_state_dict": "full_state"}


def __getattr__(name: str) -> Any:
    """What needs FSDP2 is imported when it is asked for: torch takes a second for that."""
    if name not in _SHARDED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.sharded.{_SHARDED[name]}"), name)
