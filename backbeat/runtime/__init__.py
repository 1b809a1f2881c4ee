"""The plan, running: a drop-in `DistributedDataParallel`, sharded plans on torch's own `fully_shard`, and `parallelize`
for whichever is faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backbeat.errors import BrokenStepError, CommunicationError, MissingPartError, StepMismatchError

try:
    import torch.distributed as _distributed
except ImportError as error:
    raise MissingPartError(
        "backbeat.runtime needs PyTorch, which is not installed: pip install -e '.[torch]' in the checkout"
    ) from error

if not _distributed.is_available():
    raise MissingPartError("backbeat.runtime needs a PyTorch built with torch.distributed: install another build")

from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.watch import Watch

if TYPE_CHECKING:
    from backbeat.runtime.parallel.every_kind import full_state_dict, load_full_state_dict, no_sync
    from backbeat.runtime.parallel.parallelize import parallelize
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
    "no_sync",
    "parallelize",
]

_LATER = {
    "fully_shard": "sharded.shard",
    "full_state_dict": "parallel.every_kind",
    "load_full_state_dict": "parallel.every_kind",
    "no_sync": "parallel.every_kind",
    "parallelize": "parallel.parallelize",
}


def __getattr__(name: str) -> Any:
    """What needs FSDP2 or the planners is imported when it is asked for: torch takes a second for the first."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
