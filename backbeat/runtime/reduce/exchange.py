"""Where buckets are sent, in the plan's order and from one place, waited for, checked and handed back.

The `Sender` decides *when* a bucket leaves; an `Exchange` says what then happens: an all-reduce here, a communication
hook in `comm_hooks`, compressed buckets in `compressed.compressed_exchange`. Its methods are called in this order, on
every rank alike:

    make_buckets                                 a partition is taken in
    check_open                                   a step is about to begin
    undo                                         the step before had failed on some rank, which is known only now
    send (each bucket)                           a bucket leaves
    absorb_late, carries_status                  the last bucket is about to leave, with the status message or without
    add_to_status                                a status message that travels alone is about to leave
    wait_for_last, receive (each bucket)         every bucket has left; its sum is there
    hand_back, or give_up                        the step has gradients; or it has none, and collectives stay in order

What differs from bucket to bucket is in the bucket's class (`bucket.BucketMemory` and its subclasses): how it takes
gradients, which collective carries it, what becomes of the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.distributed import DistError

from backbeat.comm.communicators import profiling
from backbeat.runtime.reduce.bucket import BucketBuffer, BucketMemory, SparseBucket
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.partition import BucketSpec, Partition
from backbeat.runtime.reduce.status import StatusMessage, StatusOffsets, SummedStatus
from backbeat.runtime.reduce.step import InFlight

_nothing = nullcontext()


class Sender:
    """Sends the buckets of one reducer and waits for them."""

    def __init__(
        self, context: ReducerContext, exchange: Exchange, status: StatusMessage, *, skip_unused: bool
    ) -> None:
        self._context = context
        self._step = context.step
        self._status = status
        self.exchange = exchange
        self._skip_unused = skip_unused
        self.late_buckets = 0
        """Buckets that had to be reduced again because a gradient came late."""
        self._skipped: Set[int] = frozenset()
        """Buckets that no rank used in the step before: they leave only where the status says that some rank did now.
        The same on every rank."""
        # A GPU's gradients come from threads of autograd's own.
        self._lock = threading.RLock()

    def skip_none(self) -> None:
        """In the next step every bucket leaves: they are other buckets."""
        self._skipped = frozenset()

    def send_ready(self) -> None:
        """Send every complete bucket, in plan order, but the last: that one carries the step's status and leaves when
        the step ends."""
        with self._lock:
            arrivals, buckets = self._step.arrivals, self._context.bucket_set.buckets
            last = len(buckets) - 1
            expected = self._status.expects_regular
            # In a hook gradients are mostly off and nobody profiles: two contexts would cost more than the rest.
            send = self._send_traced if torch.is_grad_enabled() or profiling() else self._send
            while arrivals.next_bucket < last and arrivals.missing[arrivals.next_bucket] <= 0:
                # What comes late can be added to a dense sum, not to a sparse one.
                if not expected and buckets[arrivals.next_bucket].sparse:
                    return
                send(arrivals.next_bucket, expected)

    def send_rest(self) -> None:
        """Send everything that has not left; no more gradients come. Called with gradients off."""
        arrivals = self._step.arrivals
        # The last bucket of a regular step waited only for the step to end.
        expected = self._status.expects_regular and not self._step.contributes_nothing
        send = self._send_traced if profiling() else self._send
        with self._lock:
            while arrivals.next_bucket < len(self._context.bucket_set.buckets):
                send(arrivals.next_bucket, expected and arrivals.missing[arrivals.next_bucket] <= 0)

    def _send_traced(self, index: int, complete: bool) -> None:
        """With gradients off, and with a span for a profiler that runs."""
        with torch.no_grad(), self._span("bucket", index):
            self._send(index, complete)

    def _send(self, index: int, complete: bool) -> None:
        """Send one bucket. `complete`: every member is known to have arrived."""
        step, buckets = self._step, self._context.bucket_set.buckets
        bucket = buckets[index]
        if step.arrivals.streams is not None:
            step.arrivals.streams.join(index)
        try:
            if not (complete and bucket.take_all()):
                step.add_taken(index, bucket.pack(step))
        except RuntimeError as error:
            self._context.check_format(error)
            raise
        if bucket is buckets[-1]:
            self._launch_last(index, bucket)
        elif index in self._skipped:
            step.add_skipped(index)
        else:
            self._launch(index, bucket, None)

    def _launch_last(self, index: int, bucket: BucketMemory) -> None:
        """Send the last bucket, with the status message inside it or after it."""
        step, exchange, status = self._step, self.exchange, self._status
        if step.arrivals.late:
            step.arrivals.late -= exchange.absorb_late(step.arrivals.late)
        own = step.set_own_status(sent_all=not self._skipped)
        skipped = index in self._skipped
        if exchange.carries_status(bucket) and not skipped:
            self._launch(index, bucket, status.write(own, step.number))
            return
        if skipped:
            step.add_skipped(index)
        else:
            self._launch(index, bucket, None)
        message = status.write_alone(own, step.number)
        exchange.add_to_status(message, status.offsets)
        work = self._context.communicators[bucket.spec.communicator].all_reduce(message)
        step.add_status_sent(InFlight(index, bucket, message, work))

    def _launch(self, index: int, bucket: BucketMemory, status: torch.Tensor | None) -> None:
        context = self._context
        try:
            sent = self.exchange.send(index, bucket, status)
        except DistError as error:
            # NCCL refuses to start a collective where it has learnt that a peer is gone.
            raise context.failure(index, error) from error
        self._step.add_sent(sent)
        if context.recorder is not None:
            context.recorder.launched(index, sent.work)

    def finish(self) -> bool:
        """The graph is done: send the rest, wait for every bucket, check the step, and hand the gradients back. Returns
        whether every parameter arrived once on every rank."""
        step, context = self._step, self._context
        try:
            self.send_rest()
        except BaseException:
            # What has left is still being summed, in buffers that the next backward writes into.
            for sent in step.in_flight:
                with suppress(Exception):
                    sent.work.wait()
            raise
        own = step.own_status
        assert own is not None  # the last bucket has left
        # Most likely all will be well. This takes as long as the last bucket's thread needs to wake up.
        placed = own.regular and context.bucket_set.plain
        if placed:
            context.bucket_set.place_gradients()
        numbers = self.wait()
        try:
            summed = self._status.read(numbers, own, step.number)
        except BaseException:
            self.exchange.give_up()
            raise
        if context.lost is not None:
            raise context.lost
        if summed is not None:
            self._send_late(summed)
        self.exchange.hand_back(summed, in_place=placed)
        return summed is None

    def wait(self) -> torch.Tensor:
        """Wait for every bucket in turn; returns the summed status message."""
        numbers: torch.Tensor | None = None
        step, receive = self._step, self.exchange.receive
        profiled = profiling()
        if not profiled:
            self.exchange.wait_for_last()
        for sent in step.in_flight:
            with self._span("wait", sent.bucket_index) if profiled else _nothing:
                message = receive(sent)
            # Elsewhere the sum is in its place, and no status message follows it.
            if message is not sent.bucket.travels or sent.bucket.status_length:
                numbers = sent.bucket.take_sum(message)
        if step.status_in_flight is not None:
            index, _, numbers, work = step.status_in_flight
            self.exchange.wait(index, work)
        assert numbers is not None  # after the last bucket's gradients, or on their own
        return numbers

    def _send_late(self, summed: SummedStatus) -> None:
        """Send what the status asks for: buckets that were skipped and that some rank used, and gradients that came
        after their bucket had left, which are added to what arrived."""
        context = self._context
        for index in sorted(self._skipped):
            if index in summed.late or summed.uses(context.bucket_set.buckets[index].members):
                self._launch(index, context.bucket_set.buckets[index], None)
                context.bucket_set.buckets[index].take_sum(self.exchange.receive(self._step.in_flight[-1]))
        for index in summed.late:
            bucket = context.bucket_set.buckets[index]
            self.late_buckets += 1
            message = bucket.late_message(self._step.arrivals.late, context.scale)
            work = context.communicators[bucket.spec.communicator].all_reduce(message)
            self.exchange.wait(index, work)
            for member, count in zip(bucket.members, bucket.add_late(message), strict=True):
                if count > 0:
                    summed.used[member] = True
        if self._skip_unused:
            buckets = enumerate(context.bucket_set.buckets)
            self._skipped = {index for index, bucket in buckets if not summed.uses(bucket.members)}

    def _span(self, what: str, index: int) -> AbstractContextManager[Any]:
        if not profiling():
            return _nothing
        bucket = self._context.bucket_set.buckets[index]
        first = self._context.managed.names[bucket.members[0]]
        return torch.profiler.record_function(
            f"backbeat::{what} {index} communicator {bucket.spec.communicator} {bucket.bytes} bytes {first}"
        )


class Exchange:
    """All-reduce: each bucket is summed by one collective, and its gradients are back when the step ends."""

    def __init__(self, context: ReducerContext) -> None:
        self.context = context
        self._wait_raises = context.communicators.wait_raises

    def make_buckets(self, partition: Partition, status_length: int) -> list[BucketMemory]:
        """The memory of a partition's buckets; the last one with room for a status message of this length."""
        *others, last = partition.buckets
        return [*map(self._plain_bucket, others), self._plain_bucket(last, status_length)]

    def _plain_bucket(self, spec: BucketSpec, status_length: int = 0) -> BucketMemory:
        if spec.sparse:
            return SparseBucket(spec, self.context.managed.parameters)
        return BucketBuffer(
            spec, self.context.managed.parameters, reduce_dtype=self.context.reduce_dtype, status_length=status_length
        )

    def check_open(self) -> None:
        """A step is about to begin. Raising here refuses it."""

    def carries_status(self, bucket: BucketMemory) -> bool:
        """Whether the status message travels inside this bucket, when it is the last; alone otherwise."""
        return bucket.status_length > 0

    def send(self, index: int, bucket: BucketMemory, status: torch.Tensor | None) -> InFlight:
        """Start the collective of a bucket that has taken its gradients."""
        context = self.context
        message, work = bucket.launch(context.communicators[bucket.spec.communicator], context.scale, status)
        return InFlight(index, bucket, message, work)

    def absorb_late(self, late: Set[int]) -> Set[int]:
        """Take late gradients that may wait for the next step; returns their parameters."""
        return frozenset()

    def add_to_status(self, message: torch.Tensor, offsets: StatusOffsets) -> None:
        """Add to this rank's status message, which leaves after every bucket; it will hold the sums."""

    def wait_for_last(self) -> None:
        """Sleep until the last bucket of every communicator has arrived; those before it then have, too. A thread that
        waits for each bucket in turn is woken for each. `receive` finds what went wrong."""
        in_flight, bucket_set = self.context.step.in_flight, self.context.bucket_set
        # All have left, and none twice: `in_flight[index]` is bucket `index`.
        if self._wait_raises and len(in_flight) == len(bucket_set.buckets):
            with suppress(RuntimeError):
                for index in bucket_set.ends:
                    in_flight[index].work.wait()

    def receive(self, sent: InFlight) -> torch.Tensor:
        """Wait for a bucket's sum."""
        self.wait(sent.bucket_index, sent.work)
        return sent.message

    def wait(self, index: int, work: Any) -> None:
        """Wait for a collective of this bucket."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.context.failure(index, error) from error

    def hand_back(self, summed: SummedStatus | None, *, in_place: bool) -> None:
        """Give every parameter that some rank used its mean; the others keep what they had. None: all were used.

        in_place: every gradient is its slice of the buffers already.
        """
        step = self.context.step
        if step.absent or (in_place and summed is None):
            return
        for bucket in self.context.bucket_set.buckets:
            bucket.hand_back(None if summed is None else summed.used, step.unused_grads)

    def give_up(self) -> None:
        """The step has no gradients on this rank, though other ranks may believe it has."""

    def undo(self) -> None:
        """The step before, taken for good until now, had failed on some rank."""
