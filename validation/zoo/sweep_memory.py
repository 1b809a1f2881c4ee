"""Grids of operators that memory bounds: pointwise, reductions, copies, lookups, losses, pools, norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from operator_points import DTYPES, Case, Point, Pool, copies, function_points
from torch.nn import functional


def _sizes(tiny: bool) -> tuple[int, ...]:
    return (1 << 12,) if tiny else tuple(1 << power for power in range(10, 29, 2))


def _simple() -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Of two operands with as many elements, by aten's names."""
    aten = torch.ops.aten
    half = {torch.float32: torch.bfloat16}
    return {
        "relu": lambda x, y: torch.relu(x),
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "scale": lambda x, y: x * 0.5,
        "gelu": lambda x, y: functional.gelu(x),
        "silu": lambda x, y: functional.silu(x),
        "tanh": lambda x, y: torch.tanh(x),
        "pow": lambda x, y: x.pow(2),
        "add_": lambda x, y: x.add_(y),
        "relu_": lambda x, y: x.relu_(),
        "gelu_backward": lambda x, y: aten.gelu_backward(x, y),
        "silu_backward": lambda x, y: aten.silu_backward(x, y),
        "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0),
        "clone": lambda x, y: x.clone(),
        "cast": lambda x, y: x.to(half.get(x.dtype, torch.float32)),
        "zeros": lambda x, y: torch.zeros_like(x),
        "dropout": lambda x, y: aten.native_dropout(x, 0.1, True),
        "add_bias": lambda x, y: x.view(-1, 256) + y[:256],
        "transpose": lambda x, y: x.view(-1, 32).t().contiguous(),
        "heads": lambda x, y: x.view(1, -1, 4, 64).transpose(1, 2).contiguous(),
        "cat": lambda x, y: torch.cat((x.view(-1, 64), y.view(-1, 64)), 1),
        "sum": lambda x, y: x.sum(),
        "sum_rows": lambda x, y: x.view(-1, 256).sum(0),
        "sum_columns": lambda x, y: x.view(-1, 256).sum(1),
        "softmax": lambda x, y: torch.softmax(x.view(-1, 256), -1),
        "log_softmax": lambda x, y: torch.log_softmax(x.view(-1, 1024), -1),
        "softmax_backward": lambda x, y: aten._softmax_backward_data(x.view(-1, 256), y.view(-1, 256), -1, x.dtype),
        "log_softmax_backward": lambda x, y: aten._log_softmax_backward_data(
            x.view(-1, 1024), y.view(-1, 1024), -1, x.dtype
        ),
    }


def pointwise(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Operators over two tensors of one size. `cold`: operands are not in the L2 cache."""

    def point(name: str, function: Any, count: int, precision: str, cold: bool) -> Point:
        row: dict[str, Any] = {"op": name, "dtype": precision, "elements": count, "cold": cold}

        def make() -> Callable[[int], Any]:
            pool = Pool.of(DTYPES[precision], device)
            each = copies(2 * count * pool.numbers.element_size()) if cold else 1
            pairs = [(pool.take(count), pool.take(count)) for _ in range(each)]
            if name.endswith("_"):
                pairs = [(left.clone(), right) for left, right in pairs]
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            output = function(*pairs[0])
            row["output_bytes"] = (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0) - before
            del output
            return lambda index: function(*pairs[index % len(pairs)])

        return Point(row, make, precision)

    for count, precision, (name, function) in itertools.product(_sizes(tiny), ("bf16", "fp32"), _simple().items()):
        if count < 1024 and "softmax" in name:
            continue
        yield point(name, function, count, precision, False)
        if (1 << 18) <= count <= (1 << 24):
            yield point(name, function, count, precision, True)


def lookups(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Embeddings, the loss, pooling."""
    tokens, words = ((32,), 100) if tiny else ((1024, 4096, 16384, 65536), 32768)
    for count, width, precision in itertools.product(tokens, (256, 1024, 4096), ("fp32", "bf16")):
        if count * width > (1 << 27):
            continue
        indices = torch.randint(words, (count,), device=device)
        case = Case(lambda table, indices=indices: functional.embedding(indices, table), ((words, width),))
        yield from function_points(
            {"op": "embedding", "tokens": count, "width": width, "words": words}, case, precision, device
        )
    for count, words, precision in itertools.product(tokens, (1000, 32000, 50257, 128256), ("fp32", "bf16")):
        if count * words > (1 << 28):
            continue
        target = torch.randint(words, (count,), device=device)
        case = Case(lambda x, target=target: functional.cross_entropy(x, target), ((count, words),))
        yield from function_points({"op": "cross_entropy", "tokens": count, "words": words}, case, precision, device)
    pools: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "max_pool3s2": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "max_pool3s1": lambda x: functional.max_pool2d(x, 3, 1, 1),
        "max_pool2s2": lambda x: functional.max_pool2d(x, 2, 2),
        "avg_pool2s2": lambda x: functional.avg_pool2d(x, 2, 2),
        "avg_pool3s1": lambda x: functional.avg_pool2d(x, 3, 1, 1),
        "mean_pool": lambda x: functional.adaptive_avg_pool2d(x, 1),
        "adaptive_pool7": lambda x: functional.adaptive_avg_pool2d(x, 7),
    }
    shapes = [(2, 4, 8)] if tiny else [(64, 64, 112), (64, 256, 28), (64, 512, 14), (64, 2048, 7), (16, 64, 56)]
    for (name, pool), (batch, channels, side), precision in itertools.product(pools.items(), shapes, ("fp32", "bf16")):
        case = Case(pool, ((batch, channels, side, side),))
        yield from function_points({"op": name, "shape": [batch, channels, side, side]}, case, precision, device)


