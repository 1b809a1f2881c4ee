"""What one operation makes a GPU do: arithmetic, traffic, kernels. Taken from shapes, never from data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from backbeat.cost.roofline import OperatorWork

_ATTENTION = "_scaled_dot_product"
# Flash attention's backward recomputes the scores: five products to forward's two.
_ATTENTION_BACKWARD = 2.5
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
# Tensor cores load 16 bytes at a time; rows that are no multiple of it need slower kernels.
_ALIGNED_BYTES = 16
_NOTHING = OperatorWork(0, 0, False)


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> OperatorWork:
    """Views move nothing."""
    name = func._schema.name
    if any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns):
        return _NOTHING
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not outputs or name in _ALLOCATIONS:
        return _NOTHING
    half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in inputs)
    moved = sum(_bytes(tensor) for tensor in {id(tensor): tensor for tensor in inputs}.values())
    moved += sum(_bytes(tensor) for tensor in outputs)
    if name in ("aten::convolution", "aten::convolution_backward"):
        return _convolution(_given(func, args, kwargs), result, moved, half)
    if is_attention(func):
        flops = attention_flops(func, args, kwargs)
        # Kernels skip the half of the scores that a causal mask hides.
        return OperatorWork(flops / 2 if _given(func, args, kwargs).get("is_causal") else flops, moved, half)
    if "embedding" in name and "backward" not in name:
        # A lookup reads the rows it returns, not the whole table.
        return OperatorWork(0, 2 * sum(_bytes(tensor) for tensor in outputs), half)
    if "_norm" in name and len(outputs) > 1:
        return _normalisation(name, inputs, moved, half)
    count = flop_registry.get(func.overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    aligned = name not in _PRODUCTS or all(_is_aligned(tensor) for tensor in (*inputs, *outputs) if tensor.dim() > 1)
    return OperatorWork(flops, moved, half, aligned=aligned)


def _convolution(given: dict[str, Any], result: Any, moved: int, half: bool) -> OperatorWork:
    inputs, weight, groups = given["input"], given["weight"], given["groups"]
    backward = "grad_output" in given
    output = given["grad_output"] if backward else result
    spatial = (inputs if given["transposed"] else output).shape[2:].numel()
    flops = 2.0 * inputs.shape[0] * spatial * weight.numel()
    depthwise = groups > 1 and groups == inputs.shape[1]
    # Tensor cores want channels last: a channels-first tensor is turned round on its way in, and on its way out.
    turned = 0 if depthwise or _is_channels_last(inputs) else 2 * (_bytes(inputs) + _bytes(output))
    kernels = 1
    if backward:
        kernels = sum(1 for wanted in given["output_mask"][:2] if wanted)
        flops, turned = flops * kernels, turned * kernels
        # Each of the two gradients is a kernel that reads the output's gradient anew.
        moved += _bytes(output) * (kernels - 1)
    return OperatorWork(
        flops,
        moved,
        half,
        convolution=True,
        tensor_cores=not depthwise,
        layout_bytes=turned,
        kernels=kernels,
    )


def _normalisation(name: str, inputs: list[torch.Tensor], moved: int, half: bool) -> OperatorWork:
    """Statistics over a whole batch, and the gradients of scale and shift, take a pass of their own."""
    backward = "backward" in name
    if not backward and "batch_norm" not in name:
        return OperatorWork(0, moved, half)
    largest = max(_bytes(tensor) for tensor in inputs)
    return OperatorWork(0, moved + largest * (2 if backward else 1), half, kernels=2)


def is_attention(func: Any) -> bool:
    """Whether it is one of torch's fused attention kernels, or the backward of one."""
    return _ATTENTION in str(func)


def attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Of all scores, those that a mask hides included."""
    given = _given(func, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, length, width = query.shape
    flops = 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])
    return float(flops * _ATTENTION_BACKWARD if "backward" in str(func) else flops)


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def _bytes(tensor: torch.Tensor) -> int:
    """What a kernel reads of it: an expanded tensor only its own elements."""
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        if stride == 0 and size > 1:
            count //= size
    return count * tensor.element_size()


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether its rows, or its columns where those are contiguous, begin at multiples of what tensor cores load."""
    strides = [stride for stride in tensor.stride() if stride > 1]
    return all(stride * tensor.element_size() % _ALIGNED_BYTES == 0 for stride in strides)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
