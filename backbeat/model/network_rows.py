"""A cluster's collective times by number of workers, as a file has them, and what follows for any other number.

For a number that the file has, these are the file's times. Between two numbers, latency and transfer are each
interpolated over the logarithm of the number. Elsewhere the nearest is scaled by the algorithm, and the fabric lets
bandwidth fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from backbeat.cost import Batch, LinkCost
from backbeat.cost.collectives import COLLECTIVES, Collective
from backbeat.cost.curve import Curve, beside_traffic, mixed
from backbeat.model.checks import Checked
from backbeat.model.collective_times import CollectiveTimes, ConcurrencyPoint
from backbeat.model.topology import Load, LoadBand, Topology

AnyRow = TypeVar("AnyRow", bound="WorkersRow")
HALVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")


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

    @property
    def simultaneous(self) -> list[Batch]:
        """What was measured of messages at once."""
        return [Batch(row.bytes, row.messages, row.communicators, row.seconds) for row in self.concurrency]

    def concurrency_on(self, all_reduce: CollectiveTimes, cost: LinkCost | None = None) -> tuple[ConcurrencyPoint, ...]:
        """The concurrency rows with other all-reduce times, at another number of workers or on another link. `cost` is
        that of the row's own, where it is known."""
        if not self.concurrency:
            return ()
        fitted = cost or LinkCost.fit(self.all_reduce.curve, self.simultaneous)
        seconds = fitted.on(all_reduce.curve, self.simultaneous)
        return tuple(replace(row, seconds=there) for row, there in zip(self.concurrency, seconds, strict=True))


class Moved(NamedTuple):
    row: WorkersRow
    used: tuple[int, ...]
    """The numbers of workers whose all-reduces were used."""


@dataclass(frozen=True)
class NetworkRows:
    """All rows of a file, rising."""

    rows: Sequence[WorkersRow]
    topology: Topology
    by_halves: bool
    """The library moves the bytes of an all-gather and a reduce-scatter in an all-reduce (NCCL)."""

    def having(self, collective: Collective) -> list[WorkersRow]:
        """The rows that have this collective between two workers or more."""
        return [row for row in self.rows if row.workers > 1 and getattr(row, collective) is not None]

    def sources(self, collective: Collective, workers: int) -> tuple[int, ...]:
        """The numbers of workers whose times are used: two where this one lies between them, one where it is
        extrapolated from there, none where the file has this very number."""
        near = self._nearest(workers, self.having(collective))
        return () if near[0].workers == workers else tuple(row.workers for row in near)

    def at(self, workers: int) -> Moved:
        """All times of so many; there is an all-reduce of two workers or more."""
        per_node = self.topology.gpus_per_node
        times: dict[str, CollectiveTimes] = {}
        used: tuple[int, ...] = ()
        for name in COLLECTIVES:
            rows = self.having(name)
            # One node's all-gather says nothing of more: better none than one that crosses no network.
            if rows and (workers <= per_node or rows[-1].workers > per_node):
                times[name], sources = self._times(name, workers, rows)
                if name == "all_reduce":
                    used = sources
                elif len(sources) == 1 and len(used) != 1:
                    times[name] = self._beside_all_reduce(times[name], times["all_reduce"], sources[0], workers)
        times["all_reduce"], _ = self._times("all_reduce", workers, self.corrected.having("all_reduce"))
        row = WorkersRow(
            workers=workers,
            concurrency=self._nearest_concurrency(workers, times["all_reduce"]) if workers > 1 else (),
            band=self._band(workers),
            **times,
        )
        return Moved(row, used)

    @cached_property
    def corrected(self) -> NetworkRows:
        """Every row's all-reduce corrected by all-gathers and reduce-scatters."""
        return NetworkRows([self.with_slope(row) for row in self.rows], self.topology, self.by_halves)

    def with_slope(self, row: AnyRow) -> AnyRow:
        """The row, with its all-reduce's slope from all-gathers and reduce-scatters where those have larger messages. A
        row without any has those of the others, moved to its number of workers.

        Each further byte of an all-reduce then takes as long as one of each: NCCL moves the bytes of both, unless
        switches add up. The all-reduce's own slope may be too small where its messages are small enough for buffers to
        take them in at once. validation/training/README.md says how near that is.
        """
        nodes, points = self.topology, row.all_reduce.points
        switched = {"nvls", "sharp"} & {nodes.algorithm, nodes.inside_algorithm, nodes.across_algorithm}
        if not self.by_halves or points is None or switched or row.workers <= nodes.gpus_per_node:
            return row
        known = [(name, self.having(name)) for name in HALVES]
        if any(not rows or rows[-1].workers <= nodes.gpus_per_node for _, rows in known):
            return row
        sources = [getattr(one, name) for name, rows in known for one in self._nearest(row.workers, rows)]
        if any(half.points is None or half.points[-1][0] <= points[-1][0] for half in sources):
            return row
        slope = sum(self._times(name, row.workers, rows)[0].curve.link_s_per_byte for name, rows in known)
        return replace(row, all_reduce=replace(row.all_reduce, link_s_per_byte=slope))

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
        expected, _ = self._times("all_reduce", workers, [row for row in self.rows if row.workers == source])
        here, there = all_reduce.curve.link_s_per_byte, expected.curve.link_s_per_byte
        return CollectiveTimes.of(found.curve.slower(here / there)) if here > 0 and there > 0 else found

    def _nearest_concurrency(self, workers: int, all_reduce: CollectiveTimes) -> tuple[ConcurrencyPoint, ...]:
        rows = [row for row in self.rows if row.concurrency and row.workers > 1]
        if not rows:
            return ()
        near = min(rows, key=lambda row: abs(math.log(row.workers / workers)))
        if near.workers == workers:
            return near.concurrency
        return self.with_slope(near).concurrency_on(all_reduce)

    def _band(self, workers: int) -> LoadBand | None:
        """As measured at the nearest numbers of workers that have one; between two, over the logarithm."""
        rows = [row for row in self.rows if row.band is not None]
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


def under(row: WorkersRow, topology: Topology, load: Load) -> dict[str, CollectiveTimes]:
    """The times of a typical cluster as they are on a quiet or a busy one; none where nothing says how far that is."""
    fabric, nodes = topology.fabric, topology.nodes(row.workers)
    if row.band is None and (fabric is None or nodes == 1):
        return {}

    def there(name: Collective, curve: Curve) -> Curve:
        if row.band is not None:
            return beside_traffic(curve, 1 / (row.band.quiet if load == "quiet" else row.band.busy))
        slowdown = fabric.slowdown(nodes, load) if fabric is not None else 1.0
        if topology.inside is None:
            return beside_traffic(curve, slowdown)
        return topology.moved(curve, name, row.workers, row.workers, slowdown=slowdown)

    known = {name: getattr(row, name) for name in COLLECTIVES}
    return {name: CollectiveTimes.of(there(name, one.curve)) for name, one in known.items() if one is not None}


def row_fields(times: Any) -> dict[str, Any]:
    """Of a network or a row, what a row has."""
    return {name: getattr(times, name) for name in WorkersRow.__struct_fields__}


def _share(one: int, two: int, workers: int) -> float:
    """How far a number of workers is from one to another, over the logarithm."""
    return math.log(workers / one) / math.log(two / one)