def norms(device: torch.device, tiny: bool) -> Iterator[Point]:
    rows, widths = ((8,), (64,)) if tiny else ((256, 1024, 4096, 16384, 65536), (256, 768, 1024, 2048, 4096, 8192))
    for count, width, precision in itertools.product(rows, widths, ("bf16", "fp32")):
        if count * width > (1 << 27):
            continue
        row = {"rows": count, "width": width}
        layer = Case(
            lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b), ((count, width), (width,), (width,))
        )
        yield from function_points({"op": "layer_norm"} | row, layer, precision, device)
        rms = Case(lambda x, w: functional.rms_norm(x, (x.shape[-1],), w), ((count, width), (width,)))
        yield from function_points({"op": "rms_norm"} | row, rms, precision, device)
    channels, sides = ((8,), (4,)) if tiny else ((32, 128, 512, 2048), (7, 14, 28, 56, 112))
    for batch, count, side, precision, last in itertools.product(
        (2,) if tiny else (16, 64), channels, sides, ("bf16", "fp32"), (False, True)
    ):
        if batch * count * side * side > (1 << 26) or (last and batch == 16):
            continue
        row = {"shape": [batch, count, side, side], "channels_last": last}

        mean, variance = torch.zeros(count, device=device), torch.ones(count, device=device)
        case = Case(
            lambda x, w, b, mean=mean, variance=variance: functional.batch_norm(x, mean, variance, w, b, training=True),
            ((batch, count, side, side),),
            ((count,), (count,)),
            channels_last=last,
        )
        yield from function_points({"op": "batch_norm"} | row, case, precision, device)
        if not last and count % 32 == 0:
            case = Case(
                lambda x, w, b: functional.group_norm(x, 32, w, b), ((batch, count, side, side), (count,), (count,))
            )
            yield from function_points({"op": "group_norm"} | row, case, precision, device)


def reductions(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Sums over rows and columns, copies that turn a tensor round, factors that are broadcast: by both dimensions."""
    rows, columns = ((64,), (64,)) if tiny else ((256, 2048, 8192, 32768, 131072), (64, 256, 1024, 4096, 32768))
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum_rows": lambda x: x.sum(0),
        "sum_columns": lambda x: x.sum(1),
        "transpose": lambda x: x.t().contiguous(),
        "scale_rows": lambda x: x * x[:, :1],
        "scale_columns": lambda x: x * x[0],
    }

    def point(name: str, function: Callable[..., Any], shape: tuple[int, ...], precision: str) -> Point:
        def make() -> Callable[[int], Any]:
            x = Pool.of(DTYPES[precision], device).take(*shape)
            return lambda index: function(x)

        return Point({"op": name, "dtype": precision, "shape": list(shape)}, make, precision)

    for count, width, (name, function), precision in itertools.product(
        rows, columns, functions.items(), ("bf16", "fp32")
    ):
        if count * width <= (1 << 28):
            yield point(name, function, (count, width), precision)
    shapes = [(2, 8, 4)] if tiny else [(64, 64, 3136), (64, 96, 3136), (64, 384, 196), (64, 768, 49), (64, 256, 784)]
    for shape, precision in itertools.product(shapes, ("bf16", "fp32")):
        yield point("sum_channels", lambda x: x.sum((0, 2)), shape, precision)
        yield point("channels_last", lambda x: x.transpose(1, 2).contiguous(), shape, precision)
        turned = (shape[0], shape[2], shape[1])
        yield point("channels_first", lambda x: x.transpose(1, 2).contiguous(), turned, precision)
