"""What the cluster does to a message: how long collectives take, alone and several at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace

from backbeat.cost import LinkCost
from backbeat.cost.collectives import Collective
from backbeat.cost.curve import stretched
from backbeat.errors import InputError
from backbeat.model.checks import at_least, whole
from backbeat.model.collective_times import CollectiveTimes, ShardedTimes
from backbeat.model.files import Document, Source
from backbeat.model.network_rows import NetworkRows, WorkersRow, row_fields, under
from backbeat.model.slowdown import Slowdown
from backbeat.model.topology import Load, Topology

_MOST_WORKERS = 10**9


class Calibration(WorkersRow, frozen=True, kw_only=True):
    """The file's own times, which a moved network was computed from, and how."""

    used: tuple[int, ...] = ()
    """The numbers of workers whose times were used: two where it lies between them, one where it is extrapolated from
    there, none where the file has this very number."""
    load: Load = "typical"
    """How busy the cluster is taken to be."""


class Network(WorkersRow, Document, frozen=True, kw_only=True):
    """Collective times of a cluster at one number of workers or several; `at` moves it to another."""

    SCHEMA: ClassVar[str] = "backbeat.network/2"
    FOLDER: ClassVar[str] = "networks"

    name: str
    topology: Topology = Topology()
    slowdown: Slowdown | None = None
    """How much longer computation takes beside an all-reduce, as measured on this cluster."""
    sharded: ShardedTimes | None = None
    """All-gathers and reduce-scatters together, and computation beside them, as measured on this cluster."""
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
        if workers == self.workers and load == self.how_busy:
            return self
        base = self.as_measured
        there = base if workers == base.workers else base._moved_to(workers)
        return there if load == "typical" else there._under(load)

    @property
    def one_node(self) -> bool:
        """All workers were GPUs of one node: nothing here crossed a network between nodes."""
        return 1 < self.file_rows[-1].workers <= self.topology.gpus_per_node

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
        if not wide or self.workers == 1 or self.how_busy != "typical":
            return None
        return self.at(workers=self.workers, load="quiet"), self.at(workers=self.workers, load="busy")

    def largest_bytes(self, collective: Collective = "all_reduce") -> int | None:
        """The largest message measured, where times come as points."""
        used = self.sources(collective) or (self.workers,)
        rows = [row for row in self._measured.having(collective) if row.workers in used]
        points = [times.points for row in rows if (times := getattr(row, collective)) is not None]
        return min((found[-1][0] for found in points if found), default=None)

    def sources(self, collective: Collective = "all_reduce") -> tuple[int, ...]:
        """The numbers of workers whose times of this collective were used: two where this one lies between them, one
        where it is extrapolated from there, none where the file has this very number, or none at all."""
        if self.moved_from is None or getattr(self, collective) is None:
            return ()
        return self._measured.sources(collective, self.workers)

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
        both = base.all_reduce.curve.joined(stretched(between.all_reduce.curve, transfer=1 / links), np.add)
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
                nics_per_node=links,
                inside_link=base.topology.inside_link,
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

    @cached_property
    def cost(self) -> LinkCost:
        """The cost model of this network's all-reduce, fitted once."""
        row = self if self.moved_from else self._measured.with_slope(self)
        return LinkCost.fit(row.all_reduce.curve, self.simultaneous)

    @property
    def corrected(self) -> Network:
        """The network as measured, every row's all-reduce corrected by its all-gathers and reduce-scatters."""
        base = self.as_measured
        return replace(base._measured.with_slope(base), rows=tuple(map(base._measured.with_slope, base.rows)))

    @property
    def how_busy(self) -> Load:
        return "typical" if self.moved_from is None else self.moved_from.load

    @property
    def as_measured(self) -> Network:
        """The network at the number of workers of the file's own times."""
        if self.moved_from is None:
            return self
        return replace(self, moved_from=None, **row_fields(self.moved_from))

    @property
    def file_rows(self) -> Sequence[WorkersRow]:
        """Every number of workers that the file has, rising."""
        return self._measured.rows

    @cached_property
    def _measured(self) -> NetworkRows:
        rows = sorted((WorkersRow(**row_fields(self.as_measured)), *self.rows), key=lambda row: row.workers)
        return NetworkRows(rows, self.topology, by_halves=self.backend == "nccl")

    def _moved_to(self, workers: int) -> Network:
        if not self._measured.having("all_reduce"):
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
        found = self._measured.at(workers)
        calibration = Calibration(**row_fields(self), used=found.used)
        return replace(self, **row_fields(found.row), moved_from=calibration)

    def _under(self, load: Load) -> Network:
        """The times of a typical cluster as they are on a quiet or a busy one."""
        there = under(self if self.moved_from else self._measured.with_slope(self), self.topology, load)
        if not there:
            return self
        at_once = self.concurrency_on(there["all_reduce"], self.cost)
        origin = self.moved_from or Calibration(**row_fields(self))
        return replace(self, concurrency=at_once, moved_from=replace(origin, load=load), **there)
