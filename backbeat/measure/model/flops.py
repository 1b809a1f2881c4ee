"""The arithmetic of one iteration: floating-point operations, from shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from backbeat.measure.model.chain import in_backward, is_compiled
from backbeat.measure.model.operator_work import arguments_by_name, is_attention
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
    if not is_attention(func):
        count = flop_registry.get(func.overloadpacket)
        return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    # Of all scores, those that a mask hides included. What backward computes again of forward is not counted.
    given = arguments_by_name(func, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, length, width = query.shape
    flops = 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])
    return float(flops * 2 if "backward" in str(func) else flops)


def count_flops(training: Training) -> tuple[float | None, str | None]:
    """(FLOPs of one micro-batch, None), or (None, why they are not known)."""
    if is_compiled(training.model):
        return None, "no FLOPs: a compiled model hides them"
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
