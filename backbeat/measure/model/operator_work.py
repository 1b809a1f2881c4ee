"""What one of torch's operators makes a GPU do. Taken from shapes, never from data."""

from __future__ import annotations

import math
from typing import Any

import torch

from backbeat.cost.operators import Attention, Convolution, Product, Traffic, Work
from backbeat.measure.model.chain import tensors_of

_ATTENTION = "_scaled_dot_product"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "_reshape_alias")
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Tensor cores load 16 bytes at a time; rows that are no multiple of it need slower kernels.
_ALIGNED_BYTES = 16
_FEW_ROWS = 64
# Rows so long that a softmax over them goes over memory several times.
_VOCABULARY = 8192
_COPIES = ("clone", "copy_", "_to_copy", "copy")
_OVERWRITING = ("copy_", "zero_", "fill_", "bernoulli_", "uniform_", "normal_")
"""They do not read what they write into."""
_REDUCTIONS = ("sum", "mean", "var", "amax", "amin", "max", "min", "linalg_vector_norm", "any", "all", "cumsum")
# By how a name begins, the longer names first.
_KINDS = (
    ("native_layer_norm_backward", "layer_norm_backward"), ("native_layer_norm", "layer_norm"),
    ("_fused_rms_norm_backward", "rms_norm_backward"), ("_fused_rms_norm", "rms_norm"),
    ("native_group_norm_backward", "group_norm_backward"), ("native_group_norm", "group_norm"),
    ("_softmax_backward_data", "softmax_backward"), ("_softmax", "softmax"),
    ("_log_softmax_backward_data", "log_softmax_backward"), ("_log_softmax", "log_softmax"),
    ("native_dropout", "dropout"), ("gelu", "gelu"), ("cat", "cat"),
    ("max_pool2d_with_indices_backward", "max_pool_backward"), ("max_pool2d_with_indices", "max_pool"),
    ("_adaptive_avg_pool2d_backward", "strided"), ("_adaptive_avg_pool2d", "mean_pool"),
    ("avg_pool2d_backward", "avg_pool_backward"), ("avg_pool2d", "avg_pool"),
)  # fmt: skip


def work_of(func: Any, args: Any, kwargs: Any, result: Any, precision: str) -> tuple[Work, ...]:
    """The kernels that it launches; none where it only looks at its operands another way.

    `precision` is what products of 32-bit operands run in: tf32 or fp32.
    """
    # A view moves nothing: its result is one of its operands, looked at another way.
    if any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns):
        return ()
    name = func._schema.name.removeprefix("aten::")
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
    if not outputs or name in _FREE or func.namespace != "aten":
        return ()
    given = arguments_by_name(func, args, kwargs)
    if name in _PRODUCTS:
        return (_product(inputs[-2], inputs[-1], precision),)
    if is_attention(func):
        return (_attention(given, "backward" in name, precision),)
    if name in ("convolution", "convolution_backward"):
        return _convolution(given, result, precision)
    return (_traffic(name, given, inputs, outputs),)


def _product(left: torch.Tensor, right: torch.Tensor, precision: str) -> Product:
    transposition = "".join("n" if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else "t" for tensor in (left, right))
    return Product(
        _HALF.get(left.dtype, precision),
        left.shape[-2],
        right.shape[-1],
        left.shape[-1],
        transposition="nt" if transposition == "tt" else transposition,
        batch=left.shape[0] if left.dim() == 3 else 1,
        alignment=min(_alignment(left), _alignment(right), _divisor(right.shape[-1] * right.element_size())),
    )


def _attention(given: dict[str, Any], backward: bool, precision: str) -> Attention:
    query, key = given["query"], given["key"]
    batch, heads, length, width = query.shape
    masked = given.get("attn_mask") is not None
    return Attention(
        _HALF.get(query.dtype, precision),
        batch * heads,
        length,
        key.shape[-2],
        width,
        "mask" if masked else "causal" if given.get("is_causal") else "full",
        backward,
    )


def _convolution(given: dict[str, Any], result: Any, precision: str) -> tuple[Work, ...]:
    """Itself or its gradients, each a kernel of its own, and the bias or its gradient, which is another."""
    images, weight, transposed = given["input"], given["weight"], given["transposed"]
    backward = "grad_output" in given
    output = given["grad_output"] if backward else result
    # A transposed convolution is the gradient of the input of one whose input is its output.
    narrow, wide = (images, output) if transposed else (output, images)
    directions: list[str] = []
    if backward:
        to_input, to_weight, to_bias = given["output_mask"]
        directions += ["forward" if transposed else "input"] if to_input else []
        directions += ["weight"] if to_weight else []
        bias = [_summed(output, output.shape[1])] if to_bias else []
    else:
        directions += ["input" if transposed else "forward"]
        bias = [Traffic("strided", 2 * _bytes(output), output.element_size())] if given.get("bias") is not None else []
    return (
        *(
            Convolution(
                _HALF.get(weight.dtype, precision),
                direction,
                images=images.shape[0],
                inputs=wide.shape[1],
                outputs=narrow.shape[1],
                pixels=narrow.shape[2:].numel(),
                input_pixels=wide.shape[2:].numel(),
                kernel=weight.shape[2:].numel(),
                stride=max(given["stride"]),
                groups=given["groups"],
                channels_last=_is_channels_last(images),
            )
            for direction in directions
        ),
        *bias,
    )


