"""Seconds of single operators on one GPU, from curves that may have been measured on another.

`OperatorCurves` is the file of what was measured on one GPU; `OperatorModel` answers from it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backbeat.cost.accelerators import Accelerator, accelerator_named
from backbeat.cost.operators import Attention, Convolution, Product, Traffic, Work, roofline_s
from backbeat.errors import InputError

FOLDER = Path(__file__).resolve().parent.parent / "zoo" / "accelerators"
REFERENCE = "h200"
"""Whose curves a GPU follows that has none of its own."""
_TILE_ROWS = 128
"""Of scores, in flash attention."""
_FEW_CHANNELS = 16
"""Tensor cores take channels by so many."""


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


class OperatorCurves(msgspec.Struct, frozen=True):
    """All of them, of one GPU and its host."""

    accelerator: str
    multiprocessors: int
    source: dict[str, Any]
    grids: dict[str, ShareGrid]
    """By family, precision and variant: product/bf16/nt, attention/bf16/causal/forward, …"""
    factors: dict[str, float]
    """How much longer operators take that no grid has; `bandwidth` is the largest share of it that was seen."""
    traffic: dict[str, TrafficCurve]
    """By kind and bytes of an element."""
    shaped: dict[str, ShapedTimes]
    host: dict[str, Any]
    """`HostTimes`."""


@cache
def operator_curves(short_name: str) -> OperatorCurves:
    """Those of this GPU where it was measured, of the reference otherwise."""
    path = FOLDER / f"{short_name}.json"
    if not path.exists():
        path = FOLDER / f"{REFERENCE}.json"
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


class OperatorModel:
    """One GPU's seconds of every operator."""

    def __init__(self, accelerator: Accelerator, curves: OperatorCurves, launch_overhead: bool = True) -> None:
        self.accelerator = accelerator
        self.curves = curves
        host_us = {**curves.host, "parameter": curves.host["parameter"] / 2} if launch_overhead else {}
        self.host = msgspec.convert(_seconds(host_us), HostTimes)
        # How much larger an operator has to be to fill this GPU as well as the one measured.
        self._filling = accelerator.multiprocessors / curves.multiprocessors
        self._grids: dict[str, Grid] = {}
        self.seconds: Callable[[Work], float] = lru_cache(maxsize=None)(self._seconds)

    @property
    def origin(self) -> str:
        """Where the figures come from, in words."""
        device, source = accelerator_named(self.curves.accelerator).name, self.curves.source
        text = f"efficiencies measured one by one on an {device} ({source['date']})"
        return text if device == self.accelerator.name else f"{text}, scaled by peak rates to {self.accelerator.name}"

    def _seconds(self, work: Work) -> float:
        """
        >>> model = operator_model("h200", "bf16")
        >>> large = Product("bf16", 8192, 8192, 8192)
        >>> 1.0 < model.seconds(large) / roofline_s(large, model.accelerator) < 1.5
        True
        """
        if isinstance(work, Product):
            return self._product(work)
        if isinstance(work, Attention):
            return self._attention(work)
        if isinstance(work, Convolution):
            return self._convolution(work)
        return self._traffic(work)

    def _product(self, work: Product) -> float:
        """A batch of products fills the device as one with more rows does."""
        precision = "bf16" if work.precision == "fp16" else work.precision
        key = f"product/{precision}/{work.transposition}"
        grid = self._grid(
            key if key in self.curves.grids else f"product/{precision}/nt",
            lambda m, n, k: Product(work.precision, m, n, k),
            (math.sqrt(self._filling), math.sqrt(self._filling), 1.0),
        )
        seconds = grid.seconds(work.m * work.batch, work.n, work.k)
        # Rows that begin at odd addresses slow the arithmetic down, not what waits for memory or latency.
        slower = self.curves.factors.get(f"alignment/{precision}/{work.transposition}/{work.alignment}", 1.0)
        peak = self.accelerator.peak_flops(work.precision) or math.inf
        return max(seconds, roofline_s(work, self.accelerator), work.flops / peak * slower)

    def _attention(self, work: Attention) -> float:
        precision = work.precision if work.precision in ("tf32", "fp32") else "bf16"
        direction = "backward" if work.backward else "forward"
        key = f"attention/{precision}/{work.kind}/{direction}"
        if key not in self.curves.grids:
            return self._attention_without_curve(work, precision, direction)
        seconds = self._filled_attention(key, work)
        return max(seconds * self._fewer_heads(key, work, seconds), roofline_s(work, self.accelerator))

    def _filled_attention(self, key: str, work: Attention) -> float:
        """Of as many heads as were measured, or more."""
        # As fast as bf16, and on every GPU.
        format_ = work.precision if work.precision in ("tf32", "fp32") else "fp16"
        grid = self._grid(
            key,
            lambda heads, length, width: Attention(format_, heads, length, length, width, work.kind, work.backward),
            (self._filling, 1.0, 1.0),
        )
        length, longest = math.sqrt(work.queries * work.keys), self.curves.grids[key].axes[1][-1]
        # Past the last length the grid grows as the length does; the scores grow as its square.
        seconds = grid.seconds(work.heads, length, work.width) * max(length / longest, 1.0)
        if work.kind == "causal":
            # The two were measured apart, and are carried apart to other GPUs. Hiding scores never takes longer.
            full = self._filled_attention(key.replace("causal", "full"), replace(work, kind="full"))
            return min(seconds, full)
        return seconds

    def _fewer_heads(self, key: str, work: Attention, seconds: float) -> float:
        """What fewer heads than were measured take, of the time of the fewest.

        Multiprocessors take rows of scores by tiles. Once each has one, fewer heads save nothing: the longest tile
        has all keys, with or without a causal mask, which leaves half to the average. So causal attention tells how
        long that tile takes. 8 and 4 heads of 4096 tokens take 0.59 and 0.54 of the time of 16 on a B200
        (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json), 0.58 as said here.
        """
        fewest = self.curves.grids[key].axes[0][0] * self._filling
        if work.heads >= fewest:
            return 1.0
        tiles = fewest * math.sqrt(work.queries * work.keys) / _TILE_ROWS
        causal_s = self._filled_attention(key.replace("full", "causal"), replace(work, kind="causal"))
        one_each = 2 * self.accelerator.multiprocessors / tiles * (causal_s / seconds)
        return min(1.0, max(work.heads / fewest, one_each))

    def _attention_without_curve(self, work: Attention, precision: str, direction: str) -> float:
        """Kernels of 32 bits use no tensor cores; those that take a mask are slower than flash kernels."""
        if precision == "bf16":
            return self._attention(replace(work, kind="full")) * self.curves.factors["attention_mask"]
        kind = "causal" if work.kind == "causal" else "full"
        seconds = (
            work.flops / (self.accelerator.fp32_tflops * 1e12) * self.curves.factors[f"attention_fp32/{direction}"]
        )
        return max(seconds, self._attention(replace(work, precision="fp16", kind=kind)))

    def _convolution(self, work: Convolution) -> float:
        memory_format = "last" if work.channels_last else "first"
        if work.groups > 1 and work.groups == work.inputs:
            # In 32 bits there is no kernel for channels that lie last.
            return self._depthwise(work, memory_format if work.precision in ("bf16", "fp16") else "first")
        precision = "bf16" if work.precision == "fp16" else "tf32" if work.precision == "fp32" else work.precision
        key = f"convolution/{precision}/{memory_format}/{work.direction}"
        grid = self._grid(
            key if key in self.curves.grids else f"convolution/{precision}/first/{work.direction}",
            lambda pixels, inputs, outputs, kernel: Convolution(
                work.precision, work.direction, 1, inputs, outputs, pixels, pixels, kernel
            ),
            (self._filling, 1.0, 1.0, 1.0),
        )
        inputs = work.inputs / work.groups
        seconds = grid.seconds(work.images * work.pixels, inputs, work.outputs, work.kernel)
        special = "groups" if work.groups > 1 else "few_channels" if inputs < _FEW_CHANNELS else "stride"
        if special != "stride" or work.stride > 1:
            seconds *= self._factor(f"{special}/{precision}/{work.direction}", work.kernel)
        return max(seconds, roofline_s(work, self.accelerator))

    def _factor(self, key: str, kernel: float) -> float:
        """That of the kernel measured whose size is nearest."""
        known = [name.rpartition("/") for name in self.curves.factors if name.startswith(f"{key}/")]
        nearest = min(known, key=lambda name: abs(math.log(int(name[2]) / kernel)), default=None)
        return 1.0 if nearest is None else self.curves.factors["".join(nearest)]

    def _depthwise(self, work: Convolution, memory_format: str) -> float:
        """Tensor cores do not help; the gradient of the input goes over its pixels."""
        key = f"depthwise/{memory_format}/{work.direction}"
        curve = self.curves.grids[key if key in self.curves.grids else f"depthwise/first/{work.direction}"]
        shares = Grid(curve.axes, curve.share, rising=False)
        pixels = work.input_pixels if work.direction == "input" else work.pixels
        flops = 2.0 * work.images * work.inputs * pixels * work.kernel
        share = shares.seconds(min(work.pixels, curve.axes[0][-1]), min(work.kernel, curve.axes[1][-1])) / 1000
        peak = self.accelerator.fp32_tflops * 1e12
        return max(flops / (peak * share), work.bytes / self.accelerator.bytes_per_s)

    def _traffic(self, work: Traffic) -> float:
        """Never quicker than the largest share of bandwidth that was seen; otherwise as the device is filled."""
        floor_s = work.bytes / (self.accelerator.bytes_per_s * self.curves.factors["bandwidth"])
        if work.kind.startswith("update/"):
            return work.bytes / self.accelerator.bytes_per_s * self.curves.factors[work.kind]
        key = f"{work.kind}/{4 if work.width > 2 else 2}"
        shaped = self.curves.shaped.get(key)
        if shaped is not None and work.sizes:
            grid = self._times(f"shaped/{key}", shaped.axes, shaped.us)
            return max(floor_s, grid.seconds(work.sizes[0] / self._filling, *work.sizes[1:]))
        curve = self.curves.traffic.get(key) or self.curves.traffic.get(f"{work.kind}/4")
        if curve is None:
            curve = self.curves.traffic[f"strided/{4 if work.width > 2 else 2}"]
        return max(floor_s, self._times(f"traffic/{key}", [curve.bytes], curve.us).seconds(work.bytes / self._filling))

    def _times(self, key: str, axes: list[list[float]], us: list[float]) -> Grid:
        if key not in self._grids:
            self._grids[key] = Grid(axes, [each * 1e-6 for each in us])
        return self._grids[key]

    def _grid(
        self, key: str, work: Callable[..., Product | Attention | Convolution], filling: tuple[float, ...]
    ) -> Grid:
        """Seconds on this GPU: its own roofline at the sizes that fill it as those measured fill the other."""
        if key not in self._grids:
            curve = self.curves.grids[key]
            axes = [[size * factor for size in axis] for axis, factor in zip(curve.axes, filling, strict=True)]
            seconds = [
                roofline_s(work(*node), self.accelerator) * 1000 / max(share, 1)
                for node, share in zip(itertools.product(*axes), curve.share, strict=True)
            ]
            self._grids[key] = Grid(axes, seconds)
        return self._grids[key]


