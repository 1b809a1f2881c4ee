"""Grids of matrix products and attention."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from operator_points import DTYPES, Case, Point, Pool, copies, function_points
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COLUMNS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
LAYOUTS = ("nt", "nn", "tn")
"""As a linear layer has them: forward (x Wᵀ), gradient of the input (g W), gradient of the weight (gᵀ x)."""


def _coarse_first(shape: tuple[int, ...]) -> int:
    """Powers of four, then powers of two, then the rest."""
    powers = [size & (size - 1) == 0 for size in shape]
    if not all(powers):
        return 2
    return 0 if all(size.bit_length() % 2 for size in shape) else 1


def product(precision: str, layout: str, m: int, n: int, k: int, device: torch.device, batch: int = 0) -> Point:
    def make() -> Callable[[int], Any]:
        pool = Pool.of(DTYPES[precision], device)
        lead = (batch,) if batch else ()
        size = (m * k + k * n) * max(batch, 1) * pool.numbers.element_size()
        pairs = []
        for _ in range(copies(size)):
            left = pool.take(*lead, k, m).mT if layout[0] == "t" else pool.take(*lead, m, k)
            right = pool.take(*lead, n, k).mT if layout[1] == "t" else pool.take(*lead, k, n)
            pairs.append((left, right))
        if precision == "fp8":
            one = torch.ones((), device=device)
            return lambda index: torch._scaled_mm(
                *pairs[index % len(pairs)], one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return lambda index: torch.matmul(*pairs[index % len(pairs)])

    row = {"dtype": precision, "layout": layout, "shape": [m, n, k]} | ({"batch": batch} if batch else {})
    return Point(row, make, precision)


def matmuls(precision: str, layouts: tuple[str, ...], most_flops: float, powers: bool = False) -> Any:
    def points(device: torch.device, tiny: bool) -> Iterator[Point]:
        rows, columns = ((64,), (64, 128)) if tiny else (ROWS, COLUMNS)
        shapes = [
            shape
            for shape in itertools.product(rows, columns, columns)
            if 2 * shape[0] * shape[1] * shape[2] <= most_flops
        ]
        if powers:
            shapes = [shape for shape in shapes if _coarse_first(shape) < 2]
        for (m, n, k), layout in itertools.product(sorted(shapes, key=_coarse_first), layouts):
            yield product(precision, layout, m, n, k, device)

    return points


def vocabularies(device: torch.device, tiny: bool) -> Iterator[Point]:
    tokens, widths = ((64,), (64,)) if tiny else ((1024, 4096, 16384), (768, 2048, 4096))
    vocabulary = (250,) if tiny else (30522, 32000, 50257, 50304, 128256, 131072)
    for precision, rows, words, width in itertools.product(("bf16", "tf32"), tokens, vocabulary, widths):
        if 2 * rows * words * width > (1 << 42):
            continue
        yield product(precision, "nt", rows, words, width, device)
        yield product(precision, "nn", rows, width, words, device)
        yield product(precision, "tn", words, width, rows, device)


def odd_products(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Rows that are no multiple of 16 bytes, and sizes that fill tiles badly."""
    inner = [(1001, 2048), (1000, 2048), (2049, 1024), (1026, 1024), (1028, 1024), (1024, 1025), (1024, 1028)]
    inner += [(4096, 4097), (4097, 4096), (2304, 768), (640, 640), (1600, 6400), (1280, 5120), (11008, 4096)]
    inner += [(5120, 13824), (14336, 4096), (2, 1024), (10, 512), (1, 1024)]
    tokens = (64,) if tiny else (197, 1000, 4096, 8192, 12608)
    for precision, rows, (n, k), layout in itertools.product(
        ("bf16", "tf32"), tokens, inner[: 2 if tiny else None], LAYOUTS
    ):
        yield product(precision, layout, rows, n, k, device)


def batched_products(device: torch.device, tiny: bool) -> Iterator[Point]:
    batches, lengths, widths = ((2,), (16,), (8,)) if tiny else ((16, 64, 256, 1024), (128, 197, 512, 1024), (64, 128))
    for precision, batch, length, width in itertools.product(("bf16", "tf32"), batches, lengths, widths):
        if batch * length * length > (1 << 28):
            continue
        for layout, (m, n, k) in itertools.product(("nt", "nn"), ((length, length, width), (length, width, length))):
            yield product(precision, layout, m, n, k, device, batch)


def sustained(device: torch.device, tiny: bool) -> Iterator[Point]:
    """What is left of the rate after most of a second at full load: the clock falls as the GPU gets warm."""
    size = 64 if tiny else 8192

    def timer(call: Callable[[int], Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for _ in range(2):
            call(0)
        for part in range(6):
            calls, begin = (2 if tiny else 80), time.perf_counter()
            for index in range(calls):
                call(index)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[f"s{part}"] = (time.perf_counter() - begin) / calls
        return found

    for precision in ("bf16",) if tiny else ("bf16", "tf32", "fp8", "fp16"):
        point = product(precision, "nt", size, size, size, device)
        yield Point(point.row, point.make, precision, timer)


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(device: torch.device, tiny: bool) -> Iterator[Point]:
    batches, lengths = ((1,), (16,)) if tiny else ((1, 4, 16, 64), (128, 256, 512, 1024, 2048, 4096, 8192, 16384))

    def points(precision: str, batch: int, length: int, width: int, kind: str, backend: str) -> Iterator[Point]:
        heads = 2 if tiny else 16
        masked = kind == "mask"

        kept: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if masked and not kept:
                kept.append(torch.zeros(batch, 1, 1, length, device=device, dtype=query.dtype))
            bias = kept[0].expand(-1, -1, length, -1) if masked else None
            causal, dropout = kind == "causal", 0.1 if kind == "dropout" else 0.0
            if backend == "default":
                return functional.scaled_dot_product_attention(query, key, value, bias, dropout, causal)
            with sdpa_kernel(BACKENDS[backend]):
                return functional.scaled_dot_product_attention(query, key, value, bias, dropout, causal)

        row = {"batch": batch, "heads": heads, "length": length, "width": width, "kind": kind, "backend": backend}
        case = Case(attend, ((batch, length, heads, width),) * 3, transposed=True)
        yield from function_points(row, case, precision, device)

    shapes = [(b, s) for b, s in itertools.product(batches, lengths) if b * s <= 65536 and b * s * s <= (1 << 30)]
    few = [(b, s) for b, s in shapes if b in (1, 4, 16, 64) and s in (16, 128, 512, 2048)]
    for batch, length in few:
        for kind in ("full", "causal", "mask"):
            yield from points("tf32", batch, length, 64, kind, "default")
        for kind, backend in (("mask", "default"), ("dropout", "default"), ("causal", "cudnn"), ("causal", "flash")):
            yield from points("bf16", batch, length, 64, kind, backend)
    for (batch, length), width, kind in itertools.product(reversed(shapes), (64, 128), ("causal", "full")):
        yield from points("bf16", batch, length, width, kind, "default")
    for batch, length in few:
        yield from points("bf16", batch, length, 128, "causal", "cudnn")
        yield from points("bf16", batch, length, 96, "causal", "default")
