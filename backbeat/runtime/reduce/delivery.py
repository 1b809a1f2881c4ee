"""How groups travel and how their sums come back: what kinds of plan differ in.

The reducer decides *when* a group leaves; a `Delivery` says what then happens, through the few methods below, which the
reducer calls in this order, on every rank alike:

    prepare, bucket (each group), installed     a partition is taken in
    opens                                       a round begins
    send (each group)                           a group leaves
    await_ends, received (each group)           every group has left; its sum is there
    sign                                        control numbers that travel alone are about to
    hand_back, or give_up                       the round has gradients; or it has none, and collectives stay in order
    undo                                        the step before had none either, which is known only now

What a single group does differently, it does in a class of its own (`buckets.Bucket` and its kin): how it takes
gradients, which collective carries it, what becomes of the sum.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from backbeat.errors import BackbeatError
from backbeat.runtime.reduce.bucket import BucketBuffer
from backbeat.runtime.reduce.comm_hooks import GradBucket, Hook, result_of
from backbeat.runtime.reduce.sparse_rows import RowsBucket
from backbeat.runtime.reduce.step import Flight

if TYPE_CHECKING:
    import torch

    from backbeat.runtime.reduce.job import Job
    from backbeat.runtime.reduce.partition import BucketSpec, Partition
    from backbeat.runtime.reduce.status_layout import Verdict


class Delivery:
    """All-reduce: each group is summed by one collective, and its gradients are back when the round ends."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self, partition: Partition) -> None:
        """Another partition is about to be taken in."""

    def bucket(self, spec: BucketSpec, tail: int) -> BucketBuffer:
        """The memory of a group, with room for this many control numbers behind the gradients."""
        if spec.sparse:
            return RowsBucket(spec, self.job.parameters)
        return BucketBuffer(spec, self.job.parameters, wire=self.job.wire, tail=tail)

    def installed(self) -> None:
        """The partition's groups are in place."""

    def opens(self) -> None:
        """A round is about to begin. Raising here refuses it."""

    def carries(self, bucket: BucketBuffer) -> bool:
        """Whether the control numbers travel inside this group, when it is the last; alone otherwise."""
        return bucket.tail > 0

    def send(self, group: int, bucket: BucketBuffer, control: torch.Tensor | None) -> Flight:
        """Begin to sum a group that has taken its gradients."""
        message, work = bucket.launch(self.job.communicator(bucket.spec.communicator), self.job.scale, control)
        return Flight(group, bucket, message, work)

    def sign(self, message: torch.Tensor) -> None:
        """Add to this rank's control numbers, which leave after every group; they will hold the sums."""

    def await_ends(self) -> None:
        """Sleep until the last group of every communicator has come, and so those before it: a thread that waits for
        each in turn is woken for each. What went wrong is found when they are received."""
        if self.job.communicators.raises:
            with suppress(RuntimeError):
                for index in self.job.bucket_set.ends:
                    self.job.round.flights[index].work.wait()

    def received(self, flight: Flight) -> torch.Tensor:
        """Wait for a group's sum."""
        try:
            flight.work.wait()
        except RuntimeError as error:
            raise self.job.failure(flight.group, error) from error
        return flight.message

    def hand_back(self, verdict: Verdict | None) -> None:
        """Give every parameter that some rank used its mean; the others keep what they had. None: all were used."""
        round_ = self.job.round
        if round_.absent or (round_.lent and verdict is None):
            return
        for bucket in self.job.bucket_set.buckets:
            bucket.hand_back(None if verdict is None else verdict.used, round_.backups)

    def give_up(self) -> None:
        """The round has no gradients on this rank, though other ranks may believe it has."""

    def undo(self) -> None:
        """The step before, taken for good until now, had failed on some rank."""

    def check_hook(self) -> None:
        """Raise where no communication hook may take over."""


class HookDelivery(Delivery):
    """A communication hook written for stock DDP reduces the groups."""

    def __init__(self, job: Job, state: Any, hook: Hook) -> None:
        super().__init__(job)
        self._state = state
        self._hook = hook

    def carries(self, bucket: BucketBuffer) -> bool:
        return False

    def send(self, group: int, bucket: BucketBuffer, control: torch.Tensor | None) -> Flight:
        if bucket.sparse:
            return super().send(group, bucket, control)
        last = group == len(self.job.bucket_set.buckets) - 1
        return Flight(group, bucket, bucket.payload, self._hook(self._state, GradBucket(bucket, group, last)))

    def await_ends(self) -> None:
        """A hook's groups come in an order of their own."""

    def received(self, flight: Flight) -> torch.Tensor:
        if flight.bucket.sparse:
            return super().received(flight)
        try:
            return result_of(flight.work, flight.group)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, BackbeatError):
                raise
            raise self.job.failure(flight.group, error) from error
