"""What the cluster does to a message: how long collectives take, alone and several at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.errors import InputError
from backbeat.model.checks import at_least, not_negative
from backbeat.model.files import Document
from backbeat.model.source import Source

if TYPE_CHECKING:
    from backbeat.cost.link import LinkCost

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Point = tuple[Bytes, Seconds]
Algorithm = Literal["ring", "tree", "auto", "halving-doubling", "hierarchical"]
_SHORTEST_S = 1e-9


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Isolated times of one collective: measured points, or `alpha_s + beta_s_per_byte * bytes`."""

    points: tuple[Point, ...] | None = None
    """(bytes, seconds), sizes rising."""
    alpha_s: Seconds | None = None
    beta_s_per_byte: Seconds | None = None

    def __post_init__(self) -> None:
        if self.points is None:
            if self.alpha_s is None or self.beta_s_per_byte is None:
                raise InputError("give either points, or both alpha_s and beta_s_per_byte")
            not_negative("alpha_s", self.alpha_s)
            not_negative("beta_s_per_byte", self.beta_s_per_byte)
            return
        if self.alpha_s is not None or self.beta_s_per_byte is not None:
            raise InputError("points and alpha_s/beta_s_per_byte exclude each other: keep one of the two forms")
        force_setattr(self, "points", tuple((size, seconds) for size, seconds in self.points))
        self._check_points(self.points)

    @staticmethod
    def _check_points(points: tuple[Point, ...]) -> None:
        if len(points) < 2:
            raise InputError(f"points has {len(points)}: a curve needs two sizes or more; measure more sizes")
        previous = -1
        for index, (size, seconds) in enumerate(points):
            not_negative(f"points[{index}][0]", size)
            not_negative(f"points[{index}][1]", seconds)
            if size <= previous:
                raise InputError(
                    f"points[{index}] has {size} bytes after {previous}: sizes must rise; sort them, one point a size"
                )
            previous = size


class ConcurrencyPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`messages` equal messages issued at once, spread over `communicators`: `seconds` until the last is done."""

    bytes: Annotated[int, Meta(ge=1)]
    messages: Annotated[int, Meta(ge=1)]
    communicators: Annotated[int, Meta(ge=1)]
    seconds: Seconds

    def __post_init__(self) -> None:
        for field in ("bytes", "messages", "communicators"):
            at_least(field, getattr(self, field), 1)
        not_negative("seconds", self.seconds)
        if 0 < self.seconds < _SHORTEST_S:
            raise InputError(f"seconds is {self.seconds:g}: no message takes less than a nanosecond; write seconds")


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the workers are joined: what is needed to move a calibration to another number of them."""

    algorithm: Algorithm = "auto"
    gpus_per_node: Annotated[int, Meta(ge=1)] = 1
    inside: CollectiveTimes | None = None
    """All-reduce inside one full node, for `hierarchical` (NVLink inside, network across)."""

    def __post_init__(self) -> None:
        at_least("gpus_per_node", self.gpus_per_node, 1)
        if self.algorithm == "hierarchical" and self.inside is None:
            raise InputError("algorithm 'hierarchical' needs inside: the all-reduce times within one node")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measurement a moved network was computed from."""

    workers: Annotated[int, Meta(ge=1)]
    all_reduce: CollectiveTimes
    all_gather: CollectiveTimes | None = None
    reduce_scatter: CollectiveTimes | None = None
    broadcast: CollectiveTimes | None = None
    concurrency: tuple[ConcurrencyPoint, ...] = ()


class Network(Document, frozen=True, kw_only=True):
    """Collective times of a cluster at one number of workers; `at` moves it to another."""

    SCHEMA: ClassVar[str] = "backbeat.network/2"
    FOLDER: ClassVar[str] = "networks"

    name: str
    workers: Annotated[int, Meta(ge=1)]
    all_reduce: CollectiveTimes
    concurrency: tuple[ConcurrencyPoint, ...] = ()
    topology: Topology = Topology()
    all_gather: CollectiveTimes | None = None
    reduce_scatter: CollectiveTimes | None = None
    broadcast: CollectiveTimes | None = None
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    """The library the times belong to; gloo runs two collectives at a time in one process group."""
    moved_from: Calibration | None = None
    """Set by `at`: the calibration these times are extrapolated from."""
    source: Source | str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("concurrency", "notes"):
            force_setattr(self, field, tuple(getattr(self, field)))
        at_least("workers", self.workers, 1)

    def at(self, *, workers: int) -> Network:
        """The same cluster with another number of workers, computed from the original calibration."""
        from backbeat.cost.scaling import moved  # late: cost stands to the right of model

        return moved(self, workers)

    @cached_property
    def cost(self) -> LinkCost:
        """The cost model of this network's all-reduce, fitted once."""
        from backbeat.cost.link import LinkCost  # late: cost stands to the right of model

        return LinkCost.of(self)
