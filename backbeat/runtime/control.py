"""What ranks tell each other at the end of every step, in a few numbers behind the last group's gradients.

    [ irregular | late, one a group | step stamp, one a rank | used, one a parameter ]

All-reduced with the gradients, each becomes a sum that every rank reads alike: `irregular` is positive if some rank's
graph was not the plain one (every parameter once), `late` if some gradient came after its group had left, a stamp is
what that rank alone wrote (negative if its backward was broken off), `used` counts the ranks that used a parameter.
The numbers are small integers, so that bf16 and fp16 carry them as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Steps are told apart modulo this; the stamps stay exact in every float format.
STAMPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each number stands."""

    groups: int
    ranks: int
    parameters: int

    @property
    def length(self) -> int:
        return 1 + self.groups + self.ranks + self.parameters

    @property
    def stamps_at(self) -> int:
        return 1 + self.groups

    @property
    def used_at(self) -> int:
        return 1 + self.groups + self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The summed numbers, read."""

    irregular: bool
    late: tuple[int, ...]
    """Groups that must be reduced again."""
    stamps: tuple[int, ...]
    """What each rank wrote."""
    used: list[bool]


def stamp_of(step: int) -> int:
    return step % STAMPS + 1


def write(
    layout: Layout,
    *,
    rank: int,
    step: int,
    broken: bool,
    irregular: bool,
    late: Sequence[int],
    used: Sequence[int],
) -> torch.Tensor:
    """This rank's numbers, as a host tensor."""
    numbers = [0.0] * layout.length
    numbers[0] = float(irregular)
    for group in late:
        numbers[1 + group] = 1.0
    numbers[layout.stamps_at + rank] = float(-stamp_of(step) if broken else stamp_of(step))
    numbers[layout.used_at :] = [float(bool(flag)) for flag in used]
    return torch.tensor(numbers)


def templates(layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One row a stamp for the plain step: nothing irregular, every parameter used. Spares a copy from the host."""
    rows = torch.zeros(STAMPS, layout.length)
    rows[:, layout.used_at :] = 1.0
    rows[:, layout.stamps_at + rank] = torch.arange(1, STAMPS + 1, dtype=rows.dtype)
    return rows.to(device=device, dtype=dtype)


def read(layout: Layout, summed: torch.Tensor) -> Verdict:
    numbers: list[float] = summed.float().tolist()
    return Verdict(
        irregular=numbers[0] > 0,
        late=tuple(group for group in range(layout.groups) if numbers[1 + group] > 0),
        stamps=tuple(round(number) for number in numbers[layout.stamps_at : layout.used_at]),
        used=[number > 0 for number in numbers[layout.used_at :]],
    )
