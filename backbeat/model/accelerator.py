"""A GPU: what it holds and computes at most, and whose measured operators it follows. `backbeat.accelerator/1`.

Figures are the vendors': dense peak rates without sparsity (half of what is stated with it), multiprocessors (compute
units on AMD's) that are enabled. Memory is what the driver shows, which is more than data sheets call it: 24 GB are
24 GiB, 25.8e9 bytes. A GPU of two dies that appear as two devices (MI250X) stands here as one of them.

A file of one's own says what it changes of another GPU:

    {"schema": "backbeat.accelerator/1", "name": "my half", "like": "h100", "multiprocessors": 66,
     "source": {"method": "assumed"}}
"""

from __future__ import annotations

import os
import re
from functools import cache, lru_cache
from typing import Annotated, ClassVar

from msgspec import Meta, field
from msgspec.structs import force_setattr, replace

from backbeat.cost.operator_curves import REFERENCE, MeasuredPart, measured_operators, operator_curves
from backbeat.cost.operator_model import OperatorModel
from backbeat.errors import InputError
from backbeat.model.blocks import HostLink
from backbeat.model.checks import Checked
from backbeat.model.files import Document, Source, bundled

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
Rate = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=1)]

_STATED = re.compile(r"(\d{2,3})\s?GB\b", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9]+")
_OTHER_CHIPS = frozenset(("ti", "super", "laptop", "mobile"))
"""Words beside a GPU's name that make it another one."""
_ROUNDED = 0.08
"""Names state memory in round numbers; one further off states another size."""


class Sustained(Checked, frozen=True, kw_only=True):
    """What is left of the rates of short bursts, one operator at a time, when products and attention follow each other
    for a whole step and power holds clocks down."""

    share: Annotated[float, Meta(gt=0, le=1)]
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Of that share, from one of these GPUs to another."""


class Accelerator(Document, frozen=True, kw_only=True):
    """What a file leaves out is as `like` has it; its rates are then those of as many multiprocessors. Once made, an
    accelerator has every figure."""

    SCHEMA: ClassVar[str] = "backbeat.accelerator/1"
    FOLDER: ClassVar[str] = "accelerators"

    name: str
    """What the driver's name contains."""
    like: str | None = None
    """The bundled one that it resembles most: whose figures it has where it says none, and whose measured operators it
    follows."""
    memory_bytes: Size = 0
    """All of it, as the driver shows it."""
    memory_bandwidth: Rate = 0.0
    """Bytes a second."""
    multiprocessors: Size = 0
    peak_flops: dict[str, Rate] = field(default_factory=dict)
    """Operations a second, by precision: all that it has. Before Ampere there is no bf16."""
    products: tuple[tuple[Size, Size, Size, Rate], ...] = ()
    """Products of 16-bit matrices that were timed: [m, n, k, seconds] of m × k by k × n. They correct what follows from
    `like`, most at sizes near theirs."""
    sustained: Sustained | None = None
    """None: nothing is known to be lost."""
    link: HostLink | None = None
    """To the host, for what is offloaded."""
    source: Source | str

    def __post_init__(self) -> None:
        super().__post_init__()
        base = None if self.like is None else bundled_accelerator(self.like)
        for name in ("memory_bytes", "memory_bandwidth", "multiprocessors"):
            if not getattr(self, name) and base is None:
                raise InputError(f'{name} is missing: add it, or name a bundled GPU that has the rest ("like": "h100")')
        for name in ("memory_bytes", "memory_bandwidth", "multiprocessors", "sustained", "link"):
            if not getattr(self, name) and base is not None:
                force_setattr(self, name, getattr(base, name))
        force_setattr(self, "peak_flops", self._rates(base))

    def _rates(self, base: Accelerator | None) -> dict[str, float]:
        """What a GPU does not say of 32 bits is as much of its 16 bits as of the other's, or on the reference."""
        said = dict(self.peak_flops)
        if unknown := sorted(set(said) - set(PRECISIONS)):
            raise InputError(f"peak_flops has {unknown[0]!r}: precisions are {', '.join(PRECISIONS)}")
        if base is not None and not said:
            return {name: rate * self.multiprocessors / base.multiprocessors for name, rate in base.peak_flops.items()}
        half = "bf16" if "bf16" in said else "fp16"
        if half not in said:
            raise InputError(f"peak_flops has {', '.join(said) or 'nothing'}: it needs bf16, or fp16 of older GPUs")
        if "fp32" not in said:
            other = (base or bundled_accelerator(REFERENCE)).peak_flops
            said["fp32"] = said[half] * other["fp32"] / other["fp16"]
        return {"fp16": said[half], **said}

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bandwidth, self.multiprocessors))

    @property
    def bytes_per_s(self) -> float:
        return self.memory_bandwidth

    @property
    def short_name(self) -> str:
        """
        >>> accelerator_named("h100-pcie").short_name
        'h100-pcie'
        """
        return self.name.lower().replace(" ", "-")

    def rate(self, precision: str) -> float | None:
        """Operations a second; None where the device does not have this precision, or nobody says how fast it is."""
        return self.peak_flops.get(precision)

    @property
    def sustained_share(self) -> float:
        return 1.0 if self.sustained is None else self.sustained.share

    @property
    def measured(self) -> bool:
        """Whether any operator was timed on it, or on the same chip with other memory."""
        if self.products or self.short_name in measured_operators():
            return True
        base = None if self.like is None else bundled_accelerator(self.like)
        same = base is not None and (base.multiprocessors, base.peak_flops) == (self.multiprocessors, self.peak_flops)
        return base is not None and same and base.measured

    def operators(self, *, launch_overhead: bool = True) -> OperatorModel:
        """What each operator takes on it. Without `launch_overhead` the host is taken to be always ahead."""
        parts = []
        named: str | None = self.short_name
        while named is not None:
            if named in measured_operators():
                parts.append(MeasuredPart(bundled_accelerator(named), operator_curves(named)))
            named = (self if named == self.short_name else bundled_accelerator(named)).like
        if all(part.curves.accelerator != REFERENCE for part in parts):
            parts.append(MeasuredPart(bundled_accelerator(REFERENCE), operator_curves(REFERENCE)))
        return OperatorModel(self, tuple(parts), self.products, launch_overhead)


