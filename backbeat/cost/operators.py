"""What operators make a GPU do, and how long it takes: peak rates, over the share of them that such operators reach.

Operators are measured over grids of sizes (`operator_curves`), and `operator_model` carries what they took to GPUs that
were not measured, by their rooflines (arithmetic at the peak rate or memory traffic at the peak bandwidth, whichever
takes longer) and three rules:

- An operator that is bound by the peak rates keeps its share of the other GPU's own roofline. One that waits for
  latency keeps its time: peak rates do not change that.
- An operator fills a GPU as many times as it has tiles per multiprocessor. So a GPU with more multiprocessors reaches
  the efficiency measured for a smaller operator. For a product, rows and columns shrink by the root of the ratio of
  multiprocessors; for attention, heads do; for a convolution, pixels.
- Memory-bound work takes as long as on the GPU measured, filled as much. It takes longer where its bytes need longer at
  the largest share of the other GPU's bandwidth that was seen. So a small kernel keeps its fixed cost, and so does a
  kernel that is bound by its instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backbeat.errors import InputError

Floats = NDArray[np.float64]


class Device(Protocol):
    """A GPU, as far as operators ask."""

    @property
    def name(self) -> str: ...

    @property
    def short_name(self) -> str: ...

    @property
    def bytes_per_s(self) -> float: ...

    @property
    def multiprocessors(self) -> int: ...

    @property
    def sustained_share(self) -> float: ...

    def rate(self, precision: str) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Product:
    """C = A B, `batch` times over: m × k by k × n."""

    precision: str
    m: float
    n: float
    k: float
    transposition: str = "nt"
    """Whether A and B lie transposed in memory (t) or not (n): x Wᵀ is nt, g W is nn, gᵀ x is tn."""
    batch: float = 1
    alignment: int = 16
    """Bytes that the rows of operands and result begin at multiples of, 16 at most: tensor cores load as many."""

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """What an fp8 product makes is 16 bits wide."""
        each, made = element_bytes(self.precision), max(2, element_bytes(self.precision))
        return self.batch * (each * (self.m * self.k + self.k * self.n) + made * self.m * self.n)


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of `heads` heads (of all samples together)."""

    precision: str
    heads: float
    queries: float
    keys: float
    width: float
    kind: str = "full"
    """full, causal, or mask where a tensor says what is hidden, which flash kernels do not take."""
    backward: bool = False

    @property
    def flops(self) -> float:
        """Flash kernels skip what a causal mask hides. Backward computes the scores again: five products to two."""
        flops = 4.0 * self.heads * self.queries * self.keys * self.width
        return flops * (0.5 if self.kind == "causal" else 1.0) * (2.5 if self.backward else 1.0)

    @property
    def bytes(self) -> float:
        """Query, key, value and output; in backward those, and their gradients."""
        each = element_bytes(self.precision) * self.heads * self.width * (2 * self.queries + 2 * self.keys)
        return each * (2 if self.backward else 1)


@dataclass(frozen=True, slots=True)
class Convolution:
    precision: str
    direction: str
    images: float
    inputs: float
    """Channels, of all groups together; likewise `outputs`."""
    outputs: float
    pixels: float
    """Of one image of the output."""
    input_pixels: float
    kernel: float
    """Pixels of the kernel."""
    stride: float = 1
    groups: float = 1
    channels_last: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.images * self.pixels * self.kernel * self.inputs * self.outputs / self.groups

    @property
    def bytes(self) -> float:
        elements = self.images * (self.inputs * self.input_pixels + self.outputs * self.pixels)
        return element_bytes(self.precision) * (elements + self.kernel * self.inputs * self.outputs / self.groups)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves bytes and computes next to nothing."""

    kind: str
    """Which curve it follows: pointwise, strided, cat, softmax, batch_norm, …"""
    bytes: float
    width: int = 4
    """Bytes of an element."""
    sizes: tuple[float, ...] = ()
    """Where the curve is one of shapes: rows and columns of a layer norm or a sum over rows; images, channels and
    pixels of a batch norm; tokens and columns of an embedding's gradient."""


_ALIGNED_BYTES = 16
"""Tensor cores load as many at a time."""

Work = Product | Attention | Convolution | Traffic


def family_of(work: Work) -> str:
    """matmul, convolution, attention or memory."""
    if isinstance(work, Product):
        return "matmul"
    if isinstance(work, Convolution):
        return "convolution"
    return "attention" if isinstance(work, Attention) else "memory"


def element_bytes(precision: str) -> float:
    return {"fp4": 0.5, "fp8": 1, "bf16": 2, "fp16": 2}.get(precision, 4)


def roofline_s(work: Product | Attention | Convolution, device: Device) -> float:
    """At the peak rates: arithmetic or traffic, whichever takes longer. Nothing is quicker.

    >>> from backbeat.model.accelerator import accelerator_named
    >>> round(roofline_s(Product("bf16", 8192, 8192, 8192), accelerator_named("h200")) * 1e6)
    1111
    """
    return max(work.flops / _peak(work.precision, device), work.bytes / device.bytes_per_s)


def rooflines_s(make: Callable[..., Any], axes: Sequence[Sequence[float]], device: Device) -> Floats:
    """The same of the operators that are made of all combinations of sizes, the last axis running fastest."""
    works = make(*nodes(axes))
    return np.asarray(np.maximum(works.flops / _peak(works.precision, device), works.bytes / device.bytes_per_s))


def nodes(axes: Sequence[Sequence[float]]) -> list[Floats]:
    """The sizes of each point of a grid, axis by axis, the last axis running fastest."""
    return [each.ravel() for each in np.meshgrid(*axes, indexing="ij")]


def _peak(precision: str, device: Device) -> float:
    peak = device.rate(precision)
    if peak is None:
        raise InputError(f"{device.name} has no {precision}: choose another precision")
    return peak


def in_fp8(works: tuple[Work, ...]) -> tuple[Work, ...]:
    """The same with products in fp8, where their sizes allow it.

    Operands are scaled as they are cast, each tensor by one number: read twice in 16 bits, written once in 8.
    """
    found: list[Work] = []
    for work in works:
        if isinstance(work, Product) and work.precision == "bf16" and work.batch == 1 and _fits_fp8(work):
            found.append(replace(work, precision="fp8", transposition="nt"))
            found.append(Traffic("pointwise", 5 * (work.m * work.k + work.k * work.n), 2))
        else:
            found.append(work)
    return tuple(found)


def _fits_fp8(work: Product) -> bool:
    return all(size % _ALIGNED_BYTES == 0 for size in (work.m, work.n, work.k))
