"""Communication hooks written for stock DDP reduce the buckets; the plan still says which and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Parameter

from backbeat.errors import BackbeatError, InputError
from backbeat.runtime.reduce.bucket import BucketMemory
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.exchange import Exchange
from backbeat.runtime.reduce.step import InFlight

Hook = Callable[[Any, Any], Any]


class HookExchange(Exchange):
    """A communication hook written for stock DDP reduces the buckets."""

    def __init__(self, context: ReducerContext, state: Any, hook: Hook) -> None:
        super().__init__(context)
        self._state = state
        self._hook = hook

    def carries_status(self, bucket: BucketMemory) -> bool:
        return False

    def send(self, index: int, bucket: BucketMemory, status: torch.Tensor | None) -> InFlight:
        if bucket.sparse:
            return super().send(index, bucket, status)
        last = index == len(self.context.bucket_set.buckets) - 1
        return InFlight(index, bucket, bucket.payload, self._hook(self._state, GradBucket(bucket, index, last)))

    def wait_for_last(self) -> None:
        """A hook's buckets come in an order of their own."""

    def receive(self, sent: InFlight) -> torch.Tensor:
        if sent.bucket.sparse:
            return super().receive(sent)
        try:
            return _tensor_of_future(sent.work, sent.bucket_index)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, BackbeatError):
                raise
            raise self.context.failure(sent.bucket_index, error) from error


class GradBucket:
    """A bucket as hooks see it: the methods of torch's `dist.GradBucket`, which cannot be built from Python."""

    def __init__(self, bucket: BucketMemory, index: int, last: bool) -> None:
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


def _tensor_of_future(future: Any, index: int) -> torch.Tensor:
    """The tensor a hook's future holds: itself, or alone in a list."""
    if not hasattr(future, "wait"):
        raise InputError(
            f"the communication hook returned {type(future).__name__} for bucket {index}: it must return a future"
        )
    value = future.wait()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"the communication hook's future holds {type(value).__name__} for bucket {index}: it must hold one tensor"
        )
    return value


def builtin_hook(kind: Any) -> Hook:
    """Torch's C++ hooks by their Python twins."""
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    if kind == BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    raise InputError(f"built-in communication hook {kind} is unknown: use ALLREDUCE or FP16_COMPRESS")