@cache
def bundled_accelerator(name: str) -> Accelerator:
    """By its short name alone."""
    if name not in bundled(Accelerator):
        raise InputError(f"like is {name!r}: it must be a bundled GPU: {', '.join(bundled(Accelerator))}")
    return Accelerator.load(bundled(Accelerator)[name])


@cache
def bundled_accelerators() -> dict[str, Accelerator]:
    return {name: bundled_accelerator(name) for name in bundled(Accelerator)}


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


@lru_cache(maxsize=256)
def accelerator(device: str) -> Accelerator | None:
    """The bundled one that a profile's `device` names: the most specific of those whose words are all in it.

    >>> accelerator("NVIDIA A100-SXM4-40GB").memory_bandwidth / 1e9, accelerator("NVIDIA A100").memory_bandwidth / 1e9
    (1555.0, 2039.0)
    >>> accelerator("NVIDIA H100 PCIe").short_name, round(accelerator("Tesla V100-SXM2-16GB").memory_bytes / 2**30)
    ('h100-pcie', 16)
    >>> accelerator("NVIDIA GeForce RTX 3070 Ti") is accelerator("Intel(R) Xeon(R) CPU") is None
    True
    """
    words = _words(device)
    found = [one for one in bundled_accelerators().values() if _words(one.name) <= words]
    found = [one for one in found if not (words - _words(one.name)) & _OTHER_CHIPS]
    if not found:
        return None
    chosen = max(found, key=lambda one: (len(_words(one.name)), len(one.name)))
    stated = _STATED.search(device)
    stated_bytes = int(stated[1]) << 30 if stated else chosen.memory_bytes
    near = abs(stated_bytes / chosen.memory_bytes - 1) < _ROUNDED
    return chosen if near else replace(chosen, memory_bytes=stated_bytes)


def accelerator_named(name: str | os.PathLike[str] | Accelerator) -> Accelerator:
    """The accelerator of this short name, as commands take it (h100, 3090), of its driver's name (NVIDIA
    A100-SXM4-40GB), or of this file; one that is given stays."""
    if isinstance(name, Accelerator):
        return name
    text = os.fspath(name)
    if text.endswith((".json", ".gz")) or os.path.isfile(text):
        return Accelerator.load(name)
    known = bundled_accelerators()
    partly = [one for one in known.values() if _words(text) and _words(text) <= _words(one.name)]
    found = known.get(text.lower()) or accelerator(text) or (partly[0] if len(partly) == 1 else None)
    if found is None:
        raise InputError(
            f"{text!r} is no accelerator known here: known are {', '.join(known)}; a file describes another "
            "(docs/how-to/describe-a-gpu.md)"
        )
    return found


def operator_model(
    device: str | os.PathLike[str] | Accelerator | None,
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
    if device is None:
        if tflops is None or gbps is None:
            raise InputError("a GPU that is not known by name needs both --tflops and --gbps")
        # A GPU that only its rates are known of is taken to be filled as the one measured is.
        known = replace(bundled_accelerator(REFERENCE), name="custom", like=REFERENCE, source="assumed")
    else:
        known = accelerator_named(device)
    if tflops is None and known.rate(precision) is None:
        raise InputError(f"{known.name} has no {precision}: use {', '.join(known.peak_flops)}")
    if tflops is not None:
        known = replace(known, peak_flops=dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "fp8"), tflops * 1e12))
    if gbps is not None:
        known = replace(known, memory_bandwidth=gbps * 1e9)
    return known.operators(launch_overhead=launch_overhead)
