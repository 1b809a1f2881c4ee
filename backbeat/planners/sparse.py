"""`sparse`: groups, and for each whether it travels as it is or as its largest elements, whichever is faster.

Were everything encoded, encoding would delay gradient j by the same time however groups are cut (its rate times the
bytes up to j), so the exact one-channel programme of `optimal` holds with later ready times and the encoded cost, but
for what a group costs by itself. That
grouping and the dense optimum are the candidates; then single groups change between encoded and dense as long as the
prediction falls, and neighbours become one group where that costs nothing. All dense is among the candidates, so the
result is never predicted slower than `optimal`.

Small tensors (biases, norms) never travel sparse: they are a thousandth of the bytes, and what training is most
sensitive to. Where their neighbours are encoded they wait for the next dense group, or leave once in one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from backbeat.errors import InputError
from backbeat.model.encoding import Encoding
from backbeat.model.plan import Group, Plan
from backbeat.planners.optimal import best_ends, quadratic_programme
from backbeat.simulate.encoded import (
    ELEMENT_BYTES,
    Piece,
    Wire,
    compression_s_per_byte,
    compression_s_per_group,
    travel,
)
from backbeat.simulate.schedule import running_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from backbeat.model import Network, Profile
    from backbeat.planners.draft import Options

DEFAULT_DENSITY = 0.01
SMALL_BYTES = 2**16
"""Tensors up to this size travel as they are."""
_FLIPS = 400
"""Evaluations spent on changing single groups."""
_BETTER = 1e-3
"""A group changes between dense and encoded only for a gain worth the name, as a share of the end."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Mixed:
    """Consecutive groups in ready order, each dense or encoded."""

    ends: list[int]
    encoded: list[bool]
    encoding: Encoding
    early: int | None = None
    """Behind this group the small tensors that wait leave in one of their own."""
    notes: tuple[str, ...] = ()

    def members(self, profile: Profile) -> list[tuple[list[int], bool]]:
        """Gradients of each group as it travels, in launch order: small ones leave encoded groups for dense ones."""
        groups: list[tuple[list[int], bool]] = []
        waiting: list[int] = []
        first = 0
        for number, (end, encoded) in enumerate(zip(self.ends, self.encoded, strict=True)):
            inside = list(range(first, end))
            first = end
            if not encoded:
                groups.append((waiting + inside, False))
                waiting = []
                continue
            large = [place for place in inside if profile.gradients[place].bytes > SMALL_BYTES]
            waiting += [place for place in inside if profile.gradients[place].bytes <= SMALL_BYTES]
            if large:
                groups.append((large, True))
            if number == self.early and waiting:
                groups.append((waiting, False))
                waiting = []
        if waiting:
            groups.append((waiting, False))
        return groups

    def end_s(self, profile: Profile, network: Network, wire: Wire) -> float:
        pieces = [
            Piece(
                max(profile.gradients[place].ready_s for place in inside),
                sum(profile.gradients[place].bytes for place in inside),
                self.encoding if encoded else None,
            )
            for inside, encoded in self.members(profile)
        ]
        return travel(pieces, profile, network, wire).end_s

    def named(self, profile: Profile, strategy: str, workers: int) -> Plan:
        return Plan(
            strategy=strategy,
            model=profile.model,
            workers=workers,
            channels=1,
            groups=tuple(
                Group(
                    gradients=tuple(profile.gradients[place].name for place in inside),
                    channel=0,
                    encoding=self.encoding if encoded else None,
                )
                for inside, encoded in self.members(profile)
            ),
            notes=self.notes,
        )


