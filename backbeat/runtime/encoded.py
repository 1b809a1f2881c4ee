"""Encoded groups: what a gradient leaves unsent stays in a residual and goes later.

A group is encoded when it leaves, in its turn, during backward. Two ways to deliver: without an optimizer handed over,
`.grad` is the decoded mean when backward ends; with one (`attach`), each group is decoded into memory that all groups
share and its parameters are updated as soon as it has arrived, so that beside weights, optimizer state and residuals
the device holds one group.

Ranks stay alike whatever happens: a group that has arrived is applied on every rank, even where the step turns out to
have failed on one. Without updates a failed step is undone instead: every rank takes back what it sent.

On a GPU a group that is complete is handed to another thread (`courier`), which selects and packs it while this one
goes on with backward. Its collective starts a few gradients later, from this thread: so its place among all
collectives, those of a model that synchronises batch norms included, is the same on every rank. Updates stay here, too:
only backward's own thread knows what else becomes of `.grad`. Whatever must not happen beside that begins with
`_settle`.

Exchanges of several collectives (a tree, low rank) go on at fixed points of the launch order, two launches later, and
the rest when backward has ended: so the order of collectives is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistError

from backbeat.errors import InputError
from backbeat.runtime import control
from backbeat.runtime.buckets import Bucket
from backbeat.runtime.courier import KINDS, Courier
from backbeat.runtime.decoupled import plainly
from backbeat.runtime.delivery import Delivery
from backbeat.runtime.encoded_bucket import EncodedBucket
from backbeat.runtime.encoded_carry import Carried
from backbeat.runtime.encoded_groups import Stores, compressor_for, dtype_of, numel_of, sent_bytes, takes_rounds
from backbeat.runtime.rounds import Flight
from backbeat.runtime.updates import Updates, check_no_scaler
from backbeat.sparse.options import Options
from backbeat.sparse.residual import Scratch
from backbeat.sparse.warmup import density_at

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from backbeat.runtime.job import Job
    from backbeat.runtime.partition import GroupSpec, Partition
    from backbeat.sparse.exchange import Collective

PATIENCE = 8
"""Gradients that arrive before the collective of a group that another thread encodes is started."""
LAG = 2
"""Launches after which an exchange of several collectives goes on."""

_cuda: Any = torch.cuda
_profiling = torch._C._autograd._profiler_enabled


class EncodedDelivery(Delivery):
    """Runs partitions of which some groups are encoded."""

    def __init__(self, job: Job, options: Options, *, host: bool = False) -> None:
        super().__init__(job)
        self.options = options
        self.updates = Updates()
        self._host = host
        self._carried = Carried(job)
        self._scratch = Scratch()
        self._gathered = Scratch()
        """Where gradients of one group are widened; apart from the scratch, which another stream may be using."""
        self._encoded: list[EncodedBucket] = []
        self._takes_rounds = False
        self._places: tuple[list[int], torch.Tensor] | None = None
        """The places of gradients that were looked at in the step before, and their numbers on the device."""
        self._numbers: torch.Tensor | None = None
        self._checked = False
        device = job.channels.device
        self._side: Any = _cuda.Stream(device) if device.type == "cuda" else None
        # Where waiting means to wait on a stream, an exchange is queued whole when its group leaves.
        self._queues = self._side is not None and job.channels.backend == "nccl"
        # Buffers that groups take in turns, as residuals on the host do, belong to one thread.
        self._courier = Courier(device) if device.type in KINDS and not host else None
        self._apart: tuple[Flight, EncodedBucket] | None = None
        """The group that the courier has."""
        self._patience = 0

    @property
    def attached(self) -> bool:
        return bool(self.updates)

    def attach(self, optimizer: Optimizer) -> None:
        self.updates.add(optimizer, momentum_correction=self.options.momentum_correction, check_step=self._check_step)

    def _check_step(self) -> None:
        """Gradients of a backward under `no_sync` wait for one that synchronises; this rank alone must not use them."""
        dirty = self.job.round.dirty
        if 1 in dirty and any(dirty[place] and p.grad is not None for place, p in enumerate(self.job.parameters)):
            raise InputError(
                "step() after a backward under no_sync: the gradients are this rank's own, and replicas would part. "
                "Call it after a synchronised backward, which applies them on every rank, or drop them with zero_grad()"
            )

    def prepare(self, partition: Partition) -> None:
        self._settle()
        # Refuses what cannot be, while the groups there are go on as they were.
        self._stores = Stores(
            partition,
            self.job,
            host=self._host,
            velocity=self._with_velocity(),
            masked=self.options.factor_masking,
        )
        self._join()
        self._carried.take_out(self._encoded)
        self._scratch, self._gathered = Scratch(), Scratch()

    def _with_velocity(self) -> bool:
        return self.options.momentum_correction and self.updates.have_momentum

    def bucket(self, spec: GroupSpec, tail: int) -> Bucket:
        if spec.encoding is None or not numel_of(spec, self.job):
            # The control numbers of encoded plans need fp32 and travel alone.
            return super().bucket(spec, 0)
        job = self.job
        compressor = compressor_for(spec, spec.encoding, job, self.options.seed)
        dtype = dtype_of(spec, job)
        self._scratch.want(numel_of(spec, job), dtype)
        velocity = self._with_velocity() and compressor.masks_velocity
        return EncodedBucket(
            spec,
            job.parameters,
            compressor=compressor,
            store=self._stores.of(spec, velocity=velocity),
            dtype=dtype,
            sent_bytes=sent_bytes(spec.encoding, [tuple(job.parameters[place].shape) for place in spec.members]),
            dense=not self.attached,
            momentum_of=self.updates.momentum_of if velocity else None,
            gathering=self._gathered,
        )

    def installed(self) -> None:
        self._encoded = [bucket for bucket in self.job.groups.buckets if isinstance(bucket, EncodedBucket)]
        self._takes_rounds = any(_many(bucket) for bucket in self._encoded)
        self._carried.bring_back(self._encoded)

    def opens(self) -> None:
        if not self._checked:
            check_no_scaler()
            self._checked = True
        if self.attached:
            self.updates.check(self.job.names, self.job.parameters)
        elif self.options.momentum_correction:
            raise InputError(
                "momentum_correction keeps the optimizer's momentum in its place: hand the optimizer over with "
                "model.attach(optimizer) before the first backward, or leave it out"
            )

    def carries(self, bucket: Bucket) -> bool:
        return False

    def send(self, group: int, bucket: Bucket, control: torch.Tensor | None) -> Flight:
        self._settle()
        round_ = self.job.round
        last = group == len(self.job.groups.buckets) - 1
        if isinstance(bucket, EncodedBucket) and not last and self._may_leave_apart(bucket):
            return self._hand_over(group, bucket)
        if round_.late and last:
            self._fold_late()
        if not isinstance(bucket, EncodedBucket):
            if not (round_.absent or round_.broken):
                self._carried.repay(bucket, round_.dirty)
            if self._takes_rounds:
                with self._beside():
                    self._go_on(group)
            flight = super().send(group, bucket, control)
            self._collect()
            return flight
        with self._beside():
            self._go_on(group)
            flight = Flight(group, bucket, bucket.payload, self._post(group, bucket, self._begin(bucket)))
            if self._queues and self._courier is None and self._may_deliver(bucket):
                self._step_on(group, bucket)
                self._use(bucket)
        self._collect(group)
        return flight

    def _begin(self, bucket: EncodedBucket) -> Collective:
        encoding = bucket.spec.encoding
        target = encoding.density if encoding is not None else None
        step = self._carried.step
        density = None if target is None else density_at(step, target, self.options.warmup_steps)
        return bucket.begin(step=step, scale=self.job.scale, density=density)

    def _may_leave_apart(self, bucket: EncodedBucket) -> bool:
        """Not where somebody takes times, which are those of this thread."""
        if self._courier is None or self._takes_rounds or self.job.recorder is not None or _profiling():
            return False
        return self._may_deliver(bucket)

    def _hand_over(self, group: int, bucket: EncodedBucket) -> Flight:
        assert self._courier is not None
        flight = Flight(group, bucket, bucket.payload, None)
        ready = None if self._side is None else _cuda.current_stream(self.job.channels.device).record_event()

        def encode() -> None:
            with self._beside(ready):
                bucket.wanted = self._begin(bucket)

        self._courier.take(encode)
        self._apart = (flight, bucket)
        # The next gradients take the long way, where they are counted.
        self._patience = PATIENCE
        self.arrived = self._tick
        self.job.round.slow = True
        return flight

    def _tick(self, place: int) -> None:
        self._patience -= 1
        if self._patience <= 0:
            self._settle()

    def _settle(self) -> None:
        """Send the group that the courier has. If encoding failed, it has not left."""
        if self._courier is None or self._apart is None:
            return
        flight, bucket = self._apart
        round_ = self.job.round
        self._apart = self.arrived = None
        round_.slow = round_.hold or self.job.recorder is not None
        try:
            self._courier.settle()
            wanted, bucket.wanted = bucket.wanted, None
            assert wanted is not None
            with self._beside():
                flight.work = self._post(flight.group, bucket, wanted)
        except BaseException as error:
            round_.launched = flight.group
            del round_.flights[flight.group :]
            if isinstance(error, DistError):
                raise self.job.failure(flight.group, error) from error
            raise
        self._collect(flight.group)

    def await_ends(self) -> None:
        self._settle()
        super().await_ends()

    def sign(self, message: torch.Tensor) -> None:
        """Tell the others of a gradient that was not finite; `message` will hold the sums."""
        self._numbers = message
        sizes: list[torch.Tensor] = []
        places: list[int] = []
        for bucket in self._encoded:
            found, whose = bucket.take_sizes()
            sizes += found
            places += whose
        if not sizes or self.job.round.broken:
            return
        if self._places is None or self._places[0] != places:
            numbers = torch.tensor([float(place + 1) for place in places], device=message.device)
            self._places = (places, numbers.to(message.dtype))
        layout = control.Layout(groups=len(self.job.groups.buckets), ranks=self.job.channels.size, parameters=0)
        # NaN is not below infinity either.
        fine = torch.stack(sizes).to(message.device) < math.inf
        message[layout.faults_at + self.job.channels.rank].copy_(self._places[1].masked_fill(fine, 0).amax())

    def received(self, flight: Flight) -> torch.Tensor:
        self._settle()
        bucket = flight.bucket
        if not isinstance(bucket, EncodedBucket):
            return super().received(flight)
        decodes = not self.attached and not self.job.round.absent
        if bucket.work is not None or (decodes and bucket.write is not None):
            with self._beside():
                while bucket.work is not None:
                    self._step_on(flight.group, bucket)
                if decodes:
                    bucket.decode()
        if bucket is self._encoded[-1]:
            # The guard that stands for a word read late acts on what is decoded.
            self._join()
        return flight.message

    def hand_back(self, verdict: control.Verdict | None) -> None:
        used = None if verdict is None else verdict.used
        with self._beside():
            for bucket in self._encoded:
                if self.job.round.absent:
                    bucket.write = None
                elif self.attached:
                    self._apply(bucket, used)
                if self.attached:
                    bucket.compressor.forget()
        self._join()
        if self.job.round.absent:
            return
        backups = self.job.round.backups
        for one in self.job.groups.buckets:
            if not (self.attached and one.encoded):
                one.hand_back(used, backups)
                if self.attached:
                    self._update_dense(one, used)
            elif used is not None:
                for place, parameter in zip(one.members, one.parameters, strict=True):
                    if not used[place]:
                        parameter.grad = backups.get(place)

    def give_up(self) -> None:
        """The step failed: finish the updates, which other ranks have begun, or take back what was sent."""
        used: Sequence[bool] | None = None
        if self.attached and self._numbers is not None and any(bucket.write is not None for bucket in self._encoded):
            groups, ranks = len(self.job.groups.buckets), self.job.channels.size
            layout = control.Layout(groups=groups, ranks=ranks, parameters=len(self.job.parameters), faults=ranks)
            used = control.read(layout, self._numbers.cpu()).used
        with self._beside():
            for bucket in self._encoded:
                if self.attached and not self.job.round.absent:
                    self._apply(bucket, used)
                else:
                    bucket.give_back()
        self._join()

    def undo(self) -> None:
        if not self.attached:
            with torch.no_grad():
                for bucket in self._encoded:
                    bucket.give_back()

    def check_hook(self) -> None:
        raise InputError(
            "a communication hook reduces whole groups, and this plan encodes some of them: leave the hook out, or run "
            "a plan without encodings"
        )

    def state(self) -> dict[str, Any]:
        """This rank's residuals by name."""
        self._settle()
        self._join()
        return self._carried.state(self._encoded)

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's residuals."""
        self._settle()
        self._join()
        self._carried.load(state, self._encoded)

    def _fold_late(self) -> None:
        """A gradient that its group left without waits in the residual for the next step."""
        round_ = self.job.round
        late = [place for place in round_.late if self.job.groups.buckets[round_.home[place]].encoded]
        if late:
            self._join()
        for place in late:
            bucket = self.job.groups.buckets[round_.home[place]]
            if isinstance(bucket, EncodedBucket) and not (round_.absent or round_.broken):
                bucket.fold(place)
            round_.late.discard(place)
            self.job.parameters[place].grad = None

    def _post(self, group: int, bucket: EncodedBucket, wanted: Collective) -> Any:
        channel = self.job.channel(bucket.spec.channel)
        message = wanted.message
        if wanted.kind == "all_reduce":
            result, work = message, channel.all_reduce(message)
        elif wanted.kind == "all_gather":
            result = message.new_empty(message.numel() * self.job.channels.size)
            work = channel.all_gather(result, message)
        else:
            result = torch.empty_like(message)
            work = channel.swap(result, message, wanted.peer)
        bucket.sent_at = group
        bucket.result, bucket.work = result, work
        return work

    def _step_on(self, group: int, bucket: EncodedBucket) -> None:
        """Wait for the collective under way, and start what follows it."""
        try:
            bucket.work.wait()
        except RuntimeError as error:
            raise self.job.failure(group, error) from error
        following = bucket.proceed()
        if following is not None:
            self._post(bucket.sent_at, bucket, following)

    def _go_on(self, group: int) -> None:
        if not self._takes_rounds:
            return
        for index, bucket in enumerate(self.job.groups.buckets[:group]):
            waits = isinstance(bucket, EncodedBucket) and bucket.work is not None and _many(bucket)
            if isinstance(bucket, EncodedBucket) and waits and group - bucket.sent_at >= LAG:
                self._step_on(index, bucket)
                bucket.sent_at = group

    def _may_deliver(self, bucket: EncodedBucket) -> bool:
        """Only where this rank saw every member's gradient may a group be dealt with while backward goes on: then some
        rank used each of them, which is all that an update must know. A gradient that came late is in `.grad`, which
        an update would take for its own."""
        round_ = self.job.round
        if not bucket.whole or round_.absent or _many(bucket):
            return False
        return not round_.late or round_.late.isdisjoint(bucket.members)

    def _use(self, bucket: EncodedBucket) -> None:
        if self.attached:
            self._apply(bucket, None)
        else:
            bucket.decode()

    def _collect(self, but: int = -1) -> None:
        """Deal with groups that have arrived, where the host is told of it. Where waiting is queued, with all but the
        one that just left: what follows on this stream would wait for it."""
        if self._queues and self._courier is None:
            return
        for index, bucket in enumerate(self.job.groups.buckets[: self.job.round.launched + 1]):
            if not isinstance(bucket, EncodedBucket) or bucket.work is None or not self._may_deliver(bucket):
                continue
            if index != but if self._queues else bucket.work.is_completed():
                with self._beside():
                    self._step_on(index, bucket)
                    self._use(bucket)

    def _apply(self, bucket: EncodedBucket, used: Sequence[bool] | None) -> None:
        if bucket.write is None:
            return
        parameters = bucket.expose(self._scratch.lend(bucket.dtype, bucket.device), used)
        if parameters:
            corrected = self.options.momentum_correction and bucket.compressor.masks_velocity
            self.updates.apply(parameters, without_momentum=corrected)

    def _update_dense(self, bucket: Bucket, used: Sequence[bool] | None) -> None:
        present = [
            parameter
            for place, parameter in zip(bucket.members, bucket.parameters, strict=True)
            if parameter.grad is not None and (used is None or used[place])
        ]
        if present:
            with plainly(bucket.device.type):
                self.updates.apply(present, without_momentum=False)

    @contextmanager
    def _beside(self, ready: Any = None) -> Iterator[None]:
        """Beside backward, on a stream of its own that has seen everything queued so far, or what was queued at an
        event; without autocast, which would round what a backward inside it encodes."""
        device = self.job.channels.device
        with plainly(device.type):
            if self._side is None:
                yield
                return
            if ready is None:
                self._side.wait_stream(_cuda.current_stream(device))
            else:
                self._side.wait_event(ready)
            with _cuda.stream(self._side):
                yield

    def _join(self) -> None:
        """What follows on this stream sees what was done beside it."""
        if self._side is not None:
            _cuda.current_stream(self.job.channels.device).wait_stream(self._side)


def _many(bucket: EncodedBucket) -> bool:
    encoding = bucket.spec.encoding
    return encoding is not None and takes_rounds(encoding)
