"""Which way on how many GPUs, and what that rests on: the rules of an answer, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from backbeat.answer.asked import Asked
from backbeat.answer.row import AnswerRow
from backbeat.errors import InputError
from backbeat.model.prediction import Prediction
from backbeat.model.rule import by_hand, level, recommended, tolerance

Doubt = Literal["level", "fits", "gpus", "deadline"]
Measure = Literal["network", "run", "profile"]
_MOST_BATCH = 2**14
WORTH = 0.5
"""An added GPU pays where it brings this share of its own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    way: str | None
    """None where nothing fits."""
    gpus: int
    gain: float = 1.0
    """How many times as fast as `over`; 1.0 where people write the winner by hand."""
    over: str | None = None
    """The best way that people write by hand, or the next best one where that is the winner."""
    over_gain: float = 1.0
    """The same over `over`, whoever writes the winner."""
    knee: int | None = None
    """The most GPUs that pay, of sizes that the answer chose itself; None where all of them do."""
    cheapest: int | None = None
    """GPUs of those asked that take the fewest GPU-hours."""
    meets_deadline: bool | None = None
    doubts: tuple[Doubt, ...] = ()
    """What the range decides nothing of."""
    measure: Measure | None = None
    """What would decide it."""
    remedies: tuple[str, ...] = ()
    """Where nothing fits: flags of which each, tried, makes it fit."""
    do: tuple[str, ...] = ()
    """What to run: as it stands, what was predicted."""
    do_by: str | None = None
    """What runs it."""
    text: str = ""

    def data(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "gpus": self.gpus,
            "gain": self.gain,
            "over": self.over,
            "knee": self.knee,
            "cheapest": self.cheapest,
            "doubts": list(self.doubts),
            "measure": self.measure,
            "do": list(self.do),
            "text": self.text,
        }


def candidates(rows: Sequence[AnswerRow], *, asked: bool) -> list[AnswerRow]:
    """What may be recommended: it fits and, unless it was `asked` for by name, changes nothing of the training."""
    fitting = [row for row in rows if row.possible]
    same = [row for row in fitting if not row.changes]
    return same or (fitting if asked else [])


def within(one: AnswerRow, other: AnswerRow) -> float:
    """How close two rows are level. A gain that noisy steps hide nobody sees."""
    return max(tolerance(one.mesh, other.mesh), one.noise, other.noise)


def level_rows(rows: Sequence[AnswerRow], *, asked: bool) -> list[AnswerRow]:
    return level(candidates(rows, asked=asked), lambda row: row.seconds, within)


def best_row(rows: Sequence[AnswerRow], *, asked: bool = False) -> AnswerRow | None:
    """The simplest of those that are level."""
    found = candidates(rows, asked=asked)
    return recommended(found, lambda row: row.seconds, lambda row: row.simplicity, within) if found else None


def ordered(rows: Sequence[AnswerRow], *, asked: bool) -> list[AnswerRow]:
    """Of one number of GPUs: what fits first, then what is level by simplicity, then by time."""
    equal = level_rows(rows, asked=asked)

    def place(row: AnswerRow) -> tuple[Any, ...]:
        among = any(row is one for one in equal)
        return not row.possible, not among, row.simplicity if among else (), row.seconds

    return sorted(rows, key=place)


def work(one: Prediction) -> float:
    """How many GPUs' work is done."""
    return one.gpus * one.scaling_factor


def knee_of(curve: Mapping[int, Prediction], edge: int | None = None) -> int | None:
    """The most GPUs that pay: from no smaller number on do those added bring less than half of their own work. None
    where the largest does. With an `edge` of the ranges, the same where steps lie there; what moves all sizes alike
    moves nothing.

    >>> from types import SimpleNamespace as one
    >>> shares = {1: 1.0, 8: 0.9, 64: 0.3}
    >>> knee_of({n: one(gpus=n, scaling_factor=share, samples_per_s=n * share) for n, share in shares.items()})
    8
    """
    factors = dict.fromkeys(curve, 1.0)
    if edge is not None:
        factors = {n: one.range_s[edge] / one.step_s if one.range_s else 1.0 for n, one in curve.items()}
        least = factors[min(factors)] if factors else 1.0
        factors = {n: factor / least for n, factor in factors.items()}
    # What one GPU alone does in a second; batches may differ from size to size.
    alone = max((one.samples_per_s / work(one) for one in curve.values() if one.scaling_factor > 0), default=1.0)
    worth = {1: 1 - WORTH}
    worth |= {n: one.samples_per_s / factors[n] / alone - WORTH * n for n, one in curve.items()}
    most = max(worth.values())
    found = max(n for n, value in worth.items() if value >= most * (1 - 1e-9))
    return None if not curve or found >= max(curve) else found


