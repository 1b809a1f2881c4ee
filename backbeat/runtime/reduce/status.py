"""The status message: a few numbers after the last bucket's gradients, by which ranks check every step.

    [ irregular | late, one a bucket | step stamp, one a rank | fault, one a rank | used, one a parameter ]

All-reduced with the gradients, each number becomes a sum that every rank reads alike. `irregular` is positive if on
some rank not every parameter arrived exactly once. `late` is positive if some gradient came after its bucket had left.
A stamp is what that rank alone wrote: its step, negative if its backward was broken off. A fault is the number of a
parameter, from 1, whose gradient was not finite on that rank. `used` counts the ranks that used a parameter. All are
small integers, so bf16 and fp16 carry them as well. In bf16 `used` is exact up to 256 ranks; beyond, no step counts as
regular and each waits for the device. Only compressed plans have faults; their status message travels alone, in fp32.

A rank reads it when it has arrived or, where the host should not wait for the device, when the next step opens. Until
then a guard stands in: the device compares the numbers with what they must be, in the stream's own order, and turns all
gradients into NaN if one differs. So nobody takes the sum of different steps, or one that lacks a rank's part, for a
gradient. The error that names the cause follows with the next backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from backbeat.errors import BrokenStepError, CommunicationError, NonFiniteError, StepMismatchError
from backbeat.runtime.reduce.bucket import BucketSet
from backbeat.runtime.reduce.step import RankStatus

STAMPS = 16
"""Steps are told apart modulo this; the stamps stay exact in every float format."""
DEFER_ON = {"cuda"}
"""Kinds of device whose status messages are read when the next step opens."""


@dataclass(slots=True)
class StatusOffsets:
    """Where each number stands."""

    buckets: int
    ranks: int
    parameters: int
    faults: int = 0
    stamps_at: int = field(init=False)
    faults_at: int = field(init=False)
    used_at: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.stamps_at = 1 + self.buckets
        self.faults_at = self.stamps_at + self.ranks
        self.used_at = self.faults_at + self.faults
        self.length = self.used_at + self.parameters


class SummedStatus(NamedTuple):
    """The summed numbers, read."""

    irregular: int
    """Ranks where not every parameter arrived exactly once."""
    late: tuple[int, ...]
    """Buckets that must be reduced again."""
    stamps: tuple[int, ...]
    """What each rank wrote."""
    used: list[bool]
    faults: tuple[int, ...]
    """The parameter that each rank found not finite, counted from 1, or 0."""

    def uses(self, parameters: Iterable[int]) -> bool:
        """Some rank used one of these."""
        return any(self.used[index] for index in parameters)


def stamp_of(step: int) -> int:
    return step % STAMPS + 1


def parse(offsets: StatusOffsets, summed: torch.Tensor) -> SummedStatus:
    numbers: list[float] = summed.float().tolist()
    return SummedStatus(
        irregular=round(numbers[0]),
        late=tuple(index for index in range(offsets.buckets) if numbers[1 + index] > 0),
        stamps=tuple(round(number) for number in numbers[offsets.stamps_at : offsets.faults_at]),
        used=[number > 0 for number in numbers[offsets.used_at :]],
        faults=tuple(round(number) for number in numbers[offsets.faults_at : offsets.used_at]),
    )


class StatusMessage:
    """What one rank tells the others about its steps, and what it learns of theirs."""

    def __init__(self, rank: int, ranks: int, *, strict: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self._strict = strict
        self.expects_regular = False
        """As far as is known, every parameter arrived once on every rank in the step before, and nothing has changed
        since. A status that was put off counts as regular until it is read."""
        self.unread = False
        """The status of the step before was put off."""
        self._reads_at_once = False
        self._deferred: _DeferredReader | None = None

    def never_defer(self, strict: bool) -> None:
        """Every status is read at once, where `strict`; holds from the next partition on."""
        self._strict = strict

    def read_next_at_once(self, wanted: bool) -> None:
        """Something depends on the next step's status; on every rank alike."""
        self._reads_at_once = wanted

    def expect_irregular(self) -> None:
        """Something has changed: nothing is known of the next step."""
        self.expects_regular = False

    def install(self, bucket_set: BucketSet, names: Sequence[str]) -> None:
        """Lay the numbers out for these buckets of parameters."""
        buckets = bucket_set.buckets
        compressed = any(bucket.compressed for bucket in buckets)
        faults = self._ranks if compressed else 0
        self.offsets = StatusOffsets(len(buckets), self._ranks, len(bucket_set.bucket_of), faults)
        last = buckets[-1]
        self._device = last.device
        self._dtype = torch.float32 if compressed else last.reduce_dtype or last.dtype
        self._lay_out_regular(self.offsets)
        defers = last.device.type in DEFER_ON and not self._strict and not any(b.sparse for b in buckets)
        payloads = [bucket.payload for bucket in buckets]
        self._deferred = _DeferredReader(self.offsets, self._expected, payloads) if defers else None
        self._names = names
        self._where = f"bucket {len(buckets) - 1}, {names[last.members[-1]]}"

    def _lay_out_regular(self, offsets: StatusOffsets) -> None:
        """What this rank writes in a step that is regular, and what the sums are if it was so on every rank."""
        stamps = torch.arange(1, STAMPS + 1, dtype=torch.float32, device="cpu")
        mine = torch.zeros(STAMPS, offsets.length, device="cpu")
        expected = torch.zeros_like(mine)
        mine[:, offsets.used_at :] = 1.0
        mine[:, offsets.stamps_at + self._rank] = stamps
        expected[:, offsets.used_at :] = float(offsets.ranks)
        expected[:, offsets.stamps_at : offsets.faults_at] = stamps[:, None]
        # By step modulo `STAMPS`. On the device, so that the regular step copies nothing from the host.
        self._mine = mine.to(device=self._device, dtype=self._dtype).unbind()
        self._expected = expected.to(self._dtype).unbind()
        """The sums of a regular step, on the host."""

    def write(self, own: RankStatus, step: int) -> torch.Tensor:
        """This rank's numbers."""
        if own.regular:
            return self._mine[step % STAMPS]
        offsets = self.offsets
        numbers = [0.0] * offsets.length
        numbers[0] = 1.0
        for index in own.late:
            numbers[1 + index] = 1.0
        numbers[offsets.stamps_at + self._rank] = float(-stamp_of(step) if own.broken else stamp_of(step))
        numbers[offsets.used_at :] = [float(bool(flag)) for flag in own.used]
        return torch.tensor(numbers, device="cpu")

    def write_alone(self, own: RankStatus, step: int) -> torch.Tensor:
        """As a message of its own."""
        return self.write(own, step).to(device=self._device, dtype=self._dtype, copy=True)

    def defers(self) -> bool:
        """Whether a rank whose own step was regular goes on without waiting for the others' status. The same on every
        rank."""
        return self._deferred is not None and self.expects_regular and not self._reads_at_once

    def read(self, numbers: torch.Tensor, own: RankStatus, step: int) -> SummedStatus | None:
        """What the ranks said; None for a regular step, or if that is to be read when the next step opens."""
        if self._deferred is not None and own.regular and self.defers():
            self._deferred.put_off(numbers, step)
            self.unread = True
            return None
        summed = self.read_now(numbers, step)
        if summed is not None and summed.late and self.defers() and summed.irregular < self._ranks:
            # A rank that defers the reading does not know that it must reduce again.
            raise _came_late(summed, step)
        self.expects_regular = summed is None
        return summed

    def read_now(self, numbers: torch.Tensor, step: int) -> SummedStatus | None:
        """Read the sums; raises where ranks met in different steps, or broke one off."""
        numbers = numbers if numbers.is_cpu else numbers.cpu()
        if torch.equal(numbers, self._expected[step % STAMPS]):
            return None
        summed = parse(self.offsets, numbers)
        broken = [rank for rank, found in enumerate(summed.stamps) if found < 0]
        if broken:
            raise BrokenStepError(
                f"rank {', '.join(map(str, broken))} broke off its backward in step {step} with an exception: no rank "
                "has gradients for this step; skip it on every rank, or stop"
            )
        stamp = stamp_of(step)
        others = [rank for rank, found in enumerate(summed.stamps) if found != stamp]
        if others:
            away = (summed.stamps[others[0]] - stamp) % STAMPS
            off = f"{away} ahead" if away <= STAMPS // 2 else f"{STAMPS - away} behind"
            raise StepMismatchError(
                f"rank {self._rank} is in its backward number {step}, but rank {', '.join(map(str, others))} is {off} "
                f"({self._where}): they count different backwards; run the same number of synchronised backwards on "
                "every rank, or use join()"
            )
        for rank, number in enumerate(summed.faults):
            if number:
                raise NonFiniteError(
                    f"the gradient of {self._names[number - 1]!r} is not finite on rank {rank} in step {step}: it was "
                    "left out of the residual, where it would stay for good. Look for its cause with "
                    "torch.autograd.set_detect_anomaly(True), or lower the learning rate"
                )
        return summed

    def read_step_before(self) -> None:
        """Read the status of the step before, where it was put off; raises where that step has failed."""
        found = self._deferred.take() if self._deferred is not None else None
        self.unread = False
        if found is None:
            return
        step, numbers = found
        self.expects_regular = False
        summed = self.read_now(numbers, step)
        if summed is not None and summed.late:
            raise _came_late(summed, step)
        self.expects_regular = summed is None or not summed.irregular


