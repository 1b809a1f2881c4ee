"""Encoded groups: what a gradient leaves unsent stays in a residual and goes later.

A group is encoded when it leaves, in its turn, during backward. Two ways to deliver: without an optimizer handed over,
`.grad` is the decoded mean when backward ends; with one (`attach`), each group is decoded into memory that all groups
share and its parameters are updated as soon as it has arrived, so that beside weights, optimizer state and residuals
the device holds one group.

Ranks stay alike whatever happens: a group that has arrived is applied on every rank, even where the step turns out to
have failed on one. Without updates a failed step is undone instead: every rank takes back what it sent.

Exchanges of several collectives (a tree, low rank) go on at fixed points of the launch order, two launches later, and
the rest when backward has ended: so the order of collectives is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError
from backbeat.runtime import control
from backbeat.runtime.buckets import Bucket
from backbeat.runtime.decoupled import plainly
from backbeat.runtime.delivery import Delivery
from backbeat.runtime.encoded_bucket import EncodedBucket
from backbeat.runtime.encoded_groups import Stores, compressor_for, dtype_of, numel_of, sent_bytes, takes_rounds
from backbeat.runtime.rounds import Flight
from backbeat.runtime.updates import Updates, check_no_scaler
from backbeat.sparse import checkpoint
from backbeat.sparse.options import Options
from backbeat.sparse.residual import Scratch
from backbeat.sparse.warmup import density_at

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from backbeat.runtime.job import Job
    from backbeat.runtime.partition import GroupSpec, Partition
    from backbeat.sparse.exchange import Collective

FOLD_BYTES = 16 * 2**20
"""Gradients from this size on are added to the residual as they come; smaller ones with their group, in one go."""
LAG = 2
"""Launches after which an exchange of several collectives goes on."""

_cuda: Any = torch.cuda


class EncodedDelivery(Delivery):
    """Runs partitions of which some groups are encoded."""

    def __init__(self, job: Job, options: Options, *, host: bool = False) -> None:
        super().__init__(job)
        self.options = options
        self.updates = Updates()
        self._host = host
        self._carried: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Residuals, by name, of parameters that no encoded group has at present."""
        self._steps_before = 0
        self._scratch = Scratch()
        self._gathered = Scratch()
        """Where gradients of one group are collected; apart from the scratch, which another stream may be using."""
        self._numbers: torch.Tensor | None = None
        self._checked = False
        self._installed = False
        self._folds: bytearray = bytearray()
        self._folding = False
        device = job.channels.device
        self._side: Any = _cuda.Stream(device) if device.type == "cuda" else None
        # Where waiting means to wait on a stream, an exchange is queued whole when its group leaves.
        self._queues = self._side is not None and job.channels.backend == "nccl"

    @property
    def attached(self) -> bool:
        return bool(self.updates)

    @property
    def _encoded(self) -> Iterator[EncodedBucket]:
        return (bucket for bucket in self.job.groups.buckets if isinstance(bucket, EncodedBucket))

    def attach(self, optimizer: Optimizer) -> None:
        self.updates.add(optimizer, momentum_correction=self.options.momentum_correction)

    def prepare(self, partition: Partition) -> None:
        self._keep_residuals()
        self._scratch, self._gathered = Scratch(), Scratch()
        self._stores = Stores(
            partition,
            self.job,
            host=self._host,
            velocity=self._with_velocity(),
            masked=self.options.factor_masking,
        )

    def _with_velocity(self) -> bool:
        return self.options.momentum_correction and self.updates.have_momentum

    def bucket(self, spec: GroupSpec, tail: int) -> Bucket:
        if spec.encoding is None:
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
        self._installed = True
        for bucket in self._encoded:
            for place in bucket.members:
                found = self._carried.pop(self.job.names[place], None)
                if found is not None:
                    bucket.put(place, *found)
        early = not self._host and not self._with_velocity()
        self._folds = bytearray(len(self.job.parameters))
        for bucket in self._encoded:
            for place, parameter in zip(bucket.members, bucket.parameters, strict=True):
                size = parameter.numel() * parameter.element_size()
                self._folds[place] = early and size >= FOLD_BYTES
        self._folding = any(self._folds)

    @property
    def arrived(self) -> Callable[[int], None] | None:  # type: ignore[override]
        # Made anew each time: kept, it would keep the delivery alive.
        return self._arrived if self._folding else None

    def _arrived(self, place: int) -> None:
        bucket = self.job.groups.buckets[self.job.round.home[place]]
        # Where more of it may come, or its group has left, it is not the time.
        if (
            self._folds[place]
            and isinstance(bucket, EncodedBucket)
            and self.job.round.home[place] >= self.job.round.launched
        ):
            with torch.no_grad():
                bucket.fold(place)

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
        if group == len(self.job.groups.buckets) - 1:
            self._fold_late()
        if not isinstance(bucket, EncodedBucket):
            self._repay(bucket)
            with self._beside():
                self._go_on(group)
            flight = super().send(group, bucket, control)
        else:
            with self._beside():
                self._go_on(group)
                encoding = bucket.spec.encoding
                target = encoding.density if encoding is not None else None
                step = self.job.step + self._steps_before
                density = None if target is None else density_at(step, target, self.options.warmup_steps)
                self._post(group, bucket, bucket.begin(step=step, scale=self.job.scale, density=density))
            flight = Flight(group, bucket, bucket.payload, bucket.work)
        if not self.job.round.absent:
            self._collect(bucket if self._queues else None)
        return flight

    def sign(self, message: torch.Tensor) -> None:
        """Tell the others of a gradient that was not finite; `message` will hold the sums."""
        self._numbers = message
        found = [fault for bucket in self._encoded for fault in bucket.take_faults()]
        if found and not self.job.round.broken:
            sizes, numbers = (torch.cat([part.to(message) for part in parts]) for parts in zip(*found, strict=True))
            at = control.Layout(
                groups=len(self.job.groups.buckets), ranks=self.job.channels.size, parameters=0
            ).faults_at
            message[at + self.job.channels.rank] = torch.where(sizes.isfinite(), 0, numbers).amax()

    def received(self, flight: Flight) -> torch.Tensor:
        bucket = flight.bucket
        if not isinstance(bucket, EncodedBucket):
            return super().received(flight)
        with self._beside():
            while bucket.work is not None:
                self._step_on(flight.group, bucket)
            if not self.attached and not self.job.round.absent:
                bucket.decode()
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
        self._keep_residuals()
        held = {name: self._carried[name] for name in self.job.names if name in self._carried}
        residuals = {name: values for name, (values, _) in held.items()}
        velocities = {name: velocity for name, (_, velocity) in held.items() if velocity is not None}
        for bucket in self._encoded:
            for place in bucket.members:
                self._carried.pop(self.job.names[place], None)
        channels = self.job.channels
        step = self.job.step + self._steps_before
        return checkpoint.state_of(residuals, velocities, rank=channels.rank, ranks=channels.size, step=step)

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's residuals."""
        job = self.job
        checkpoint.check(state, {name: tuple(p.shape) for name, p in zip(job.names, job.parameters, strict=True)})
        self._join()
        with torch.no_grad():
            for bucket in self._encoded:
                residual = bucket.store.open()
                residual.values.zero_()
                if residual.velocity is not None:
                    residual.velocity.zero_()
                bucket.store.close()
                bucket.touched = bytearray(len(bucket.members))
                bucket.frozen = {}
            device = job.channels.device
            self._carried = {
                name: (values.to(device), _moved(state["velocities"].get(name), device))
                for name, values in state["residuals"].items()
            }
            self._steps_before = int(state["step"]) - job.step
            self.installed()

    def _keep_residuals(self) -> None:
        """Take copies of every residual out of the groups, by name."""
        if not self._installed:
            return
        self._join()
        with torch.no_grad():
            for bucket in self._encoded:
                values, velocities = bucket.held()
                for position, place in enumerate(bucket.members):
                    if bucket.touched[position] or position in bucket.frozen:
                        velocity = velocities[position] if velocities else None
                        self._carried[self.job.names[place]] = (values[position], velocity)

    def _repay(self, bucket: Bucket) -> None:
        """What a member owes from a plan that encoded it goes with its first dense gradient."""
        if not self._carried or self.job.round.absent or self.job.round.broken or not bucket.views:
            return
        for place, view in zip(bucket.members, bucket.views, strict=True):
            if self.job.round.dirty[place]:
                found = self._carried.pop(self.job.names[place], None)
                if found is not None:
                    view.add_(found[0].to(view))

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
                bucket._folded.clear()
            round_.late.discard(place)
            self.job.parameters[place].grad = None

    def _post(self, group: int, bucket: EncodedBucket, wanted: Collective) -> None:
        channel = self.job.channel(bucket.spec.channel)
        message = wanted.message
        if wanted.kind == "all_reduce":
            bucket.result, bucket.work = message, channel.all_reduce(message)
        elif wanted.kind == "all_gather":
            bucket.result = message.new_empty(message.numel() * self.job.channels.size)
            bucket.work = channel.all_gather(bucket.result, message)
        else:
            bucket.result = torch.empty_like(message)
            bucket.work = channel.swap(bucket.result, message, wanted.peer)
        bucket.sent_at = group

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
        for index, bucket in enumerate(self.job.groups.buckets[:group]):
            waits = isinstance(bucket, EncodedBucket) and bucket.work is not None and _many(bucket)
            if isinstance(bucket, EncodedBucket) and waits and group - bucket.sent_at >= LAG:
                self._step_on(index, bucket)
                bucket.sent_at = group

    def _collect(self, queued: Bucket | None) -> None:
        """Deal with groups that have arrived while backward goes on. Only where this rank saw every member's gradient:
        then some rank used each of them, which is all that an update must know."""
        for index, bucket in enumerate(self.job.groups.buckets[: self.job.round.launched + 1]):
            if not isinstance(bucket, EncodedBucket) or not bucket.whole or bucket.work is None or _many(bucket):
                continue
            if bucket is not queued and not (not self._queues and bucket.work.is_completed()):
                continue
            with self._beside():
                self._step_on(index, bucket)
                if self.attached:
                    self._apply(bucket, None)
                else:
                    bucket.decode()

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
            self.updates.apply(present, without_momentum=False)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Beside backward, on a stream of its own that has seen everything queued so far; without autocast, which would
        round what a backward inside it encodes."""
        device = self.job.channels.device
        with plainly(device.type):
            if self._side is None:
                yield
                return
            self._side.wait_stream(_cuda.current_stream(device))
            with _cuda.stream(self._side):
                yield

    def _join(self) -> None:
        """What follows on this stream sees what was done beside it."""
        if self._side is not None:
            _cuda.current_stream(self.job.channels.device).wait_stream(self._side)


def _many(bucket: EncodedBucket) -> bool:
    encoding = bucket.spec.encoding
    return encoding is not None and takes_rounds(encoding)


def _moved(values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if values is None else values.to(device)
