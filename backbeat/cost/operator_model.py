"""Seconds of single operators on one GPU, from curves that may have been measured on others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from backbeat.cost.operator_curves import Grid, HostTimes, MeasuredPart, carried_s, near
from backbeat.cost.operators import (
    Attention,
    Convolution,
    Device,
    Floats,
    Product,
    Traffic,
    Work,
    nodes,
    roofline_s,
    rooflines_s,
)

_TILE_ROWS = 128
"""Of scores, in flash attention."""
_FEW_CHANNELS = 16
"""Tensor cores take channels by so many."""
_HALVES = ("bf16", "fp16")


class OperatorModel:
    """One GPU's seconds of every operator: those measured on it, or on the GPU most like it that has them."""

    def __init__(
        self,
        accelerator: Device,
        parts: tuple[MeasuredPart, ...],
        products: Sequence[tuple[float, float, float, float]] = (),
        launch_overhead: bool = True,
    ) -> None:
        self.accelerator = accelerator
        self.parts = parts
        """The nearest first. The last has every kind of operator."""
        self.products = products
        """Rows, columns, depth and seconds of products that were timed on this very GPU."""
        self.curves = parts[-1].curves
        host_us = {**self.curves.host, "parameter": self.curves.host["parameter"] / 2} if launch_overhead else {}
        self.host = msgspec.convert(_seconds(host_us), HostTimes)
        # How much larger an operator has to be to fill this GPU as well as the one measured.
        self._filling = accelerator.multiprocessors / parts[-1].device.multiprocessors
        self._grids: dict[str, Grid] = {}
        self.seconds: Callable[[Work], float] = lru_cache(maxsize=None)(self._seconds)
        """Of one operator by itself, in a short burst."""

    def sustained_s(self, work: Work) -> float:
        """In the middle of a training step, at the clocks that power leaves."""
        return self.seconds(work) / (1.0 if isinstance(work, Traffic) else self.accelerator.sustained_share)

    @property
    def origin(self) -> str:
        """Where the figures come from, in words."""
        own = self.accelerator.name
        device, source = self.parts[-1].device.name, self.curves.source
        text = f"efficiencies measured one by one on an {device} ({source['date']})"
        if device == own:
            return text
        text += f", carried by peak rates to {own}"
        product = self._product_part
        if self.products:
            return f"{text}; products of matrices corrected by {len(self.products)} measured on it"
        if product is None:
            return text
        carried = "" if product.device.name == own else ", carried likewise"
        return f"{text}; products of matrices as measured on {product.device.name}{carried}"

    def _seconds(self, work: Work) -> float:
        """
        >>> from backbeat.model.accelerator import operator_model
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
        seconds = self._product_grid(work.precision, work.transposition).seconds(work.m * work.batch, work.n, work.k)
        # Rows that begin at odd addresses slow the arithmetic down, not what waits for memory or latency.
        slower = self.curves.factors.get(f"alignment/{precision}/{work.transposition}/{work.alignment}", 1.0)
        peak = self.accelerator.rate(work.precision) or math.inf
        return max(seconds, roofline_s(work, self.accelerator), work.flops / peak * slower)

    @property
    def _product_part(self) -> MeasuredPart | None:
        """The nearest with products in 16 bits that are known beside the reference's."""
        return next((part for part in self.parts if _PRODUCTS in part.curves.products), None)

    def _product_grid(self, precision: str, transposition: str) -> Grid:
        key = f"product/{'bf16' if precision == 'fp16' else precision}/{transposition}"
        if key not in self._grids:
            here, part = self.accelerator, self._product_part
            if precision not in _HALVES or part is None:
                axes, seconds = self._reference_products(precision, transposition, here)
            else:
                measured = part.curves.products[_PRODUCTS]
                axes, seconds = measured.axes, np.array(measured.us) * 1e-6
                if transposition != "nt":
                    # Measured as a linear layer's forward alone: other orders take as much longer as on the reference.
                    other, usual = (
                        Grid(*self._reference_products("bf16", order, part.device)) for order in (transposition, "nt")
                    )
                    seconds = seconds * (other.over(axes) / usual.over(axes)).ravel()
                axes, seconds = _carried_products(axes, seconds, (part.device, "bf16"), (here, precision))
            if self.products and precision in _HALVES:
                seconds = seconds * self._correction(Grid(axes, seconds), axes)
            self._grids[key] = Grid(axes, seconds)
        return self._grids[key]

    def _reference_products(
        self, precision: str, transposition: str, device: Device
    ) -> tuple[list[list[float]], Floats]:
        """As the reference has them, carried to this device. It has no products in 4 bits: as in 8 then."""
        known = {"fp16": "bf16", "fp4": "fp8"}.get(precision, precision)
        curves, there = self.curves.grids, self.parts[-1].device
        curve = curves.get(f"product/{known}/{transposition}") or curves[f"product/{known}/nt"]
        best_s = rooflines_s(partial(Product, known), curve.axes, there)
        seconds = best_s * 1000 / np.maximum(curve.share, 1)
        return _carried_products(curve.axes, seconds, (there, known), (device, precision))

    def _correction(self, grid: Grid, axes: list[list[float]]) -> Floats:
        """How many times as long products take as was thought, by those that were timed."""
        ratios = [math.log(seconds / grid.seconds(m, n, k)) for m, n, k, seconds in self.products]
        return np.asarray(np.exp(near(nodes(axes), [sizes[:3] for sizes in self.products], ratios)))

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
        seconds = work.flops / self._wide_rate * self.curves.factors[f"attention_fp32/{direction}"]
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
        return max(flops / (self._wide_rate * share), work.bytes / self.accelerator.bytes_per_s)

    @property
    def _wide_rate(self) -> float:
        """Of 32 bits, without tensor cores."""
        return self.accelerator.rate("fp32") or math.inf

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

    def _grid(self, key: str, work: Callable[..., Attention | Convolution], filling: tuple[float, ...]) -> Grid:
        """Seconds on this GPU at the sizes that fill it as those measured fill the reference."""
        if key not in self._grids:
            curve, there = self.curves.grids[key], self.parts[-1].device
            axes = _scaled(curve.axes, filling)
            best_s = rooflines_s(work, curve.axes, there)
            seconds = best_s * 1000 / np.maximum(curve.share, 1)
            self._grids[key] = Grid(axes, carried_s(seconds, best_s, rooflines_s(work, axes, self.accelerator)))
        return self._grids[key]


_PRODUCTS = "bf16/nt"


def _carried_products(
    axes: list[list[float]], seconds: Floats, there: tuple[Device, str], here: tuple[Device, str]
) -> tuple[list[list[float]], Floats]:
    """Products measured on one device in one precision, in another on another. Rows and columns fill it together."""
    wider = math.sqrt(here[0].multiprocessors / there[0].multiprocessors)
    scaled = _scaled(axes, (wider, wider, 1.0))
    best_s = [
        rooflines_s(partial(Product, precision), sizes, device)
        for (device, precision), sizes in ((there, axes), (here, scaled))
    ]
    return scaled, carried_s(seconds, *best_s)


def _scaled(axes: list[list[float]], factors: Sequence[float]) -> list[list[float]]:
    return [[size * factor for size in axis] for axis, factor in zip(axes, factors, strict=True)]


def _seconds(us: Any) -> Any:
    """Microseconds, in dictionaries and lists, as seconds."""
    if isinstance(us, dict):
        return {name: _seconds(each) for name, each in us.items()}
    return [_seconds(each) for each in us] if isinstance(us, list) else us * 1e-6
