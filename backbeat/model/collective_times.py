"""How long collectives take, as a network file keeps it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.cost import Curve
from backbeat.errors import InputError
from backbeat.model.checks import Bytes, Checked, Seconds, not_negative

Point = tuple[Bytes, Seconds]
_SHORTEST_S = 1e-9


class CollectiveTimes(Checked, frozen=True, kw_only=True):
    """Isolated times of one collective: measured points, or `alpha_s + beta_s_per_byte * bytes`."""

    points: tuple[Point, ...] | None = None
    """(bytes, seconds), sizes rising."""
    alpha_s: Seconds | None = None
    beta_s_per_byte: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points is None:
            if self.alpha_s is None or self.beta_s_per_byte is None:
                raise InputError("give either points, or both alpha_s and beta_s_per_byte")
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