class _DeferredReader:
    """The status of one step on its way to the host, and the guard that stands for it."""

    def __init__(
        self, offsets: StatusOffsets, expected: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor]
    ) -> None:
        """expected: the numbers after a regular step, by its stamp. payloads: the sums that are guarded."""
        device = payloads[-1].device
        # Late gradients and stamps must be as expected. That another rank did not use a parameter is no fault: its
        # share was zero, and since this rank used it the mean is right.
        self._compared = slice(1, offsets.used_at)
        self._expected = [row[self._compared].to(device) for row in expected]
        kinds = {(tensor.dtype, tensor.device) for tensor in payloads}
        self._payloads = [
            (*kind, [t for t in payloads if (t.dtype, t.device) == kind]) for kind in sorted(kinds, key=str)
        ]
        self._cuda = device.type == "cuda"
        self._host = torch.empty(offsets.length, dtype=expected[0].dtype, device="cpu", pin_memory=self._cuda)
        self._event: Any = torch.cuda.Event() if self._cuda else None
        self._step: int | None = None

    def put_off(self, numbers: torch.Tensor, step: int) -> None:
        """Send the numbers to the host without waiting for them, and guard the gradients meanwhile."""
        self._host.copy_(numbers, non_blocking=True)
        if self._cuda:
            self._event.record()
        self._step = step
        right = (numbers[self._compared] == self._expected[step % STAMPS]).all()
        # 1 / 1 = 1 where all are right, 0 / 0 = NaN where one is wrong, without the host.
        factor = torch.div(right, right)
        for dtype, device, payloads in self._payloads:
            torch._foreach_mul_(payloads, factor.to(device=device, dtype=dtype))

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The step whose status is outstanding, and its numbers; waits for them."""
        step, self._step = self._step, None
        if step is None:
            return None
        if self._cuda:
            self._event.synchronize()
        return step, self._host


def _came_late(summed: SummedStatus, step: int) -> CommunicationError:
    return CommunicationError(
        f"a gradient of bucket {summed.late[0]} came after its bucket had left in step {step}, on some ranks only "
        "and although every step before was regular: the step has no gradients on any rank. A graph that changes "
        "under reentrant checkpointing does so; use use_reentrant=False, or strict=True"
    )
