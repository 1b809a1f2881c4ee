"""The ranks' word on a step: written behind the last bucket, read when it has arrived, or one step late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backbeat.errors import CommunicationError
from backbeat.runtime.reduce import deferral
from backbeat.runtime.reduce import status_layout as control
from backbeat.runtime.reduce.deferral import Deferral
from backbeat.runtime.reduce.failures import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.runtime.reduce.bucket_set import BucketSet
    from backbeat.runtime.reduce.step import Round


class Word:
    """What one rank tells the others about its rounds, and what it learns of theirs."""

    def __init__(self, rank: int, ranks: int, *, strict: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self.strict = strict
        """The word is never read late; holds from the next partition on."""
        self.regular = False
        """As far as is known, every parameter arrived once on every rank in the step before."""
        self.attentive = False
        """What follows the next step acts on it, on every rank alike: its word is not read late."""
        self._deferral: Deferral | None = None

    def length_for(self, groups: int, parameters: int) -> int:
        """Numbers that a word on this many takes."""
        return self._layout(groups, parameters).length

    def _layout(self, groups: int, parameters: int, *, faults: bool = False) -> control.Layout:
        ranks = self._ranks
        return control.Layout(groups=groups, ranks=ranks, parameters=parameters, faults=ranks if faults else 0)

    def install(self, groups: BucketSet, names: Sequence[str]) -> None:
        """Lay the numbers out for these buckets of parameters."""
        buckets = groups.buckets
        compressed = any(bucket.compressed for bucket in buckets)
        self.layout = self._layout(len(buckets), len(groups.home), faults=compressed)
        tail = buckets[-1]
        dtype = torch.float32 if compressed else tail.reduce_dtype or tail.dtype
        self._ledger = control.Ledger(self.layout, self._rank, dtype, tail.device)
        late = tail.device.type in deferral.DEVICES and not self.strict and not any(b.sparse for b in buckets)
        self._deferral = Deferral(self._ledger, [bucket.payload for bucket in buckets]) if late else None
        self._names = names
        self._where = f"bucket {len(buckets) - 1}, {names[tail.members[-1]]}"

    def write(self, round_: Round, step: int) -> torch.Tensor:
        """This rank's numbers."""
        if round_.is_plain():
            round_.plain = True
            return self._ledger.plain(step)
        return control.write(
            self.layout,
            rank=self._rank,
            step=step,
            broken=round_.broken,
            irregular=True,
            late=sorted({round_.home[place] for place in round_.late}),
            used=round_.all_used(),
        )

    def write_alone(self, round_: Round, step: int) -> torch.Tensor:
        """As a message of its own."""
        return self.write(round_, step).to(device=self._ledger.device, dtype=self._ledger.dtype, copy=True)

    def reads_late(self) -> bool:
        """Whether ranks whose own round was plain do not wait for the others' word; the same on every rank."""
        return self._deferral is not None and self.regular and not self.attentive

    def read(self, numbers: torch.Tensor, round_: Round, step: int) -> control.Verdict | None:
        """What the ranks said; None for the plain step, or if that is to be read when the next round opens."""
        if self._deferral is not None and round_.plain and self.reads_late():
            self._deferral.put_off(numbers, step)
            return None
        verdict = self.judge(numbers, step, check=not round_.broken)
        if verdict is not None and verdict.late and self.reads_late() and verdict.irregular < self._ranks:
            # A rank that reads late does not know that it must reduce again.
            raise _came_late(verdict, step)
        return verdict

    def judge(self, numbers: torch.Tensor, step: int, *, check: bool = True) -> control.Verdict | None:
        """Read the sums now; raises where ranks met in different steps, or broke one off, if that is to be checked."""
        numbers = numbers if numbers.is_cpu else numbers.cpu()
        if self._ledger.is_plain(numbers, step):
            return None
        verdict = control.read(self.layout, numbers)
        if check:
            self._ledger.check(verdict, step, self._where)
            self._check_finite(verdict, step)
        return verdict

    def _check_finite(self, verdict: control.Verdict, step: int) -> None:
        for rank, number in enumerate(verdict.faults):
            if number:
                raise NonFiniteError(
                    f"the gradient of {self._names[number - 1]!r} is not finite on rank {rank} in step {step}: it was "
                    "left out of the residual, where it would stay for good. Look for its cause with "
                    "torch.autograd.set_detect_anomaly(True), or lower the learning rate"
                )

    def absorb(self) -> None:
        """Read the word on the step before, where it was put off."""
        found = self._deferral.take() if self._deferral is not None else None
        if found is None:
            return
        step, numbers = found
        self.regular = False
        verdict = self.judge(numbers, step)
        if verdict is not None and verdict.late:
            raise _came_late(verdict, step)
        self.regular = verdict is None or not verdict.irregular


def _came_late(verdict: control.Verdict, step: int) -> CommunicationError:
    return CommunicationError(
        f"a gradient of bucket {verdict.late[0]} came after its bucket had left in step {step}, on some ranks only "
        "and although every step before was regular: the step has no gradients on any rank. A graph that changes "
        "under reentrant checkpointing does so; use use_reentrant=False, or strict=True"
    )
