"""Grids of operators, by family: what `make_operator_curves.py` makes curves of. Points come in an order in which a
family cut short is a coarser grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from operator_points import DTYPES, Case, Point, Pool, copies, function_points
from torch.nn import functional

Points = Callable[[torch.device], Iterator[Point]]
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COLUMNS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
LAYOUTS = ("nt", "nn", "tn")
"""As a linear layer has them: forward (x Wᵀ), gradient of the input (g W), gradient of the weight (gᵀ x)."""


def coarse_first(shape: tuple[int, ...]) -> int:
    """Powers of four, then powers of two, then the rest."""
    if not all(size & (size - 1) == 0 for size in shape):
        return 2
    return 0 if all(size.bit_length() % 2 for size in shape) else 1


def product(precision: str, layout: str, m: int, n: int, k: int, device: torch.device) -> Point:
    def make() -> Callable[[int], Any]:
        pool = Pool.of(DTYPES[precision], device)
        pairs = []
        for _ in range(copies((m * k + k * n) * pool.numbers.element_size())):
            left = pool.take(k, m).mT if layout[0] == "t" else pool.take(m, k)
            right = pool.take(n, k).mT if layout[1] == "t" else pool.take(k, n)
            pairs.append((left, right))
        if precision == "fp8":
            one = torch.ones((), device=device)
            return lambda index: torch._scaled_mm(
                *pairs[index % len(pairs)], one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return lambda index: torch.matmul(*pairs[index % len(pairs)])

    return Point({"dtype": precision, "layout": layout, "shape": [m, n, k]}, make, precision)


def matmuls(precision: str, layouts: tuple[str, ...], most_flops: float, powers: bool = False) -> Points:
    def points(device: torch.device) -> Iterator[Point]:
        shapes = itertools.product(ROWS, COLUMNS, COLUMNS)
        few = [one for one in shapes if 2 * one[0] * one[1] * one[2] <= most_flops]
        for shape, layout in itertools.product(sorted(few, key=coarse_first), layouts):
            if not powers or coarse_first(shape) < 2:
                yield product(precision, layout, *shape, device)

    return points


def vocabularies(device: torch.device) -> Iterator[Point]:
    words = (30522, 32000, 50257, 50304, 128256, 131072)
    for precision, rows, count, width in itertools.product(
        ("bf16", "tf32"), (1024, 4096, 16384), words, (768, 2048, 4096)
    ):
        if 2 * rows * count * width <= (1 << 42):
            yield product(precision, "nt", rows, count, width, device)
            yield product(precision, "nn", rows, width, count, device)
            yield product(precision, "tn", count, width, rows, device)


def odd_products(device: torch.device) -> Iterator[Point]:
    """Rows that are no multiple of 16 bytes, and sizes that fill tiles badly."""
    inner = [(1001, 2048), (1000, 2048), (2049, 1024), (1026, 1024), (1028, 1024), (1024, 1025), (1024, 1028)]
    inner += [(4096, 4097), (4097, 4096), (2304, 768), (640, 640), (1600, 6400), (1280, 5120), (11008, 4096)]
    inner += [(5120, 13824), (14336, 4096), (2, 1024), (10, 512), (1, 1024)]
    tokens = (197, 1000, 4096, 8192, 12608)
    for precision, rows, (n, k), layout in itertools.product(("bf16", "tf32"), tokens, inner, LAYOUTS):
        yield product(precision, layout, rows, n, k, device)


def attention(device: torch.device) -> Iterator[Point]:
    def points(precision: str, batch: int, length: int, width: int, kind: str) -> Iterator[Point]:
        heads = 16
        kept: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if kind == "mask" and not kept:
                kept.append(torch.zeros(batch, 1, 1, length, device=device, dtype=query.dtype))
            bias = kept[0].expand(-1, -1, length, -1) if kept else None
            return functional.scaled_dot_product_attention(query, key, value, bias, 0.0, kind == "causal")

        row = {"batch": batch, "heads": heads, "length": length, "width": width, "kind": kind, "backend": "default"}
        case = Case(attend, ((batch, length, heads, width),) * 3, transposed=True)
        yield from function_points(row, case, precision, device)

    sizes = itertools.product((1, 4, 16, 64), (128, 256, 512, 1024, 2048, 4096, 8192, 16384))
    shapes = [(batch, length) for batch, length in sizes if batch * length * max(length, 1 << 14) <= (1 << 30)]
    for batch, length in [shape for shape in shapes if shape[1] in (128, 512, 2048)]:
        for kind in ("full", "causal", "mask"):
            yield from points("tf32", batch, length, 64, kind)
        yield from points("bf16", batch, length, 64, "mask")
    for (batch, length), width, kind in itertools.product(reversed(shapes), (64, 128), ("causal", "full")):
        yield from points("bf16", batch, length, width, kind)


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
        "pow": lambda x, y: x.pow(2),
        "gelu_backward": lambda x, y: aten.gelu_backward(x, y),
        "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0),
        "clone": lambda x, y: x.clone(),
        "cast": lambda x, y: x.to(half.get(x.dtype, torch.float32)),
        "zeros": lambda x, y: torch.zeros_like(x),
        "dropout": lambda x, y: aten.native_dropout(x, 0.1, True),
        "add_bias": lambda x, y: x.view(-1, 256) + y[:256],
        "heads": lambda x, y: x.view(1, -1, 4, 64).transpose(1, 2).contiguous(),
        "cat": lambda x, y: torch.cat((x.view(-1, 64), y.view(-1, 64)), 1),
        "sum": lambda x, y: x.sum(),
        "sum_columns": lambda x, y: x.view(-1, 256).sum(1),
        "softmax": lambda x, y: torch.softmax(x.view(-1, 256), -1),
        "log_softmax": lambda x, y: torch.log_softmax(x.view(-1, 1024), -1),
        "softmax_backward": lambda x, y: aten._softmax_backward_data(x.view(-1, 256), y.view(-1, 256), -1, x.dtype),
        "log_softmax_backward": lambda x, y: aten._log_softmax_backward_data(
            x.view(-1, 1024), y.view(-1, 1024), -1, x.dtype
        ),
    }


def pointwise(device: torch.device) -> Iterator[Point]:
    """Operators over two tensors of one size. `cold`: operands are not in the L2 cache."""

    def point(name: str, function: Any, count: int, precision: str, cold: bool) -> Point:
        def make() -> Callable[[int], Any]:
            pool = Pool.of(DTYPES[precision], device)
            each = copies(2 * count * pool.numbers.element_size()) if cold else 1
            pairs = [(pool.take(count), pool.take(count)) for _ in range(each)]
            return lambda index: function(*pairs[index % len(pairs)])

        return Point({"op": name, "dtype": precision, "elements": count, "cold": cold}, make, precision)

    sizes = [1 << power for power in range(10, 29, 2)]
    for count, precision, (name, function) in itertools.product(sizes, ("bf16", "fp32"), _simple().items()):
        yield point(name, function, count, precision, False)
        if (1 << 18) <= count <= (1 << 24):
            yield point(name, function, count, precision, True)


def lookups(device: torch.device) -> Iterator[Point]:
    """Embeddings, the loss, pooling."""
    tokens, words = (1024, 4096, 16384, 65536), 32768
    for count, width, precision in itertools.product(tokens, (256, 1024, 4096), ("fp32", "bf16")):
        if count * width <= (1 << 27):
            indices = torch.randint(words, (count,), device=device)
            case = Case(lambda table, indices=indices: functional.embedding(indices, table), ((words, width),))
            row = {"op": "embedding", "tokens": count, "width": width, "words": words}
            yield from function_points(row, case, precision, device)
    for count, words, precision in itertools.product(tokens, (32000, 50257, 128256), ("fp32", "bf16")):
        if count * words <= (1 << 28):
            target = torch.randint(words, (count,), device=device)
            case = Case(lambda x, target=target: functional.cross_entropy(x, target), ((count, words),))
            row = {"op": "cross_entropy", "tokens": count, "words": words}
            yield from function_points(row, case, precision, device)
    pools: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "max_pool3s2": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "max_pool3s1": lambda x: functional.max_pool2d(x, 3, 1, 1),
        "max_pool2s2": lambda x: functional.max_pool2d(x, 2, 2),
        "avg_pool2s2": lambda x: functional.avg_pool2d(x, 2, 2),
        "avg_pool3s1": lambda x: functional.avg_pool2d(x, 3, 1, 1),
        "adaptive_pool7": lambda x: functional.adaptive_avg_pool2d(x, 7),
    }
    shapes = [(64, 64, 112), (64, 256, 28), (64, 512, 14), (64, 2048, 7), (16, 64, 56)]
    for (name, pool), (batch, channels, side), precision in itertools.product(pools.items(), shapes, ("fp32", "bf16")):
        case = Case(pool, ((batch, channels, side, side),))
        yield from function_points({"op": name, "shape": [batch, channels, side, side]}, case, precision, device)


def norms(device: torch.device) -> Iterator[Point]:
    rows, widths = (256, 1024, 4096, 16384, 65536), (256, 768, 1024, 2048, 4096, 8192)
    for count, width, precision in itertools.product(rows, widths, ("bf16", "fp32")):
        if count * width <= (1 << 27):
            row = {"rows": count, "width": width}
            layer = Case(
                lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b), ((count, width), (width,), (width,))
            )
            yield from function_points({"op": "layer_norm"} | row, layer, precision, device)
            rms = Case(lambda x, w: functional.rms_norm(x, (x.shape[-1],), w), ((count, width), (width,)))
            yield from function_points({"op": "rms_norm"} | row, rms, precision, device)
    for batch, count, side, precision, last in itertools.product(
        (16, 64), (32, 128, 512, 2048), (7, 14, 28, 56, 112), ("bf16", "fp32"), (False, True)
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
        if not last:
            shapes = ((batch, count, side, side), (count,), (count,))
            case = Case(lambda x, w, b: functional.group_norm(x, 32, w, b), shapes)
            yield from function_points({"op": "group_norm"} | row, case, precision, device)


def reductions(device: torch.device) -> Iterator[Point]:
    """Sums over rows and columns, and copies that turn a tensor round."""

    def point(name: str, function: Callable[..., Any], shape: tuple[int, ...], precision: str) -> Point:
        def make() -> Callable[[int], Any]:
            x = Pool.of(DTYPES[precision], device).take(*shape)
            return lambda index: function(x)

        return Point({"op": name, "dtype": precision, "shape": list(shape)}, make, precision)

    rows, columns = (256, 2048, 8192, 32768, 131072), (64, 256, 1024, 4096, 32768)
    for count, width, precision in itertools.product(rows, columns, ("bf16", "fp32")):
        if count * width <= (1 << 28):
            yield point("sum_rows", lambda x: x.sum(0), (count, width), precision)
            yield point("sum_columns", lambda x: x.sum(1), (count, width), precision)
    shapes = [(64, 64, 3136), (64, 96, 3136), (64, 384, 196), (64, 768, 49), (64, 256, 784)]
    for (images, channels, pixels), precision in itertools.product(shapes, ("bf16", "fp32")):
        for name, shape in (
            ("channels_last", (images, channels, pixels)),
            ("channels_first", (images, pixels, channels)),
        ):
            yield point(name, lambda x: x.transpose(1, 2).contiguous(), shape, precision)


_DIRECTIONS = {"forward": None, "input": [True, False, False], "weight": [False, True, False]}


def convolution(
    precision: str,
    batch: int,
    channels: tuple[int, int],
    side: int,
    kernel: tuple[int, int],
    device: torch.device,
    stride: int = 1,
    groups: int = 1,
    last: bool = False,
) -> Iterator[Point]:
    """Forward, gradient of the input, gradient of the weight."""
    padding = [kernel[0] // 2, kernel[1] // 2]

    def make(direction: str) -> Callable[[], Callable[[int], Any]]:
        def made() -> Callable[[int], Any]:
            pool = Pool.of(DTYPES[precision], device)
            x = pool.take(batch, channels[0], side, side)
            w = pool.take(channels[1], channels[0] // groups, *kernel)
            if last:
                x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
            if direction == "forward":
                return lambda index: functional.conv2d(x, w, None, stride, tuple(padding), 1, groups)
            gradient = torch.randn_like(functional.conv2d(x, w, None, stride, tuple(padding), 1, groups))
            mask = _DIRECTIONS[direction]
            return lambda index: torch.ops.aten.convolution_backward(
                gradient, x, w, None, [stride] * 2, padding, [1, 1], False, [0, 0], groups, mask
            )

        return made

    told = {"kernel": list(kernel), "stride": stride, "groups": groups, "channels_last": last}
    for direction in _DIRECTIONS:
        row = {"dtype": precision, "shape": [batch, *channels, side], **told, "direction": direction}
        yield Point(row, make(direction), precision)


def convolutions(precision: str, last: bool) -> Points:
    """The less usual ones first, then kernels of 1 × 1 and 3 × 3 over channels and pixels."""

    def points(device: torch.device) -> Iterator[Point]:
        odd = [((3, 64), 224, (7, 7), 2), ((3, 64), 224, (3, 3), 1), ((3, 32), 224, (3, 3), 2)]
        odd += [((3, 768), 224, (16, 16), 16), ((3, 96), 224, (4, 4), 4)]
        odd += [((width, width), side, (3, 3), 2) for width, side in ((64, 112), (128, 56), (256, 28), (512, 14))]
        odd += [((width, 2 * width), side, (1, 1), 2) for width, side in ((256, 56), (512, 28), (1024, 14))]
        odd += [((96, 192), 56, (2, 2), 2), ((384, 768), 14, (2, 2), 2)]
        for channels, side, size, stride in odd:
            yield from convolution(precision, 64, channels, side, size, device, stride, last=last)
        sides = {112: 128, 56: 512, 28: 1024, 14: 2048, 7: 2048}
        widths = (16, 32, 64, 128, 256, 512, 1024, 2048)
        shapes = [
            (size, into, out, side)
            for size, (side, most), into, out in itertools.product((3, 1), sides.items(), widths, widths)
            if max(into, out) <= min(most * 2, 512 if size == 3 else 2048)
            and 1 / 8 <= into / out <= 8
            and (min(into, out) >= 64 or side >= 28)
            and (not last or into in (64, 256, 1024))
        ]
        # Powers of four first: a grid cut short is a coarser one.
        for size, into, out, side in sorted(shapes, key=lambda shape: not shape[1].bit_length() % 2):
            yield from convolution(precision, 64, (into, out), side, (size, size), device, last=last)

    return points


def grouped_convolutions(device: torch.device) -> Iterator[Point]:
    """Depthwise, and with 32 groups."""
    sides = ((32, 112), (96, 56), (128, 56), (192, 28), (384, 14), (512, 28), (672, 14), (768, 7), (1152, 7))
    for precision, last in (("bf16", False), ("tf32", False), ("bf16", True)):
        for (width, side), size in itertools.product(sides, (3, 5, 7)):
            yield from convolution(precision, 64, (width, width), side, (size, size), device, groups=width, last=last)
        for width, side in ((128, 56), (256, 28), (512, 14), (1024, 7)):
            yield from convolution(precision, 64, (width, width), side, (3, 3), device, groups=32, last=last)
