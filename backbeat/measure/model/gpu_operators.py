"""A model on the CPU runs other operators than on a GPU: what is replaced while its work is counted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_WIDE_UNDER_AUTOCAST = (
    _aten.pow.Tensor_Scalar,
    _aten.pow.Tensor_Tensor,
    _aten.rsqrt.default,
    _aten.reciprocal.default,
    _aten.exp.default,
    _aten.log.default,
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten.layer_norm.default,
    _aten.group_norm.default,
    _aten.cumsum.default,
    _aten.prod.default,
    _aten.mse_loss.default,
    _aten.l1_loss.default,
    _aten.smooth_l1_loss.default,
)
"""Of those that autocast runs in 32 bits on a GPU."""


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Transformers looks at positions to see whether sequences are packed; without data they are taken not to be."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


@contextlib.contextmanager
def gpu_operators(paused: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Operators as a GPU has them, where the CPU has others. `paused` is entered around what a GPU does not do.

    One kernel on a GPU and several on the CPU: dropout, and attention with dropout or with shared keys. In 32 bits
    under a GPU's autocast but not under the CPU's: powers, norms and the like.

    Replaced where every call arrives, those of modules and of recomputation in backward included: a checkpointed block
    must save in recomputation what it saved in forward.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if enable_gqa and query.shape[1] != key.shape[1]:
            with paused():
                key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        return attention.decompose(query, key, value, mask, 0.0, is_causal, scale=scale)

    def one_kernel(tensor: Any, p: float, train: bool) -> Any:
        return torch.ops.aten.native_dropout(tensor, p, train)[0] if train and p > 0 else tensor

    def in_32_bits(operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return operator(*tree_map(_widened, args), **tree_map(_widened, kwargs))

        return call

    library = torch.library.Library("aten", "IMPL")
    library.impl(attention, without_dropout, "AutogradCPU")
    library.impl("dropout", one_kernel, "AutogradCPU")
    for operator in _WIDE_UNDER_AUTOCAST:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutocastCPU"):
            library.impl(operator, in_32_bits(operator), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