def _seconds(us: Any) -> Any:
    """Microseconds, in dictionaries and lists, as seconds."""
    if isinstance(us, dict):
        return {name: _seconds(each) for name, each in us.items()}
    return [_seconds(each) for each in us] if isinstance(us, list) else us * 1e-6


def operator_model(
    device: str | None,
    precision: str,
    *,
    tflops: float | None = None,
    gbps: float | None = None,
    launch_overhead: bool = True,
) -> OperatorModel:
    """A known GPU, or one by its peak TFLOP/s (at the profile's precision) and memory GB/s; both override."""
    for option, value in (("--tflops", tflops), ("--gbps", gbps)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{option} is {value}: it must be above zero")
    if device is None and (tflops is None or gbps is None):
        raise InputError("a GPU that is not known by name needs both --tflops and --gbps")
    curves = operator_curves(device or "")
    # A GPU that only its rates are known of is taken to be filled as the one measured is.
    known = accelerator_named(curves.accelerator if device is None else device)
    if device is None:
        known = replace(known, name="custom")
    if tflops is None and known.peak_flops(precision) is None:
        have = [each for each in ("fp32", "tf32", "fp16", "bf16", "fp8") if known.peak_flops(each) is not None]
        raise InputError(f"{known.name} has no {precision}: use {', '.join(have)}")
    if tflops is not None:
        known = replace(
            known, fp32_tflops=tflops, tf32_tflops=tflops, half_tflops=tflops, fp8_tflops=tflops, bfloat16=True
        )
    if gbps is not None:
        known = replace(known, memory_gbps=gbps)
    return OperatorModel(known, curves, launch_overhead)
