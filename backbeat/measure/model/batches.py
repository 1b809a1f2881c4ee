"""A batch of any shape: tensors in nested containers, how many samples they hold, and how many tokens a sample has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with everything in it changed; containers keep their types, apart from those of `dict`."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(item, change) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_batch(item, change) for item in batch)
    if isinstance(batch, dict) and not hasattr(batch, "to"):
        return {key: map_batch(item, change) for key, item in batch.items()}
    return change(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all that can move on the device."""
    return map_batch(batch, lambda item: item.to(device) if callable(getattr(item, "to", None)) else item)


def tensors_in(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return []


def samples_in(batch: Any) -> int | None:
    """The length of the first tensor that has one."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0 and tensor.shape[0]), None)


def sequence_length(batch: Any) -> int | None:
    """Tokens in one sample: the width of `input_ids`, or of a batch that begins with a matrix of integers.

    >>> sequence_length((torch.zeros(8, 512, dtype=torch.long), torch.zeros(8)))
    512
    >>> sequence_length((torch.zeros(8, 3, 32, 32), torch.zeros(8, 512, dtype=torch.long))) is None
    True
    """
    found = tensors_in(batch)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        found = [batch["input_ids"]]
    if not found or found[0].dim() != 2 or found[0].dtype not in (torch.int64, torch.int32):
        return None
    return int(found[0].shape[1]) or None
