"""What was measured of single operators on one GPU: the file, and where it is found."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import InputError

FOLDER = Path(__file__).resolve().parent.parent / "zoo" / "accelerators"
REFERENCE = "h200"
"""Whose curves a GPU follows that has none of its own."""


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


class HostCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the host takes to submit, in microseconds."""

    view: float
    """A view, or an allocation."""
    forward: dict[str, float]
    """An operator of forward, with what autograd keeps of it, by kind of work."""
    backward: dict[str, float]
    parameter: float
    """A parameter in one iteration, beside the operators: calling its module in forward, accumulating its gradient."""
    compiled: float
    """A kernel of a compiled model."""
    update: dict[str, list[float]]
    """An optimizer's step, by how it is split into kernels: at least, and for each tensor."""


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
    host: HostCosts


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