def sparse(profile: Profile, network: Network, options: Options) -> Mixed:
    """Top-k at the asked density where it is predicted to pay."""
    density = DEFAULT_DENSITY if options.density is None else options.density
    # Exactly: fewer launches than a sampled threshold, and less memory.
    encoding = Encoding(kind="topk", density=density, select="exact")
    if options.channels is not None and options.channels != 1:
        raise InputError(f"channels is {options.channels}: sparse plans use one channel; leave it out")
    ends = best_ends(profile, network.cost)
    wire = Wire.of(network)
    dense = Mixed(ends, [False] * len(ends), encoding)
    if network.workers == 1:
        return Mixed(ends, dense.encoded, encoding, notes=("one worker: nothing travels, nothing is encoded",))
    whole = encoded_ends(profile, network, wire, encoding)
    candidates = [dense, Mixed(ends, [True] * len(ends), encoding), Mixed(whole, [True] * len(whole), encoding)]
    scored = [(mixed.end_s(profile, network, wire), mixed) for mixed in candidates]
    least = scored[0]
    for end, mixed in scored:
        found = _flipped(end, mixed, profile, network, wire)
        if found[0] < least[0] * (1 - _ROUNDING):
            least = found
    chosen = _merged(*least, profile, network, wire)
    if any(chosen.encoded):
        places = [chosen, *(replace(chosen, early=place) for place in range(len(chosen.ends) - 1))]
        chosen = min(places, key=lambda mixed: mixed.end_s(profile, network, wire))
    groups = chosen.members(profile)
    count = sum(encoded for _, encoded in groups)
    if count == 0:
        note = f"sparse: all groups dense, sending {density:.3g} of the elements would not be faster"
    else:
        note = f"sparse: {count} of {len(groups)} groups send {density:.3g} of their elements, the others all"
    return replace(chosen, notes=(note,))


def encoded_ends(profile: Profile, network: Network, wire: Wire, encoding: Encoding) -> list[int]:
    """The exact one-channel groups if everything were encoded.

    E[j] = min over i < j of  max(r_j + c·S_j, E[i]) + T(S_j - S_i) + f

    What encoding costs each group by itself, f, delays the groups behind it too. Here it counts as if it were sent:
    that keeps groups few, and the prediction that judges the result has it right.
    """
    sums = running_sums(profile.sizes)
    ready = (profile.ready + compression_s_per_byte(profile) * sums[1:]).tolist()
    fixed = compression_s_per_group(profile)

    def finishes(j: int, messages: NDArray[np.float64], earliest: NDArray[np.float64]) -> NDArray[np.float64]:
        times = wire.time(messages / ELEMENT_BYTES, encoding) + fixed
        return np.asarray(np.maximum(ready[j - 1], earliest) + times)

    return quadratic_programme(profile.sizes, finishes)


def _merged(end: float, mixed: Mixed, profile: Profile, network: Network, wire: Wire) -> Mixed:
    """Neighbours of one kind become one group where that costs nothing: every message has a cost that no model sees."""
    place = len(mixed.ends) - 2
    while place >= 0:
        if mixed.encoded[place] == mixed.encoded[place + 1]:
            fewer = Mixed(
                [*mixed.ends[:place], *mixed.ends[place + 1 :]],
                [*mixed.encoded[:place], *mixed.encoded[place + 1 :]],
                mixed.encoding,
            )
            if fewer.end_s(profile, network, wire) <= end * (1 + _ROUNDING):
                mixed = fewer
        place -= 1
    return mixed


def _flipped(end: float, mixed: Mixed, profile: Profile, network: Network, wire: Wire) -> tuple[float, Mixed]:
    """Change single groups, from the tail, as long as the end falls."""
    left = _FLIPS
    improved = True
    while improved and left > 0:
        improved = False
        for place in reversed(range(len(mixed.ends))):
            left -= 1
            if left < 0:
                break
            flags = [*mixed.encoded[:place], not mixed.encoded[place], *mixed.encoded[place + 1 :]]
            changed = Mixed(mixed.ends, flags, mixed.encoding)
            found = changed.end_s(profile, network, wire)
            if found < end * (1 - _BETTER):
                end, mixed, improved = found, changed, True
    return end, mixed