def _traffic(name: str, given: dict[str, Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Traffic:
    if name in _OVERWRITING:
        inputs = inputs[1:]
    made = sum(_bytes(tensor) for tensor in outputs)
    moved = made + sum(_bytes(tensor) for tensor in {id(tensor): tensor for tensor in inputs}.values())
    largest = max((*inputs, *outputs), key=lambda tensor: tensor.numel())
    width = largest.element_size()
    if name.startswith("nll_loss"):
        # Of every row one number is read; backward fills all others with zeros.
        return Traffic("fill", made, width)
    if name.startswith(("slice_backward", "select_backward")):
        return Traffic("pointwise", 2 * made, width)
    if name == "embedding" or name.startswith(("index", "gather")):
        # A lookup reads the rows it returns, not the whole table.
        return Traffic("strided", 2 * made, width)
    if name.startswith("embedding_dense_backward"):
        return Traffic("embedding_backward", made, width, (given["indices"].numel(), outputs[0].shape[-1]))
    kind = next((kind for begin, kind in _KINDS if name.startswith(begin)), None)
    if "batch_norm" in name or (kind is not None and kind.startswith("group_norm")):
        images = given["input"]
        kind = ("batch_norm" if "batch_norm" in name else "group_norm") + ("_backward" if "backward" in name else "")
        memory_format = "_last" if _is_channels_last(images) else ""
        sizes = (images.shape[0], images.shape[1], max(1, images.shape[2:].numel()))
        return Traffic(kind + memory_format if kind.startswith("batch") else kind, moved, images.element_size(), sizes)
    if kind is not None and "_norm" in kind:
        rows = largest.numel() // max(1, math.prod(given["normalized_shape"]))
        return Traffic(kind, moved, width, (rows, largest.numel() // rows))
    if kind is not None and kind.startswith("log_softmax") and largest.shape[-1] >= _VOCABULARY:
        return Traffic(kind, moved, width, (largest.numel() // largest.shape[-1], largest.shape[-1]))
    if kind is not None and "pool" in kind:
        # Their kernels are not bound by memory but by the elements they make.
        return Traffic(kind, 4 * outputs[0].numel(), 4)
    if name in _REDUCTIONS and outputs[0].numel() < inputs[0].numel():
        return _reduction(inputs[0], outputs[0], given)
    if kind is None:
        kind = "fill" if not inputs else "pointwise" if _is_flat(inputs, outputs[0]) else "strided"
        if kind == "strided" and name in _COPIES and _is_turned(inputs[-1], outputs[0]):
            kind = "transpose"
    return Traffic(kind, moved, width)


def _reduction(tensor: torch.Tensor, output: torch.Tensor, given: dict[str, Any]) -> Traffic:
    """Along the dimension that is contiguous, or across it."""
    dims = given.get("dim")
    if dims is None or output.numel() == 1:
        return Traffic("sum", _bytes(tensor), tensor.element_size())
    strides = [tensor.stride(dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    if min(strides, default=1) == 1:
        return Traffic("sum_columns", _bytes(tensor) + _bytes(output), tensor.element_size())
    return _summed(tensor, output.numel())


def _summed(tensor: torch.Tensor, columns: int) -> Traffic:
    """A sum over rows; a few of them are added up as any operands are."""
    if tensor.numel() < _FEW_ROWS * columns:
        return Traffic("strided", _bytes(tensor) + columns * tensor.element_size(), tensor.element_size())
    return Traffic("sum_rows", _bytes(tensor), tensor.element_size(), (tensor.numel() // max(1, columns), columns))


def _is_flat(inputs: list[torch.Tensor], output: torch.Tensor) -> bool:
    """Whether a kernel can go through all operands as through one long row, several elements at a time.

    That takes operands of the shape and order of the result, and of no smaller elements: those are cast one by one.
    """
    return all(
        tensor.dim() == 0
        or (
            tensor.shape == output.shape
            and tensor.stride() == output.stride()
            and (tensor.element_size() >= output.element_size() or output.dtype == torch.bool)
        )
        for tensor in inputs
    )


def is_attention(func: Any) -> bool:
    """Whether it is one of torch's fused attention kernels, or the backward of one."""
    return _ATTENTION in str(func)


def arguments_by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def _bytes(tensor: torch.Tensor) -> int:
    """What a kernel reads of it: an expanded tensor only its own elements."""
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        if stride == 0 and size > 1:
            count //= size
    return count * tensor.element_size()


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes that its rows, or its columns where those are contiguous, begin at multiples of."""
    return min(
        (_divisor(stride * tensor.element_size()) for stride in tensor.stride() if stride > 1), default=_ALIGNED_BYTES
    )


def _divisor(size: int) -> int:
    """
    >>> _divisor(64), _divisor(100), _divisor(6)
    (16, 4, 2)
    """
    return min(_ALIGNED_BYTES, size & -size)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _is_turned(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the dimension that is contiguous in one is not in the other."""
    return (
        source.dim() > 1
        and source.shape == target.shape
        and [stride == 1 for stride, size in zip(source.stride(), source.shape, strict=True) if size > 1]
        != [stride == 1 for stride, size in zip(target.stride(), target.shape, strict=True) if size > 1]
    )
