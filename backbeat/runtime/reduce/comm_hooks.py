"""Communication hooks written for stock DDP, run on our groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.runtime.reduce.bucket import BucketBuffer

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """A group as hooks see it: the methods of torch's `dist.GradBucket`, which cannot be built from Python."""

    def __init__(self, bucket: BucketBuffer, index: int, last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.payload
        self._index = index
        self._last = last

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return list(self._bucket.views)

    def parameters(self) -> list[Parameter]:
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor


def result_of(future: Any, group: int) -> torch.Tensor:
    """The tensor a hook's future holds: itself, or alone in a list."""
    if not hasattr(future, "wait"):
        raise InputError(
            f"the communication hook returned {type(future).__name__} for group {group}: it must return a future"
        )
    value = future.wait()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"the communication hook's future holds {type(value).__name__} for group {group}: it must hold one tensor"
        )
    return value


def builtin(kind: Any) -> Hook:
    """Torch's C++ hooks by their Python twins."""
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    if kind == BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    raise InputError(f"built-in communication hook {kind} is unknown: use ALLREDUCE or FP16_COMPRESS")
