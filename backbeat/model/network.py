"""What the cluster does to a message: how long collectives take, alone and several at once."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import force_setattr, replace

from backbeat.cost import Batch, Curve, LinkCost
from backbeat.cost.collectives import COLLECTIVES, Collective
from backbeat.cost.curve import beside_traffic, mixed, stretched
from backbeat.errors import InputError
from backbeat.model.checks import Checked, at_least, whole
from backbeat.model.collective_times import CollectiveTimes, ConcurrencyPoint, ShardedTimes
from backbeat.model.files import Document, Source
from backbeat.model.slowdown import Slowdown
from backbeat.model.topology import Load, LoadBand, Topology

_MOST_WORKERS = 10**9
HALVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
_Row = TypeVar("_Row", "Network", "WorkersRow")


class WorkersRow(Checked, frozen=True, kw_only=True):
    """Collective times of the same cluster at another number of workers. What lies between two is interpolated, what
    lies beyond is extrapolated from the nearest, by the topology."""

    workers: Annotated[int, Meta(ge=1)]
    all_reduce: CollectiveTimes
    all_gather: CollectiveTimes | None = None
    reduce_scatter: CollectiveTimes | None = None
    broadcast: CollectiveTimes | None = None
    concurrency: tuple[ConcurrencyPoint, ...] = ()
    band: LoadBand | None = None


class Calibration(WorkersRow, frozen=True, kw_only=True):
    """The file's own times, which a moved network was computed from, and how."""

    used: tuple[int, ...] = ()
    """The numbers of workers whose times were used: two where it lies between them, one where it is extrapolated from
    there, none where the file has this very number."""
    load: Load = "typical"
    """How busy the cluster is taken to be."""


