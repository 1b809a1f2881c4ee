"""How much arithmetic one sample takes, and how many tokens it has: what MFU and tokens/s are counted from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from backbeat.measure.model.batches import tensors_in
from backbeat.measure.model.chain import in_backward
from backbeat.measure.model.operator_work import attention_flops, is_attention
from backbeat.measure.model.training_step import Training, is_out_of_memory


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up matrix products, convolutions and attention, a multiply-add being two, by torch's own formulas.

    Forwards that run again inside backward are not counted: the model needs them once, however memory is saved.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Backward's own operations build no graph; a forward inside it does.
        if not (in_backward() and torch.is_grad_enabled()):
            self.total += _flops(func, args, kwargs, result)
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    if is_attention(func):
        return attention_flops(func, args, kwargs)
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def count_flops(training: Training) -> tuple[float | None, str | None]:
    """(FLOPs of one micro-batch, None), or (None, why they are not known)."""
    counter = FlopCounter()
    try:
        with counter:
            loss = training.forward()
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, f"no FLOPs: counting them raised {type(error).__name__}"
    finally:
        training.optimizer.zero_grad(set_to_none=True)
    if counter.total == 0:
        return None, "no FLOPs: torch sees no matrix product, convolution or attention in the model"
    return counter.total, None


def sequence_length(batch: Any) -> int | None:
    """Tokens in one sample: the width of `input_ids`, or of a batch that begins with a matrix of integers.

    >>> sequence_length((torch.zeros(8, 512, dtype=torch.long), torch.zeros(8)))
    512
    >>> sequence_length((torch.zeros(8, 3, 32, 32), torch.zeros(8, 512, dtype=torch.long))) is None
    True
    """
    found: list[Tensor] = tensors_in(batch)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        found = [batch["input_ids"]]
    if not found or found[0].dim() != 2 or found[0].dtype not in (torch.int64, torch.int32):
        return None
    return int(found[0].shape[1]) or None
