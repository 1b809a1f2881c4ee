"""What ranks tell each other at the end of every step, in a few numbers behind the last group's gradients.

    [ irregular | late, one a group | step stamp, one a rank | fault, one a rank | used, one a parameter ]

All-reduced with the gradients, each becomes a sum that every rank reads alike: `irregular` is positive if some rank's
graph was not the plain one (every parameter once), `late` if some gradient came after its group had left, a stamp is
what that rank alone wrote (negative if its backward was broken off), a fault the number of a parameter, from 1, whose
gradient was not finite on that rank, `used` counts the ranks that used a parameter. The numbers are small integers, so
that bf16 and fp16 carry them as well. Only compressed plans have faults; their numbers travel alone, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backbeat.runtime.reduce.failures import BrokenStepError, StepMismatchError

# Steps are told apart modulo this; the stamps stay exact in every float format.
STAMPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each number stands."""

    groups: int
    ranks: int
    parameters: int
    faults: int = 0

    @property
    def length(self) -> int:
        return self.used_at + self.parameters

    @property
    def stamps_at(self) -> int:
        return 1 + self.groups

    @property
    def faults_at(self) -> int:
        return self.stamps_at + self.ranks

    @property
    def used_at(self) -> int:
        return self.faults_at + self.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The summed numbers, read."""

    irregular: int
    """Ranks whose graph was not the plain one."""
    late: tuple[int, ...]
    """Groups that must be reduced again."""
    stamps: tuple[int, ...]
    """What each rank wrote."""
    used: list[bool]
    faults: tuple[int, ...] = ()
    """The parameter that each rank found not finite, counted from 1, or 0."""


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


def read(layout: Layout, summed: torch.Tensor) -> Verdict:
    numbers: list[float] = summed.float().tolist()
    return Verdict(
        irregular=round(numbers[0]),
        late=tuple(group for group in range(layout.groups) if numbers[1 + group] > 0),
        stamps=tuple(round(number) for number in numbers[layout.stamps_at : layout.faults_at]),
        used=[number > 0 for number in numbers[layout.used_at :]],
        faults=tuple(round(number) for number in numbers[layout.faults_at : layout.used_at]),
    )


class Ledger:
    """The control numbers of one partition: what this rank writes in a plain step, and what the sums then are."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.dtype = dtype
        self.device = device
        stamps = torch.arange(1, STAMPS + 1, dtype=torch.float32)
        mine = torch.zeros(STAMPS, layout.length)
        mine[:, layout.used_at :] = 1.0
        mine[:, layout.stamps_at + rank] = stamps
        sums = torch.zeros(STAMPS, layout.length)
        sums[:, layout.used_at :] = float(layout.ranks)
        sums[:, layout.stamps_at : layout.faults_at] = stamps[:, None]
        # On the device, so that the plain step copies nothing from the host.
        self._mine = mine.to(device=device, dtype=dtype).unbind()
        self.sums = sums.to(dtype).unbind()
        """By stamp, on the host: the sums of a step that was plain on every rank."""

    def plain(self, step: int) -> torch.Tensor:
        """What this rank writes when every parameter was used once and nothing else happened."""
        return self._mine[step % STAMPS]

    def is_plain(self, numbers: torch.Tensor, step: int) -> bool:
        """Every rank wrote that."""
        return torch.equal(numbers, self.sums[step % STAMPS])

    def check(self, verdict: Verdict, step: int, where: str) -> None:
        """Raise if some rank broke off its backward or is in another step."""
        broken = [rank for rank, found in enumerate(verdict.stamps) if found < 0]
        if broken:
            raise BrokenStepError(
                f"rank {_listed(broken)} broke off its backward in step {step} with an exception: no rank has "
                "gradients for this step; skip it on every rank, or stop"
            )
        stamp = stamp_of(step)
        others = [rank for rank, found in enumerate(verdict.stamps) if found != stamp]
        if others:
            away = (verdict.stamps[others[0]] - stamp) % STAMPS
            off = f"{away} ahead" if away <= STAMPS // 2 else f"{STAMPS - away} behind"
            raise StepMismatchError(
                f"rank {self.rank} is in its backward number {step}, but rank {_listed(others)} is {off} ({where}): "
                "a rank skipped or repeated a step; run the same number of synchronised backwards on every rank, "
                "or use join()"
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
