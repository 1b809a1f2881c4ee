"""Compressed buckets: what a gradient leaves unsent stays in a residual and goes later.

A bucket is compressed when it leaves, in its turn, during backward. There are three ways to deliver it. Without
`attach`, `.grad` is the decoded mean when backward ends. With `attach`, each bucket is decoded into memory that all
buckets share, and its parameters are updated as soon as it has arrived: beside weights, optimizer state and residuals
the device holds one bucket. With `attach` and a `max_grad_norm`, gradients wait for the last bucket, and all updates
follow at the end of backward.

Ranks stay alike whatever happens. In the second way every rank updates a bucket when it arrives, even where the step
turns out to have failed on one. In the other two ways every rank undoes a failed step: it takes back what it sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from backbeat.comm.machine import cuda
from backbeat.errors import InputError
from backbeat.runtime.compressed import topk
from backbeat.runtime.compressed.attached_optimizers import AttachedOptimizers
from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
from backbeat.runtime.compressed.compression_options import CompressionOptions
from backbeat.runtime.compressed.cuda_graphs import CudaGraphs
from backbeat.runtime.compressed.owed import Residuals
from backbeat.runtime.compressed.stores import Scratch, Store, make_stores
from backbeat.runtime.compressed.topk import TopK
from backbeat.runtime.reduce.bucket import BucketMemory
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.exchange import Exchange
from backbeat.runtime.reduce.partition import BucketSpec, Partition
from backbeat.runtime.reduce.status import StatusOffsets, SummedStatus, parse
from backbeat.runtime.reduce.step import InFlight

WARMUP_DENSITY = 0.25


class CompressedExchange(Exchange):
    """Runs partitions of which some buckets are compressed."""

    def __init__(self, context: ReducerContext, options: CompressionOptions, *, host: bool = False) -> None:
        super().__init__(context)
        self.options = options
        self.attached = AttachedOptimizers(self._check_step, momentum_correction=options.momentum_correction)
        self._host = host
        self.residuals = Residuals(context, self._join)
        self._compressed: list[CompressedBucket] = []
        self._status: tuple[StatusOffsets, torch.Tensor] | None = None
        """The last status message."""
        device = context.communicators.device
        self._side: Any = cuda.Stream(device) if device.type == "cuda" else None
        # Where waiting means to wait on a stream, decoding is queued when its bucket leaves.
        self._queues = self._side is not None and context.communicators.backend == "nccl"

    def _check_step(self) -> None:
        """Gradients of a backward under `no_sync` wait for one that synchronises; this rank alone must not use them."""
        if self.attached.running:
            return
        arrived, parameters = self.context.step.arrivals.arrived_since_reduce, self.context.managed.parameters
        if 1 in arrived and any(arrived[index] and one.grad is not None for index, one in enumerate(parameters)):
            raise InputError(
                "step() after a backward under no_sync: the gradients are this rank's own, and replicas would part. "
                "Call it after a synchronised backward, which applies them on every rank, or drop them with zero_grad()"
            )

    def make_buckets(self, partition: Partition, status_length: int) -> list[BucketMemory]:
        # Refuses what cannot be, while the buckets there are go on as they were.
        self._velocity = self.attached.corrects_momentum(self.context.managed.parameters)
        """Residuals have velocities beside them."""
        stores = make_stores(partition, self.context, host=self._host, velocity=self._velocity)
        self.residuals.take_from_buckets()
        self._scratch, self._gathered = Scratch(), Scratch()
        """Where one bucket is decoded; and where its gradients are widened, while another stream may be decoding."""
        self._receive_buffer: torch.Tensor | None = None
        """Where everybody's message comes in, of a bucket that is dealt with at once."""
        graphs = None if self.context.communicators.device.type in topk.HOSTS else CudaGraphs()
        # The status message of compressed plans needs fp32 and travels alone: no bucket has room for it.
        buckets = [self._bucket(spec, stores.get(spec), graphs) for spec in partition.buckets]
        self._compressed = [bucket for bucket in buckets if isinstance(bucket, CompressedBucket)]
        self.residuals.give_to_buckets(self._compressed)
        return buckets

    def _bucket(self, spec: BucketSpec, store: Store | None, graphs: CudaGraphs | None) -> BucketMemory:
        if spec.compression is None or store is None:
            return self._plain_bucket(spec)
        bucket = CompressedBucket(
            spec,
            self.context.managed.parameters,
            compressor=TopK(spec.compression.density, graphs),
            store=store,
            dense=not self.attached.at_once,
            momentum_of=self.attached.momentum_of if self._velocity else None,
            gathering=self._gathered,
        )
        self._scratch.reserve(bucket.numel, bucket.dtype)
        return bucket

    def check_open(self) -> None:
        if self.attached.optimizers:
            self.attached.check(self.context.managed.names, self.context.managed.parameters)
        elif self.options.momentum_correction:
            raise InputError(
                "momentum_correction keeps the optimizer's momentum in its place: hand the optimizer over with "
                "model.attach(optimizer, max_grad_norm=None) before the first backward, or leave it out"
            )

    def send(self, index: int, bucket: BucketMemory, status: torch.Tensor | None) -> InFlight:
        step = self.context.step
        if not isinstance(bucket, CompressedBucket):
            if not step.contributes_nothing:
                self.residuals.add_owed(bucket, step.arrivals.arrived_since_reduce)
            sent = super().send(index, bucket, status)
            self._collect(index)
            return sent
        with self._beside():
            number = step.number + self.residuals.steps_before
            density = density_at(number, bucket.compressor.density, self.options.warmup_steps)
            message = bucket.begin(scale=self.context.scale, density=density)
            at_once = self._queues and self._may_deliver(bucket)
            self._gather(bucket, message, at_once=at_once)
            sent = InFlight(index, bucket, bucket.payload, bucket.work)
            if at_once:
                self._deliver(index, bucket)
        self._collect(index)
        return sent

    def add_to_status(self, message: torch.Tensor, offsets: StatusOffsets) -> None:
        """Tell the others of a gradient that was not finite; `message` will hold the sums."""
        self._status = (offsets, message)
        # They are found beside backward, where buckets are compressed.
        self._join()
        faults = [fault for bucket in self._compressed for fault in bucket.faults()]
        if not faults or self.context.step.broken:
            return
        message[offsets.faults_at + self.context.communicators.rank].copy_(torch.cat(faults).amax())

    def receive(self, sent: InFlight) -> torch.Tensor:
        bucket = sent.bucket
        if not isinstance(bucket, CompressedBucket):
            return super().receive(sent)
        decodes = not self.attached.at_once and not self.context.step.absent
        if bucket.away:
            with self._beside():
                self.wait(sent.bucket_index, bucket.work)
                if decodes:
                    bucket.decode()
        if bucket is self._compressed[-1]:
            # The guard that stands for a deferred status acts on what is decoded.
            self._join()
        return sent.message

    def hand_back(self, summed: SummedStatus | None, *, in_place: bool) -> None:
        used = None if summed is None else summed.used
        at_once = self.attached.at_once
        with self._beside():
            for bucket in self._compressed:
                if self.context.step.absent:
                    bucket.drop()
                elif at_once and bucket.away:
                    self._apply(bucket, used)
        self._join()
        if self.context.step.absent:
            return
        unused_grads = self.context.step.unused_grads
        for one in self.context.bucket_set.buckets:
            if not (at_once and one.compressed):
                one.hand_back(used, unused_grads)
                if at_once:
                    self._update_dense([one], used)
            elif used is not None:
                for index, parameter in zip(one.members, one.parameters, strict=True):
                    if not used[index]:
                        parameter.grad = unused_grads.get(index)
        if self.attached.optimizers and not at_once:
            self._update_dense(self.context.bucket_set.buckets, used)

    def give_up(self) -> None:
        """The step failed: finish the updates, which other ranks have begun, or take back what was sent."""
        used: Sequence[bool] | None = None
        at_once = self.attached.at_once
        if at_once and self._status is not None and any(bucket.away for bucket in self._compressed):
            offsets, numbers = self._status
            used = parse(offsets, numbers.cpu()).used
        with self._beside():
            for bucket in self._compressed:
                if at_once and not self.context.step.absent:
                    self._apply(bucket, used)
                else:
                    bucket.give_back()
                bucket.clean()
        self._join()

    def undo(self) -> None:
        with torch.no_grad():
            for bucket in self._compressed:
                if not self.attached.at_once:
                    bucket.give_back()
                bucket.clean()

    def absorb_late(self, late: Set[int]) -> Set[int]:
        """A gradient that its compressed bucket left without waits in the residual for the next step."""
        bucket_of, buckets = self.context.bucket_set.bucket_of, self.context.bucket_set.buckets
        found = {index: bucket for index in late if isinstance(bucket := buckets[bucket_of[index]], CompressedBucket)}
        if found:
            self._join()
        for index, bucket in found.items():
            if not self.context.step.contributes_nothing:
                bucket.keep_late(index)
            self.context.managed.parameters[index].grad = None
        return found.keys()

    def _gather(self, bucket: CompressedBucket, message: torch.Tensor, *, at_once: bool) -> None:
        """Send a message and begin to receive everybody's. `at_once`: they are used before any other bucket's come, so
        that all buckets receive in the same buffer."""
        needed = message.numel() * self.context.communicators.size
        if not at_once:
            result = message.new_empty(needed)
        else:
            if self._receive_buffer is None or self._receive_buffer.numel() < needed:
                self._receive_buffer = message.new_empty(needed)
            result = self._receive_buffer[:needed]
        bucket.sent(self.context.communicators[bucket.spec.communicator].all_gather(result, message), result)

    def _may_deliver(self, bucket: CompressedBucket) -> bool:
        """A bucket may be updated while backward goes on only where this rank saw every member's gradient. Then some
        rank used each member, which is all that an update must know. A gradient that came late is in `.grad`, which an
        update would take for its own."""
        step = self.context.step
        return bucket.complete and not step.absent and step.arrivals.late.isdisjoint(bucket.members)

    def _deliver(self, index: int, bucket: CompressedBucket) -> None:
        self.wait(index, bucket.work)
        if self.attached.at_once:
            self._apply(bucket, None)
        else:
            bucket.decode()

    def _collect(self, last: int) -> None:
        """Deal with buckets up to this one that have arrived, where the host is told of it."""
        if self._queues:
            return
        for index, bucket in enumerate(self.context.bucket_set.buckets[: last + 1]):
            if not isinstance(bucket, CompressedBucket) or not bucket.away:
                continue
            if self._may_deliver(bucket) and bucket.work.is_completed():
                with self._beside():
                    self._deliver(index, bucket)

    def _apply(self, bucket: CompressedBucket, used: Sequence[bool] | None) -> None:
        parameters = bucket.expose(self._scratch.buffer(bucket.dtype, bucket.device), used)
        if parameters:
            self.attached.apply(parameters, without_momentum=self.options.momentum_correction)

    def _update_dense(self, buckets: Sequence[BucketMemory], used: Sequence[bool] | None) -> None:
        """Update the members of these that have their gradients in `.grad`, which are clipped before if asked for."""
        present = [
            parameter
            for bucket in buckets
            for index, parameter in zip(bucket.members, bucket.parameters, strict=True)
            if parameter.grad is not None and (used is None or used[index])
        ]
        if present:
            with without_modes(self.context.communicators.device.type):
                if self.attached.max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(present, self.attached.max_grad_norm)
                self.attached.apply(present)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Beside backward, on a stream of its own that has seen everything queued so far; without autocast, which would
        round what a backward inside it encodes."""
        device = self.context.communicators.device
        with without_modes(device.type):
            if self._side is None:
                yield
                return
            self._side.wait_stream(cuda.current_stream(device))
            with cuda.stream(self._side):
                yield

    def _join(self) -> None:
        """What follows on this stream sees what was done beside it."""
        if self._side is not None:
            cuda.current_stream(self.context.communicators.device).wait_stream(self._side)


@contextmanager
def without_modes(device_type: str) -> Iterator[None]:
    """As `optimizer.step()` is mostly called: outside autograd, autocast and inference mode, whatever surrounds us.

    State that is made for the first time inside inference mode could never be changed outside.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def density_at(step: int, target: float, warmup_steps: int) -> float:
    """The density of a step, counted from 1. In warm-up each stage has a quarter of the density before it, as in DGC.

    >>> [density_at(step, 0.01, 6) for step in (1, 2, 3, 4, 5, 6, 7)]
    [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01]
    """
    if step > warmup_steps or target >= WARMUP_DENSITY:
        return target
    stages = max(1, math.ceil(math.log(WARMUP_DENSITY / target, 4) - 1e-9))
    stage = (step - 1) * stages // warmup_steps
    return float(max(target, WARMUP_DENSITY / 4**stage))
