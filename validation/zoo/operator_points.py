"""What measure_operators.py times: a point is one operator with one set of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
COLD_BYTES = 160 << 20
"""More than the L2 cache of any GPU holds."""
MOST_COPIES = 24


@dataclass
class Point:
    row: dict[str, Any]
    make: Callable[[], Callable[[int], Any]]
    """Makes the operands, and the call to time; the call is told its number."""
    precision: str = "bf16"
    timer: Callable[[Callable[[int], Any]], dict[str, float]] | None = None
    """Where something else than the device's time is measured."""


class Pool:
    """Normally distributed numbers to cut operands from, so that a point costs no random numbers of its own."""

    _pools: ClassVar[dict[tuple[torch.dtype, str], Pool]] = {}

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        count = 1 << (29 if device.type == "cuda" else 26)
        wide = torch.randn(count, device=device, dtype=torch.bfloat16)
        self.numbers = wide if dtype is torch.bfloat16 else wide.to(dtype)
        self.next = 0

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Pool:
        key = (dtype, device.type)
        if key not in cls._pools:
            cls._pools[key] = cls(dtype, device)
        return cls._pools[key]

    def take(self, *shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        if count > self.numbers.numel():
            raise ValueError(f"{shape} is more than the pool holds")
        if self.next + count > self.numbers.numel():
            self.next = 0
        found = self.numbers[self.next : self.next + count].view(shape)
        self.next += -(-count // 64) * 64
        return found


def copies(each_bytes: float) -> int:
    return max(1, min(MOST_COPIES, int(COLD_BYTES / max(each_bytes, 1)) + 1))


class Case(NamedTuple):
    """A function with the operands to differentiate it by, and the others."""

    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    wide: tuple[tuple[int, ...], ...] = ()
    """Shapes of parameters that stay in 32 bits."""
    channels_last: bool = False
    transposed: bool = False
    """Operands are views with dimensions 1 and 2 exchanged, as attention gets them."""


def function_points(row: dict[str, Any], case: Case, precision: str, device: torch.device) -> Iterator[Point]:
    """Forward, then backward with respect to all operands."""

    def operands() -> list[torch.Tensor]:
        pool, wide = Pool.of(DTYPES[precision], device), Pool.of(torch.float32, device)
        taken = [pool.take(*shape) for shape in case.shapes] + [wide.take(*shape) for shape in case.wide]
        if case.transposed:
            taken = [tensor.transpose(1, 2) for tensor in taken]
        if case.channels_last:
            taken = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in taken]
        return [tensor.detach().requires_grad_() for tensor in taken]

    def forward() -> Callable[[int], Any]:
        given = operands()
        return lambda index: case.function(*given)

    def backward() -> Callable[[int], Any]:
        given = operands()
        output = case.function(*given)
        gradient = torch.randn_like(output)
        return lambda index: torch.autograd.grad(output, given, gradient, retain_graph=True)

    for direction, make in (("forward", forward), ("backward", backward)):
        yield Point(row | {"dtype": precision, "direction": direction}, make, precision)
