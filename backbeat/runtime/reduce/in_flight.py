"""Buckets leave, in plan order and from one place, and their sums come in."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistError

from backbeat.errors import CommunicationError
from backbeat.runtime.reduce.step import Flight

if TYPE_CHECKING:
    from backbeat.runtime.reduce.delivery import Delivery
    from backbeat.runtime.reduce.job import Job
    from backbeat.runtime.reduce.status import Word
    from backbeat.runtime.reduce.status_layout import Verdict

_profiling = torch._C._autograd._profiler_enabled
_nothing = nullcontext()


class Flights:
    """Sends the buckets of one job and waits for them."""

    def __init__(self, job: Job, delivery: Delivery, word: Word) -> None:
        self._job = job
        self._round = job.round
        self._word = word
        self.delivery = delivery
        self.lock = threading.RLock()

    def launch_ready(self) -> None:
        """Send every bucket that is due; the last one carries what happened in this round, so it leaves only when
        nothing more can happen, at its end."""
        with self.lock:
            round_, buckets = self._round, self._job.bucket_set.buckets
            last = len(buckets) - 1
            regular = self._word.regular
            # In a hook gradients are mostly off and nobody profiles: two contexts would cost more than the rest.
            launch = self._launch if torch.is_grad_enabled() or _profiling() else self._launch_one
            while round_.launched < last and round_.waits[round_.launched] <= 0:
                # What comes late can be added to a dense sum, not to a sparse one.
                if not regular and buckets[round_.launched].sparse:
                    return
                launch(round_.launched, regular)

    def launch_rest(self) -> None:
        """Send everything that has not left; the round is over. Called with gradients off."""
        round_ = self._round
        # The last bucket of a regular round waited only for the round to end.
        regular = self._word.regular and not round_.absent and not round_.broken
        launch = self._launch if _profiling() else self._launch_one
        with self.lock:
            while round_.launched < len(self._job.bucket_set.buckets):
                launch(round_.launched, regular and round_.waits[round_.launched] <= 0)

    def _launch(self, index: int, whole: bool) -> None:
        with torch.no_grad(), self._span("group", index):
            self._launch_one(index, whole)

    def _launch_one(self, index: int, whole: bool) -> None:
        """Send one bucket. `whole`: every member is known to have arrived."""
        job, round_, delivery = self._job, self._round, self.delivery
        buckets = job.bucket_set.buckets
        bucket = buckets[index]
        last = bucket is buckets[-1]
        if round_.streams is not None:
            round_.streams.join(index)
        try:
            if whole and bucket.take_all():
                round_.whole.append(bucket)
            else:
                bucket.pack(round_)
        except RuntimeError as error:
            job.check_format(error)
            raise
        rides = last and delivery.carries(bucket)
        try:
            flight = delivery.send(index, bucket, self._word.write(round_, job.step) if rides else None)
        except DistError as error:
            # NCCL refuses to start a collective where it has learnt that a peer is gone.
            raise job.failure(index, error) from error
        round_.flights.append(flight)
        round_.launched = index + 1
        if job.recorder is not None:
            job.recorder.launched(index, flight.work)
        if last and not rides:
            message = self._word.write_alone(round_, job.step)
            delivery.sign(message)
            round_.alone = Flight(
                index, bucket, message, job.communicator(bucket.spec.communicator).all_reduce(message)
            )

    def land(self) -> torch.Tensor:
        """Wait for every bucket in turn; returns the summed control numbers."""
        numbers: torch.Tensor | None = None
        round_, received = self._round, self.delivery.received
        profiled = _profiling()
        if not profiled:
            self.delivery.await_ends()
        for flight in round_.flights:
            with self._span("wait", flight.group) if profiled else _nothing:
                message = received(flight)
            numbers = flight.bucket.arrived(message)
        if round_.alone is not None:
            numbers = self._received(round_.alone)
        if numbers is None:
            raise CommunicationError(f"step {self._job.step} ended without any bucket: the partition is empty")
        return numbers

    def repeat(self, verdict: Verdict) -> None:
        """Send what came after its bucket had left, and add it to what arrived."""
        job = self._job
        for index in verdict.late:
            bucket = job.bucket_set.buckets[index]
            job.repeats += 1
            message = bucket.late_message(self._round.late, job.scale)
            work = job.communicator(bucket.spec.communicator).all_reduce(message)
            counts = bucket.add_late(self._received(Flight(index, bucket, message, work)))
            for place, count in zip(bucket.members, counts, strict=True):
                if count > 0:
                    verdict.used[place] = True

    def _received(self, flight: Flight) -> torch.Tensor:
        try:
            flight.work.wait()
        except RuntimeError as error:
            raise self._job.failure(flight.group, error) from error
        return flight.message

    def _span(self, what: str, index: int) -> AbstractContextManager[Any]:
        if not _profiling():
            return _nothing
        bucket = self._job.bucket_set.buckets[index]
        first = self._job.names[bucket.members[0]]
        return torch.profiler.record_function(
            f"backbeat::{what} {index} communicator {bucket.spec.communicator} {bucket.bytes} bytes {first}"
        )
