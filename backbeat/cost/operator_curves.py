"""What operators took where they were measured, as files have it, and seconds between the sizes that were.

A GPU's file may hold every kind of operator, or products of matrices alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backbeat.cost.operators import Device, Floats
from backbeat.errors import InputError

FOLDER = Path(__file__).resolve().parent.parent / "zoo" / "operators"
REFERENCE = "h200"
"""The GPU that has every kind."""


class ShareGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of the roofline that operators reach, over a grid of sizes."""

    axes: list[list[float]]
    share: list[float]
    """In thousandths, the last axis running fastest."""


class TrafficCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time that memory-bound operators take by what they move."""

    bytes: list[float]
    us: list[float]


class ShapedTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of operators by their shape."""

    axes: list[list[float]]
    us: list[float]


class HostTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=lambda name: name.removesuffix("_s")):
    """What the host takes to submit; nothing, unless said otherwise. Files have microseconds."""

    view_s: float = 0.0
    """A view, or an allocation."""
    forward_s: dict[str, float] = {}
    """An operator of forward, with what autograd keeps of it, by family of work."""
    backward_s: dict[str, float] = {}
    parameter_s: float = 0.0
    """A parameter beside the operators: calling its module in forward, and again accumulating its gradient in backward.
    Files have both together."""
    compiled_s: float = 0.0
    """A kernel of a compiled model."""
    update_s: dict[str, tuple[float, float]] = {}
    """An optimizer's step, by how it is split into kernels: at least, and for each tensor."""

    def step_s(self, kernels: str, tensors: int) -> float:
        fixed_s, each_s = self.update_s.get(kernels, (0.0, 0.0))
        return fixed_s + each_s * tensors


class OperatorCurves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one GPU and its host."""

    accelerator: str
    source: dict[str, Any]
    products: dict[str, ShapedTimes] = {}
    """Products of matrices by m, n and k, by precision and transposition."""
    grids: dict[str, ShareGrid] = {}
    """By family, precision and variant: product/bf16/nt, attention/bf16/causal/forward, …"""
    factors: dict[str, float] = {}
    """How much longer operators take that no grid has; `bandwidth` is the largest share of it that was seen."""
    traffic: dict[str, TrafficCurve] = {}
    """By kind and bytes of an element."""
    shaped: dict[str, ShapedTimes] = {}
    host: dict[str, Any] = {}
    """`HostTimes`."""


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """Curves, and the GPU that they were measured on."""

    device: Device
    curves: OperatorCurves


@cache
def measured_operators() -> frozenset[str]:
    """Short names of the GPUs that have a file."""
    return frozenset(path.stem for path in FOLDER.glob("*.json"))


@cache
def operator_curves(short_name: str) -> OperatorCurves:
    path = FOLDER / f"{short_name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=OperatorCurves)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: {error}; install backbeat again") from None


class Grid:
    """Seconds at every combination of sizes along a few axes.

    Between points the logarithm of the seconds is a straight line in the logarithms of the sizes, so that a power of
    a size stays what it is. Past the last point of an axis time grows as the size does: large operators have reached
    the efficiency they will reach. Before the first point it stays: small ones wait for latency. Where a smaller
    operator was measured slower than a larger one, it counts as quick as that: a library that has a better kernel for
    more work could have padded less.

    >>> grid = Grid([(1, 4)], [1.0, 2.0])
    >>> [round(grid.seconds(size), 3) for size in (0.5, 1, 2, 4, 8)]
    [1.0, 1.0, 1.414, 2.0, 4.0]
    >>> grid.over([(0.5, 2, 8)]).round(3).tolist()
    [1.0, 1.414, 4.0]
    """

    def __init__(self, axes: Sequence[Sequence[float]], seconds: Any, rising: bool = True) -> None:
        self._axes = [[math.log(size) for size in axis] for axis in axes]
        values = np.array(seconds, dtype=float).reshape([len(axis) for axis in axes])
        for axis in range(values.ndim) if rising else ():
            values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
        self._values = np.log(values)

    def seconds(self, *sizes: float) -> float:
        beyond = 0.0
        values: Any = self._values
        for axis, size in zip(self._axes, sizes, strict=True):
            log_size = math.log(max(size, 1e-9))
            if len(axis) == 1 or log_size <= axis[0]:
                values = values[0]
            elif log_size >= axis[-1]:
                values = values[-1]
            else:
                cell = bisect_right(axis, log_size) - 1
                share = (log_size - axis[cell]) / (axis[cell + 1] - axis[cell])
                values = values[cell] * (1 - share) + values[cell + 1] * share
            beyond += max(0.0, log_size - axis[-1])
        return math.exp(float(values) + beyond)

    def over(self, axes: Sequence[Sequence[float]]) -> Floats:
        """The same at every combination of other sizes."""
        values = self._values
        for at, (own, sizes) in enumerate(zip(self._axes, axes, strict=True)):
            logs = np.log(sizes)
            shares = np.stack([np.interp(logs, own, one) for one in np.eye(len(own))], axis=1)
            values = np.moveaxis(np.tensordot(shares, values, (1, at)), 0, at)
            beyond = np.maximum(logs - own[-1], 0.0)
            values = values + beyond.reshape([-1 if axis == at else 1 for axis in range(values.ndim)])
        return np.asarray(np.exp(values))


def carried_s(measured_s: Floats, there_s: Floats, here_s: Floats) -> Floats:
    """Seconds on one GPU of operators that were measured on another, by the rooflines of both.

    Operators that reach half of the best share of the roofline, or more, keep their share. What reaches next to none of
    it waits for latency: of launches, of memory, of tiles one after the other. Other peak rates do not change that, so
    it keeps its time. In between the logarithm is in between.

    The best reached 0.8 of the peak, another 0.4, a third a tenth of that. At half of the rates:

    >>> carried_s(np.array([10, 3, 3]), np.array([8, 1.2, 0.12]), np.array([16, 2.4, 0.24])).round(2).tolist()
    [20.0, 6.0, 3.22]
    """
    share = there_s / measured_s
    bound = np.minimum(share / (_BOUND * np.max(share)), 1.0)
    return np.asarray(np.maximum(measured_s * (here_s / there_s) ** bound, here_s))


_BOUND = 0.5
"""Of the best share: with as much, an operator is bound by the peak rates. Of the values tried (0.3 to 1) the one that
carries products between A100, H100, L40S and B200 best without moving large ones."""


def near(sizes: Sequence[Floats], points: Sequence[tuple[float, ...]], values: Sequence[float]) -> Floats:
    """Values known at a few sizes, at others: means weighted by nearness, in octaves."""
    total = np.zeros_like(sizes[0])
    weights = np.zeros_like(sizes[0])
    for point, value in zip(points, values, strict=True):
        apart = sum(np.log2(axis / size) ** 2 for axis, size in zip(sizes, point, strict=True))
        weight = 1 / (np.asarray(apart) + _NEAREST)
        total, weights = total + weight * value, weights + weight
    return np.asarray(total / weights)


_NEAREST = 0.01
"""Squared octaves within which two sizes count as one."""