def chosen_size(
    best: Mapping[int, AnswerRow], knee: int | None, deadline_hours: float | None
) -> tuple[int, bool | None]:
    """The number of GPUs to take, of those for which something fits, and whether it meets the deadline."""
    cheap: Callable[[int], tuple[float, int]] = lambda n: (best[n].gpu_seconds, n)  # noqa: E731
    if deadline_hours is not None:
        meeting = [n for n, row in best.items() if row.cost is not None and row.cost.hours <= deadline_hours]
        if meeting:
            return min(meeting, key=cheap), True
        return min(best, key=lambda n: (best[n].seconds, n)), False
    paying = [n for n in best if knee is None or n <= knee]
    return max(paying) if paying else min(best), None


def over(rows: Sequence[AnswerRow], taken: AnswerRow) -> tuple[float, AnswerRow | None]:
    """The gain over the best way that people write by hand with the same numerics; for such a winner over the next."""
    others = [row for row in rows if row is not taken and row.possible and not row.changes and row.by_hand]
    found = min(others, key=lambda row: row.seconds, default=None)
    return (1.0 if found is None else found.seconds / taken.seconds), found


def doubts_of(
    rows: Sequence[AnswerRow],
    best: Mapping[int, AnswerRow],
    curve: Mapping[int, Prediction],
    taken: AnswerRow,
    deadline_hours: float | None,
) -> tuple[Doubt, ...]:
    """Where the range decides nothing, `rows` being those of the size taken."""
    found: list[Doubt] = []
    possible = candidates(rows, asked=True)
    if len(possible) > 2 and 2 * len(level(possible, lambda row: row.seconds, within)) > len(possible):
        found.append("level")
    if taken.prediction.fits == "tight":
        found.append("fits")
    sizes = sorted(best)
    if len(sizes) > 1 and deadline_hours is None:
        answers = {chosen_size(best, knee_of(curve, edge), None)[0] for edge in (0, 1)}
        if answers != {taken.gpus}:
            found.append("gpus")
    if deadline_hours is not None and taken.cost is not None:
        low, high = (taken.cost.hours * edge / taken.step_s for edge in taken.range_s)
        if low <= deadline_hours < high:
            found.append("deadline")
    return tuple(found)


def remedies_of(asked: Asked, rows: Sequence[AnswerRow]) -> tuple[str, ...]:
    """What makes the way that takes least memory fit: each was tried."""
    least = min(rows, key=lambda row: row.peak or 0)
    way, gpus, given = least.way, least.prediction.gpus, asked.given
    changed: list[tuple[str, int, dict[str, Any]]] = []
    changed += [(f"--gpus {gpus * times}", gpus * times, {}) for times in (2, 4, 8, 16)]
    changed += [("--recompute full", gpus, {"recompute": "full"})] * (given.get("recompute") != "full")
    batch = given.get("batch") or least.prediction.batch
    changed += [(f"--batch {batch >> by}", gpus, {"batch": batch >> by}) for by in range(1, batch.bit_length())]
    found: dict[str, str] = {}
    for flag, count, more in changed:
        kind = flag.partition(" ")[0]
        if kind not in found and _fits(replace(asked, given={**given, **more}), way, count):
            found[kind] = flag
    return tuple(found.values())


def _fits(asked: Asked, way: Any, gpus: int) -> bool:
    try:
        return asked.predict(way, gpus, strict=False).fits in ("yes", "tight")
    except InputError:
        return False


def most_that_fits(asked: Asked, row: AnswerRow) -> int | None:
    """The largest micro-batch that fits with the same plan; None where nobody knows."""
    one = row.prediction
    if one.fits not in ("yes", "tight") or one.layout is not None:
        return None
    # What was planned is followed, not planned again for each batch.
    way: Any = one.way if by_hand(one.way) else one.plan
    given = {name: value for name, value in asked.given.items() if name not in ("global_batch", "measured")}

    def fits(batch: int) -> bool:
        return _fits(replace(asked, given={**given, "batch": batch}), way, one.gpus)

    low, high = one.batch, one.batch * 2
    while high <= _MOST_BATCH and fits(high):
        low, high = high, high * 2
    while high - low > max(low // 32, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_to_measure(asked: Asked, taken: AnswerRow) -> Measure | None:
    """What narrows the range most: the network, where how busy it is makes the range; else a step of one's own, unless
    it is known."""
    band, (low, high) = taken.network_band, taken.range_s
    busy = band is not None and band.quiet_s > 0 and (band.busy_s / band.quiet_s) ** 2 > high / low
    if busy and not _measured(asked.network.source):
        return "network"
    if "measured" in asked.given:
        return None
    return "profile" if asked.profile is not None and asked.profile.analytic else "run"


def _measured(source: Any) -> bool:
    return "measured" in str(getattr(source, "method", source) or "").lower()
