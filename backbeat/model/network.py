"""What the cluster does to a message: how long collectives take, alone and several at once."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.cost import Batch, Curve, LinkCost
from backbeat.cost.collectives import Collective
from backbeat.cost.scaling import Algorithm, moved
from backbeat.errors import InputError
from backbeat.model.checks import at_least, not_negative
from backbeat.model.files import Document
from backbeat.model.slowdown import Slowdown, Transport
from backbeat.model.source import Source

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Point = tuple[Bytes, Seconds]
_SHORTEST_S = 1e-9
_MOST_WORKERS = 10**9
_COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


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

    @classmethod
    def of(cls, curve: Curve) -> CollectiveTimes:
        """What a network file keeps of a curve."""
        if curve.is_affine:
            alpha, beta = curve.line
            return cls(alpha_s=alpha, beta_s_per_byte=beta)
        sizes = (round(size) for size in curve.sizes.tolist())
        return cls(points=tuple(zip(sizes, curve.times.tolist(), strict=True)))

    @property
    def curve(self) -> Curve:
        """The cost model of this collective."""
        if self.points is None:
            return Curve.affine(self.alpha_s or 0.0, self.beta_s_per_byte or 0.0)
        return Curve.through(self.points)

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
    transport: Transport | None = None
    """What carries the messages, across nodes where there are several: how much computation slows down beside them."""

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
    slowdown: Slowdown | None = None
    """How much longer computation takes beside an all-reduce, as measured on this cluster."""
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
        if workers < 1:
            raise InputError(f"workers is {workers}: a job has at least one worker")
        if workers > _MOST_WORKERS:
            raise InputError(f"workers is {workers}: no model of a cluster holds beyond {_MOST_WORKERS}; choose fewer")
        if workers == self.workers:
            return self
        base = self._calibrated
        if workers == base.workers:
            return base
        if base.workers < 2:
            raise InputError(
                f"network {self.name!r} was measured on {base.workers} worker: nothing travels there, "
                "so it cannot be moved to more; calibrate with 2 workers or more"
            )
        if base.one_node and workers > base.topology.gpus_per_node:
            raise InputError(
                f"network {self.name!r} was measured inside one node of {base.topology.gpus_per_node} GPUs and says "
                f"nothing of the network between nodes, which {workers} need: measure across two nodes or more, or "
                "name what joins the nodes with --across, like --across ib400"
            )
        times = {name: base._moved(name, workers) for name in _COLLECTIVES if getattr(base, name) is not None}
        return msgspec.structs.replace(
            base,
            workers=workers,
            concurrency=base.concurrency_on(times["all_reduce"]) if workers > 1 else (),
            moved_from=Calibration(**{name: getattr(base, name) for name in Calibration.__struct_fields__}),
            **times,
        )

    @property
    def one_node(self) -> bool:
        """All workers were GPUs of one node: nothing here crossed a network between nodes."""
        base = self._calibrated
        return 1 < base.workers <= base.topology.gpus_per_node

    def joined_by(self, across: Network) -> Network:
        """Several such nodes, joined by `across`, whose workers are whole nodes with one link each.

        Every all-reduce takes its time inside the node, and then as long as all of its bytes take across.

        >>> node = Network(name="node", workers=8, topology=Topology(gpus_per_node=8),
        ...                all_reduce=CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-11))
        >>> node.joined_by(Network.load("ib400")).at(workers=64).workers
        64
        """
        base, between = self._calibrated, across._calibrated
        if not base.one_node:
            raise InputError(f"network {self.name!r} was not measured inside one node: leave --across out")
        if between.one_node:
            raise InputError(f"network {across.name!r} was measured inside one node: --across is what joins nodes")
        inside, beyond = base.all_reduce.curve, between.all_reduce.curve
        sizes = np.unique(np.concatenate([inside.sizes, beyond.sizes, [0.0, 2.0**20, 2.0**24, 2.0**28]]))
        times = inside.time(sizes) + beyond.time(sizes)
        return Network(
            name=f"{base.name}+{between.name}",
            workers=base.workers * between.workers,
            all_reduce=CollectiveTimes(
                points=tuple((round(size), float(time)) for size, time in zip(sizes, times, strict=True))
            ),
            topology=Topology(algorithm="hierarchical", gpus_per_node=base.workers, inside=base.all_reduce),
            backend=base.backend,
            source=between.source,
            notes=(
                *base.notes,
                *between.notes,
                f"nodes as in {base.name}, joined by {between.name} with one link a node, which all of its GPUs share",
            ),
        )

    def concurrency_on(self, all_reduce: CollectiveTimes) -> tuple[ConcurrencyPoint, ...]:
        """The concurrency rows with other all-reduce times, at another number of workers or on another link."""
        if not self.concurrency:
            return ()
        seconds = self.cost.on(all_reduce.curve, self._batches)
        return tuple(
            msgspec.structs.replace(row, seconds=there) for row, there in zip(self.concurrency, seconds, strict=True)
        )

    @cached_property
    def cost(self) -> LinkCost:
        """The cost model of this network's all-reduce, fitted once."""
        return LinkCost.fit(self.all_reduce.curve, self._batches)

    @property
    def _batches(self) -> list[Batch]:
        return [Batch(row.bytes, row.messages, row.communicators, row.seconds) for row in self.concurrency]

    @property
    def _calibrated(self) -> Network:
        """The network at the number of workers it was measured on."""
        if self.moved_from is None:
            return self
        fields = {name: getattr(self.moved_from, name) for name in Calibration.__struct_fields__}
        return msgspec.structs.replace(self, moved_from=None, **fields)

    def _moved(self, name: Collective, workers: int) -> CollectiveTimes:
        topology = self.topology
        return CollectiveTimes.of(
            moved(
                getattr(self, name).curve,
                name,
                self.workers,
                workers,
                topology.algorithm,
                inside=topology.inside.curve if topology.inside is not None else None,
                per_node=topology.gpus_per_node,
            )
        )