class Network(Document, frozen=True, kw_only=True):
    """Collective times of a cluster at one number of workers or several; `at` moves it to another."""

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
    sharded: ShardedTimes | None = None
    """All-gathers and reduce-scatters together, and computation beside them, as measured on this cluster."""
    band: LoadBand | None = None
    rows: tuple[WorkersRow, ...] = msgspec.field(default=(), name="at")
    """Further numbers of workers. In files it is `at`, which is a method here."""
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    """The library the times belong to; gloo runs two collectives at a time in one process group."""
    accelerator: str | None = None
    """The GPUs of this cluster, by the short name that `layout` takes: h100, a100."""
    moved_from: Calibration | None = None
    """Set by `at`: the file's own times, and which of its numbers of workers these are computed from."""
    source: Source | str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "rows", tuple(sorted(self.rows, key=lambda row: row.workers)))
        own = self.workers if self.moved_from is None else self.moved_from.workers
        counts = [own, *(row.workers for row in self.rows)]
        twice = next((count for count in counts if counts.count(count) > 1), None)
        if twice is not None:
            raise InputError(f"at has {twice} workers twice: one row a number; the network's own is one of them")

    def at(self, *, workers: int, load: Load = "typical") -> Network:
        """The same cluster with another number of workers, computed from the file's own times.

        For a number that the file has, these are the file's times. Between two numbers, latency and transfer are each
        interpolated over the logarithm of the number. Elsewhere the nearest is scaled by the algorithm, and the fabric
        lets bandwidth fall. `load` gives the edges of the band, where there is one: a quiet or a busy cluster.
        """
        workers = whole("workers", workers)
        if workers < 1:
            raise InputError(f"workers is {workers}: a job has at least one worker")
        if workers > _MOST_WORKERS:
            raise InputError(f"workers is {workers}: no model of a cluster holds beyond {_MOST_WORKERS}; choose fewer")
        if load not in get_args(Load):
            raise InputError(f"load is {load!r}: it must be one of {', '.join(get_args(Load))}")
        if workers == self.workers and load == self._load:
            return self
        base = self.as_measured
        there = base if workers == base.workers else base._moved_to(workers)
        return there if load == "typical" else there._under(load)

    @property
    def one_node(self) -> bool:
        """All workers were GPUs of one node: nothing here crossed a network between nodes."""
        base = self.as_measured
        return 1 < base.file_rows[-1].workers <= base.topology.gpus_per_node

    @property
    def nodes(self) -> int:
        return self.topology.nodes(self.workers)

    @cached_property
    def edges(self) -> tuple[Network, Network] | None:
        """The same workers on a quiet cluster and on a busy one, where the file says how far these are apart."""
        fabric, band = self.topology.fabric, self.band
        if band is not None:
            wide = band.busy < band.quiet
        else:
            wide = fabric is not None and self.nodes > 1 and fabric.slowdown(self.nodes, "busy") > 1
        if not wide or self.workers == 1 or self._load != "typical":
            return None
        return self.at(workers=self.workers, load="quiet"), self.at(workers=self.workers, load="busy")

    def largest_bytes(self, collective: Collective = "all_reduce") -> int | None:
        """The largest message measured, where times come as points."""
        used = self.sources(collective) or (self.workers,)
        rows = [row for row in self.as_measured._rows_with(collective) if row.workers in used]
        points = [times.points for row in rows if (times := getattr(row, collective)) is not None]
        return min((found[-1][0] for found in points if found), default=None)

    def sources(self, collective: Collective = "all_reduce") -> tuple[int, ...]:
        """The numbers of workers whose times of this collective were used: two where this one lies between them, one
        where it is extrapolated from there, none where the file has this very number, or none at all."""
        if self.moved_from is None or getattr(self, collective) is None:
            return ()
        base = self.as_measured
        near = base._nearest(self.workers, base._rows_with(collective))
        return () if near[0].workers == self.workers else tuple(row.workers for row in near)

    def joined_by(self, across: Network, *, links: int = 1) -> Network:
        """Several such nodes, joined by `across`, whose workers are whole nodes with `links` such links each.

        Every all-reduce takes its time inside the node, and then as long as its bytes take across, shared by the links.

        >>> node = Network(name="node", workers=8, topology=Topology(gpus_per_node=8),
        ...                all_reduce=CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-11))
        >>> node.joined_by(Network.load("ib400")).at(workers=64).workers
        64
        """
        base, between = self.as_measured, across.corrected
        if not base.one_node:
            raise InputError(f"network {self.name!r} was not measured inside one node: leave --across out")
        if between.one_node:
            raise InputError(f"network {across.name!r} was measured inside one node: --across is what joins nodes")
        if between.topology.gpus_per_node > 1:
            raise InputError(
                f"network {across.name!r} has nodes of {between.topology.gpus_per_node} GPUs of its own: --across is "
                "one link between nodes, like ib400; or predict on that network alone"
            )
        at_least("links", links, 1)
        inside, beyond = base.all_reduce.curve, stretched(between.all_reduce.curve, transfer=1 / links)
        sizes = np.unique(np.concatenate([inside.sizes, beyond.sizes, [0.0, 2.0**20, 2.0**24, 2.0**28]]))
        slope = inside.link_s_per_byte + beyond.link_s_per_byte
        both = Curve(sizes, inside.time(sizes) + beyond.time(sizes), slope)
        return Network(
            name=f"{base.name}+{between.name}",
            workers=base.workers * between.workers,
            all_reduce=CollectiveTimes.of(both),
            topology=Topology(
                algorithm="hierarchical",
                gpus_per_node=base.workers,
                inside=base.all_reduce,
                fabric=between.topology.fabric,
                transport=between.topology.transport,
            ),
            backend=base.backend,
            accelerator=base.accelerator,
            source=between.source,
            notes=(
                *base.notes,
                *between.notes,
                f"nodes as in {base.name}, joined by {between.name} with "
                f"{f'{links} links' if links > 1 else 'one link'} a node, which all of its GPUs share",
            ),
        )

    def concurrency_on(self, all_reduce: CollectiveTimes) -> tuple[ConcurrencyPoint, ...]:
        """The concurrency rows with other all-reduce times, at another number of workers or on another link."""
        if not self.concurrency:
            return ()
        seconds = self.cost.on(all_reduce.curve, self.simultaneous)
        return tuple(replace(row, seconds=there) for row, there in zip(self.concurrency, seconds, strict=True))

    @cached_property
    def cost(self) -> LinkCost:
        """The cost model of this network's all-reduce, fitted once."""
        times = self._by_halves(self).all_reduce if self.moved_from is None else self.all_reduce
        return LinkCost.fit(times.curve, self.simultaneous)

    @property
    def corrected(self) -> Network:
        """The network as measured, every row's all-reduce corrected by its all-gathers and reduce-scatters."""
        base = self.as_measured
        return replace(base._by_halves(base), rows=tuple(map(base._by_halves, base.rows)))

    def _by_halves(self, row: _Row) -> _Row:
        """The row, with its all-reduce's slope from all-gathers and reduce-scatters where those have larger messages. A
        row without any has those of the others, moved to its number of workers.

        Each further byte of an all-reduce then takes as long as one of each: NCCL moves the bytes of both, unless
        switches add up. The all-reduce's own slope may be too small where its messages are small enough for buffers to
        take them in at once. validation/training/README.md says how near that is.
        """
        nodes, points = self.topology, row.all_reduce.points
        switched = {"nvls", "sharp"} & {nodes.algorithm, nodes.inside_algorithm, nodes.across_algorithm}
        if self.backend != "nccl" or points is None or switched or row.workers <= nodes.gpus_per_node:
            return row
        known = [(name, self._rows_with(name)) for name in HALVES]
        if any(not rows or rows[-1].workers <= nodes.gpus_per_node for _, rows in known):
            return row
        sources = [getattr(one, name) for name, rows in known for one in self._nearest(row.workers, rows)]
        if any(half.points is None or half.points[-1][0] <= points[-1][0] for half in sources):
            return row
        slope = sum(self._times(name, row.workers, rows)[0].curve.link_s_per_byte for name, rows in known)
        return replace(row, all_reduce=replace(row.all_reduce, link_s_per_byte=slope))

    @property
    def simultaneous(self) -> list[Batch]:
        """What was measured of messages at once."""
        return [Batch(row.bytes, row.messages, row.communicators, row.seconds) for row in self.concurrency]

    @property
    def _load(self) -> Load:
        return "typical" if self.moved_from is None else self.moved_from.load

    @property
    def as_measured(self) -> Network:
        """The network at the number of workers of the file's own times."""
        if self.moved_from is None:
            return self
        return replace(self, moved_from=None, **_row_fields(self.moved_from))

    @cached_property
    def file_rows(self) -> list[WorkersRow]:
        """Every number of workers that the file has, rising; of a calibrated network."""
        return sorted((WorkersRow(**_row_fields(self)), *self.rows), key=lambda row: row.workers)

    def _rows_with(self, collective: Collective) -> list[WorkersRow]:
        """Rows of a calibrated network, rising, that have this collective between two workers or more."""
        return [row for row in self.file_rows if row.workers > 1 and getattr(row, collective) is not None]

    def _moved_to(self, workers: int) -> Network:
        if not self._rows_with("all_reduce"):
            raise InputError(
                f"network {self.name!r} was measured on {self.workers} worker: nothing travels there, "
                "so it cannot be moved to more; calibrate with 2 workers or more"
            )
        per_node = self.topology.gpus_per_node
        if self.one_node and workers > per_node:
            raise InputError(
                f"network {self.name!r} was measured inside one node of {per_node} GPUs and says "
                f"nothing of the network between nodes, which {workers} need: measure across two nodes or more, or "
                "name what joins the nodes with --across, like --across ib400"
            )
        times: dict[str, CollectiveTimes] = {}
        used: tuple[int, ...] = ()
        for name in COLLECTIVES:
            rows = self._rows_with(name)
            # One node's all-gather says nothing of more: better none than one that crosses no network.
            if rows and (workers <= per_node or rows[-1].workers > per_node):
                times[name], sources = self._times(name, workers, rows)
                if name == "all_reduce":
                    used = sources
                elif len(sources) == 1 and len(used) != 1:
                    times[name] = self._beside_all_reduce(times[name], times["all_reduce"], sources[0], workers)
        times["all_reduce"], _ = self._times("all_reduce", workers, self.corrected._rows_with("all_reduce"))
        return replace(
            self,
            workers=workers,
            concurrency=self._nearest_concurrency(workers, times["all_reduce"]) if workers > 1 else (),
            band=self._band(workers),
            moved_from=Calibration(**_row_fields(self), used=used),
            **{name: times.get(name) for name in COLLECTIVES},
        )

    def _times(self, name: Collective, workers: int, rows: list[WorkersRow]) -> tuple[CollectiveTimes, tuple[int, ...]]:
        """One collective's times, and the numbers of workers that they come from."""
        near, *others = self._nearest(workers, rows)
        if near.workers == workers:
            found: CollectiveTimes = getattr(near, name)
            return found, ()
        if others:
            share = _share(near.workers, others[0].workers, workers)
            curve = mixed(getattr(near, name).curve, getattr(others[0], name).curve, share)
            return CollectiveTimes.of(curve), (near.workers, others[0].workers)
        topology, slowdown = self.topology, 1.0
        if topology.fabric is not None:
            slowdown = topology.fabric.change(topology.nodes(near.workers), topology.nodes(workers))
        curve = topology.moved(getattr(near, name).curve, name, near.workers, workers, slowdown=slowdown)
        return CollectiveTimes.of(curve), (near.workers,)

    def _nearest(self, workers: int, rows: list[WorkersRow]) -> tuple[WorkersRow, ...]:
        """Of these rows the one of this very number of workers, the two on either side, or the nearest."""
        below = [row for row in rows if row.workers <= workers]
        above = [row for row in rows if row.workers >= workers]
        if below and below[-1].workers == workers:
            return (below[-1],)
        known_inside = workers <= self.topology.gpus_per_node and self.topology.inside is not None
        if below and above and not known_inside:
            return below[-1], above[0]
        return (above[0] if above else below[-1],)

    def _beside_all_reduce(
        self, found: CollectiveTimes, all_reduce: CollectiveTimes, source: int, workers: int
    ) -> CollectiveTimes:
        """Times extrapolated from `source`, of a network whose all-reduce was measured nearer: they are off by as much
        as the all-reduce extrapolated from there would be."""
        expected, _ = self._times("all_reduce", workers, [row for row in self.file_rows if row.workers == source])
        here, there = all_reduce.curve.link_s_per_byte, expected.curve.link_s_per_byte
        return CollectiveTimes.of(found.curve.slower(here / there)) if here > 0 and there > 0 else found

    def _nearest_concurrency(self, workers: int, all_reduce: CollectiveTimes) -> tuple[ConcurrencyPoint, ...]:
        rows = [row for row in self.file_rows if row.concurrency and row.workers > 1]
        if not rows:
            return ()
        near = min(rows, key=lambda row: abs(math.log(row.workers / workers)))
        if near.workers == workers:
            return near.concurrency
        there = replace(self, workers=near.workers, rows=(), all_reduce=near.all_reduce, concurrency=near.concurrency)
        return there.concurrency_on(all_reduce)

    def _band(self, workers: int) -> LoadBand | None:
        """As measured at the nearest numbers of workers that have one; between two, over the logarithm."""
        rows = [row for row in self.file_rows if row.band is not None]
        per_node = self.topology.gpus_per_node
        # Nobody else is on the links of one node.
        if not rows or workers == 1 or workers <= per_node < rows[0].workers:
            return None
        below = [row for row in rows if row.workers <= workers] or rows[:1]
        above = [row for row in rows if row.workers >= workers] or rows[-1:]
        one, two = below[-1], above[0]
        if one.band is None or two.band is None or one.workers >= two.workers:
            return self._widened(one, workers)
        share = _share(one.workers, two.workers, workers)
        return LoadBand(
            quiet=one.band.quiet ** (1 - share) * two.band.quiet**share,
            busy=one.band.busy ** (1 - share) * two.band.busy**share,
        )

    def _widened(self, row: WorkersRow, workers: int) -> LoadBand | None:
        """The band of a row at another number of workers: the fabric widens it with the nodes."""
        band, fabric = row.band, self.topology.fabric
        if band is None or fabric is None or min(self.topology.nodes(row.workers), self.topology.nodes(workers)) < 2:
            return band
        quiet, busy = (
            fabric.slowdown(self.topology.nodes(row.workers), load)
            / fabric.slowdown(self.topology.nodes(workers), load)
            for load in ("quiet", "busy")
        )
        return LoadBand(quiet=max(band.quiet * quiet, 1.0), busy=min(band.busy * busy, 1.0))

    def _under(self, load: Load) -> Network:
        """The times of a typical cluster as they are on a quiet or a busy one."""
        fabric, band = self.topology.fabric, self.band
        there: dict[str, Any] = {}
        base = self._by_halves(self) if self.moved_from is None else self
        for name in COLLECTIVES:
            times = getattr(base, name)
            if times is None:
                continue
            if band is not None:
                curve = beside_traffic(times.curve, 1 / (band.quiet if load == "quiet" else band.busy))
            elif fabric is not None and self.nodes > 1:
                slowdown = fabric.slowdown(self.nodes, load)
                if self.topology.inside is None:
                    curve = beside_traffic(times.curve, slowdown)
                else:
                    curve = self.topology.moved(times.curve, name, self.workers, self.workers, slowdown=slowdown)
            else:
                return self
            there[name] = CollectiveTimes.of(curve)
        origin = self.moved_from or Calibration(**_row_fields(self))
        return replace(
            self, concurrency=self.concurrency_on(there["all_reduce"]), moved_from=replace(origin, load=load), **there
        )


def _row_fields(times: Network | WorkersRow) -> dict[str, Any]:
    return {name: getattr(times, name) for name in WorkersRow.__struct_fields__}


def _share(one: int, two: int, workers: int) -> float:
    """How far a number of workers is from one to another, over the logarithm."""
    return math.log(workers / one) / math.log(two / one)
