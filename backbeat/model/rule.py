"""Which of several ways is recommended: one order of simplicity and one tolerance, for planners, answers and runtime.

Uncertainty that all ways share (how busy the cluster is, how fast this GPU computes) cancels between them. What is left
is how far off the judge finds *ratios* of two ways. Ways closer than that are level, and of level ways the simplest is
recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

Weighed = TypeVar("Weighed")
Fits = Literal["yes", "tight", "no"]

PLANS = 0.01
"""Plans that differ in buckets or units alone: the `sharded` table of validation, ratios off by 0.6 % in the median."""
WAYS = 0.025
"""Ways that hold the whole model or shards of it: the tables `lab` and `training`, 2.5 and 2.4 %."""
LAYOUTS = 0.14
"""Ways of which one shares layers, stages, sequences or experts: tensor and pipeline parallelism together, 14 %."""
MEMORY_ERROR = {"profile": 0.025, "shape": 0.075}
"""How far nine of ten predicted peaks are off, by what was known: `memory` and `sharded_memory`, and `simumax_b200`."""
BY_HAND = ("ddp", "fsdp", "hsdp", "zero1", "zero2")
"""What needs no plan file, the simplest first."""
PLANNED = ("mg-wfbp", "asc-wfbp", "adaptive", "optimal", "best", "compressed", "sharded")
"""What a planner chooses; people write everything else by hand."""
SPLITS = ("tp", "pp", "cp", "ep")
"""Dimensions of a mesh that share more than batch and parameters."""


def simplicity(
    way: str,
    mesh: Mapping[str, int] | None = None,
    *,
    communicators: int = 1,
    buckets: int = 1,
    plan_file: bool = False,
) -> tuple[int, ...]:
    """Lower is simpler: what needs no plan file, then fewer parallel dimensions, communicators, buckets. What people
    write by hand may still need a `plan_file` where their framework lacks it.

    >>> ways = ["best", "zero2", "tp=8", "hsdp:8", "ddp", "fsdp"]
    >>> sorted(ways, key=lambda way: simplicity(way, {"replicate": 8, "tp": 8} if way == "tp=8" else {}))
    ['ddp', 'fsdp', 'hsdp:8', 'zero2', 'best', 'tp=8']
    """
    name = way.partition(":")[0]
    # What a step computes is simpler than what it leaves out.
    place = len(BY_HAND) * 2 + (name == "compressed")
    if name in BY_HAND:
        place = BY_HAND.index(name) + plan_file * len(BY_HAND)
    return place, sum(size > 1 for size in (mesh or {}).values()), communicators, buckets


def by_hand(way: str) -> bool:
    """Whether people write it without a planner.

    >>> [by_hand(way) for way in ("hsdp:8", "tp=8+pp=2", "best", "plan.json")]
    [True, True, False, False]
    """
    return way.partition(":")[0] not in PLANNED and not way.endswith(".json")


def tolerance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """How close two ways with these meshes are level.

    >>> tolerance({"shard": 64}, {"replicate": 64}), tolerance({"shard": 64}, {"shard": 8, "tp": 8})
    (0.025, 0.14)
    """
    return LAYOUTS if any(mesh.get(name, 1) > 1 for mesh in (one, other) for name in SPLITS) else WAYS


def level(
    ways: Iterable[Weighed], seconds: Callable[[Weighed], float], within: float | Callable[[Weighed, Weighed], float]
) -> list[Weighed]:
    """The ways that no other beats by more than the tolerance of the two, in the order given.

    >>> level([1.0, 1.02, 1.2], seconds=lambda each: each, within=0.025)
    [1.0, 1.02]
    """
    listed = list(ways)

    def beaten(slow: Weighed, fast: Weighed) -> bool:
        share = within if isinstance(within, float) else within(fast, slow)
        return seconds(slow) > seconds(fast) * (1 + share)

    return [each for each in listed if not any(beaten(each, other) for other in listed)]


def recommended(
    ways: Sequence[Weighed],
    seconds: Callable[[Weighed], float],
    simple: Callable[[Weighed], Any],
    within: float | Callable[[Weighed, Weighed], float],
) -> Weighed:
    """The simplest of those that are level; of two as simple the faster.

    >>> simple = {"planned": 1, "stock": 0}.get
    >>> recommended(["planned", "stock"], {"planned": 0.99, "stock": 1.0}.__getitem__, simple, 0.01)
    'planned'
    >>> recommended(["planned", "stock"], {"planned": 0.991, "stock": 1.0}.__getitem__, simple, 0.01)
    'stock'
    """
    return min(level(ways, seconds, within), key=lambda each: (simple(each), seconds(each)))


def fits(peak_bytes: float, device_bytes: float, error: float) -> Fits:
    """Whether a peak fits, where predicted peaks are off by `error`: tight, where nobody can tell from the prediction.

    >>> [fits(peak, 80e9, 0.025) for peak in (70e9, 79e9, 81e9, 90e9)]
    ['yes', 'tight', 'tight', 'no']
    """
    if peak_bytes > device_bytes * (1 + error):
        return "no"
    return "tight" if peak_bytes > device_bytes * (1 - error) else "yes"
