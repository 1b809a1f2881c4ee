"""How long collectives take, as a network file keeps it; and what those of sharded steps do to each other, to
computation and to the host."""

from __future__ import annotations

from statistics import median
from typing import Annotated

from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.cost import Curve
from backbeat.errors import InputError
from backbeat.model.checks import Bytes, Checked, Seconds, not_negative
from backbeat.model.slowdown import Slowdown

Point = tuple[Bytes, Seconds]
_SHORTEST_S = 1e-9


class CollectiveTimes(Checked, frozen=True, kw_only=True):
    """Isolated times of one collective: measured points, or `alpha_s + beta_s_per_byte * bytes`."""

    points: tuple[Point, ...] | None = None
    """(bytes, seconds), sizes rising."""
    link_s_per_byte: Seconds | None = None
    """With points: what a byte takes of the link, and beyond the last point. Fitted to the points where left out."""
    alpha_s: Seconds | None = None
    beta_s_per_byte: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points is None:
            if self.link_s_per_byte is not None:
                raise InputError("link_s_per_byte goes with points: write beta_s_per_byte, or give points")
            if self.alpha_s is None or self.beta_s_per_byte is None:
                raise InputError("give either points, or both alpha_s and beta_s_per_byte")
            return
        if self.alpha_s is not None or self.beta_s_per_byte is not None:
            raise InputError("points and alpha_s/beta_s_per_byte exclude each other: keep one of the two forms")
        force_setattr(self, "points", tuple((size, seconds) for size, seconds in self.points))
        if len(self.points) < 2:
            raise InputError(f"points has {len(self.points)}: a curve needs two sizes or more; measure more sizes")
        previous = -1
        for index, (size, seconds) in enumerate(self.points):
            not_negative(f"points[{index}][0]", size)
            not_negative(f"points[{index}][1]", seconds)
            if size <= previous:
                raise InputError(
                    f"points[{index}] has {size} bytes after {previous}: sizes must rise; sort them, one point a size"
                )
            previous = size

    @classmethod
    def of(cls, curve: Curve) -> CollectiveTimes:
        """What a network file keeps of a curve."""
        if curve.is_affine:
            alpha, beta = curve.line
            return cls(alpha_s=alpha, beta_s_per_byte=beta)
        sizes = (round(size) for size in curve.sizes.tolist())
        points = tuple(zip(sizes, curve.times.tolist(), strict=True))
        return cls(points=points, link_s_per_byte=curve.link_s_per_byte)

    @property
    def curve(self) -> Curve:
        """The cost model of this collective."""
        if self.points is None:
            return Curve.affine(self.alpha_s or 0.0, self.beta_s_per_byte or 0.0)
        found = Curve.through(self.points)
        return found if self.link_s_per_byte is None else Curve(found.sizes, found.times, self.link_s_per_byte)


class ConcurrencyPoint(Checked, frozen=True, kw_only=True):
    """`messages` equal messages issued at once, spread over `communicators`: `seconds` until the last is done."""

    bytes: Annotated[int, Meta(ge=1)]
    messages: Annotated[int, Meta(ge=1)]
    communicators: Annotated[int, Meta(ge=1)]
    seconds: Seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.seconds < _SHORTEST_S:
            raise InputError(f"seconds is {self.seconds:g}: no message takes less than a nanosecond; write seconds")


class CollectivePair(Checked, frozen=True, kw_only=True):
    """As many all-gathers as reduce-scatters, of `bytes` each, issued at once: in turn on one communicator, or each
    kind on one of two."""

    bytes: Annotated[int, Meta(ge=1)]
    communicators: Annotated[int, Meta(ge=1, le=2)]
    seconds: Annotated[float, Meta(gt=0)]
    """Seconds until all are done."""
    alone_s: Annotated[float, Meta(gt=0)]
    """What they take one by one."""


class ShardedHost(Checked, frozen=True, kw_only=True):
    """What FSDP2 adds to the host's time for a step, whatever the size of the parameters: hooks, views, copies and
    collectives are issued one by one."""

    unit_s: Seconds
    """For each unit, in every micro-batch."""
    parameter_s: Seconds
    """For each parameter, in every micro-batch."""
    update_s: Seconds = 0.0
    """For each parameter, once a step: the optimizer's work on shards."""
    reshard_unit_s: Seconds = 0.0
    """Added for a unit that is resharded after forward, and gathered again for backward."""
    reshard_parameter_s: Seconds = 0.0
    """Added for each parameter of such a unit."""

    def micro_batch_s(self, units: int, parameters: int, resharded_units: int, resharded_parameters: int) -> float:
        """With so many units and parameters, of which some are resharded after forward.

        >>> host = ShardedHost(unit_s=1e-3, parameter_s=1e-4, reshard_unit_s=5e-4, reshard_parameter_s=1e-5)
        >>> round(host.micro_batch_s(10, 100, 0, 0), 9)
        0.02
        >>> round(host.micro_batch_s(10, 100, 8, 80), 9)
        0.0248
        """
        kept_s = units * self.unit_s + parameters * self.parameter_s
        return kept_s + resharded_units * self.reshard_unit_s + resharded_parameters * self.reshard_parameter_s


class ShardedTimes(Checked, frozen=True, kw_only=True):
    """Measured at the network's own number of workers; ratios are taken to hold at others."""

    pairs: tuple[CollectivePair, ...] = ()
    slowdown: Slowdown | None = None
    """How much longer computation takes beside all-gathers and reduce-scatters."""
    host: ShardedHost | None = None

    @property
    def in_a_row(self) -> float:
        """What collectives that follow each other on one communicator take, over what they take one by one; 1 where it
        was not measured. Never above 1: an idle link lets the first bytes through faster, which says little of many.

        >>> pair = CollectivePair(bytes=2**24, communicators=1, seconds=9e-3, alone_s=10e-3)
        >>> round(ShardedTimes(pairs=(pair,)).in_a_row, 9)
        0.9
        """
        speed = self.speed(1)
        return 1.0 if speed is None else min(1 / speed, 1.0)

    def speed(self, communicators: int) -> float | None:
        """Seconds of work that all-gathers and reduce-scatters together do a second, from the larger half of the sizes:
        smaller ones are mostly latency. None where it was not measured.

        >>> pair = CollectivePair(bytes=2**24, communicators=2, seconds=8e-3, alone_s=10e-3)
        >>> ShardedTimes(pairs=(pair,)).speed(2)
        1.25
        """
        rows = sorted((row for row in self.pairs if row.communicators == communicators), key=lambda row: row.bytes)
        large = rows[len(rows) // 2 :]
        return median(row.alone_s / row.seconds for row in large) if large else None
