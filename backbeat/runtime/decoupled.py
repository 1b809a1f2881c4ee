"""Decoupled all-reduce: groups are reduce-scattered behind backward and all-gathered behind the next forward.

When backward ends every gather is already queued behind the scatters, in the order of the next forward, on every rank;
from then on ranks only wait. So whichever rank looks at a weight first, at whatever point, alone or with the others,
its wait ends: no rank must do anything for it. Collectives follow each other in one order everywhere: the scatters of a
step, what came late, the gathers of that step.

A gather brings reduced gradients, not weights, and each rank updates all of them with the user's own optimizer, so that
weights are those of ordinary training. `step()` notes the hyperparameters of its moment; the update itself happens when
the parameter is first needed (`pending.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError
from backbeat.runtime import pending
from backbeat.runtime.delivery import Delivery
from backbeat.runtime.faults import CommunicationError, first_line
from backbeat.runtime.shards import Gather, ShardedBucket, gathers_of
from backbeat.units import format_bytes

if TYPE_CHECKING:
    from backbeat.runtime import control
    from backbeat.runtime.buckets import Bucket
    from backbeat.runtime.handover import Update
    from backbeat.runtime.job import Job
    from backbeat.runtime.partition import GroupSpec, Partition

CONTROL_BYTES = 2**18
"""Control numbers ride with the last scatter, a copy for each rank, up to this size; beyond they travel alone."""

_deliveries: weakref.WeakSet[DecoupledDelivery] = weakref.WeakSet()


class Arrival:
    """One gather on its way, and what to do when it is there."""

    def __init__(self, delivery: DecoupledDelivery, gather: Gather, used: list[int], work: Any, whole: Any) -> None:
        self._delivery = delivery
        self._gather = gather
        self._work = work
        self._whole = whole
        self._used = used
        """Members whose gradient it brings: those that some rank used."""
        self.dropped: set[int] = set()
        """Parameters, by id, whose gradient the user has let go of."""
        self.updates: list[Update] = []
        """Taken by the user's `step()`, due before the parameter is read."""
        self.noted: set[int] = set()
        """Parameters of these updates, by id."""
        self.landed = False

    def note(self, update: Update, parameters: list[Any]) -> None:
        """`step()` was called: update these when the gradients are there."""
        self.updates.append(update)
        self.noted.update(id(parameter) for parameter in parameters)

    def watch(self) -> None:
        for parameter in self._parameters():
            pending.watch(parameter, self)

    def land(self) -> None:
        """Wait, hand the gradients out, apply the updates that are due."""
        with self._delivery.lock:
            if self.landed:
                return
            self.landed = True
            parameters = self._parameters()
            for parameter in parameters:
                if pending.arrival_of(parameter) is self:
                    pending.unwatch(parameter)
            self._delivery.arrivals.remove(self)
            with plainly(self._delivery.job.channels.device.type):
                self.wait()
                self._gather.unpack(self._whole)
                try:
                    self._hand_out(parameters)
                except RuntimeError as error:
                    self._delivery.job.check_format(error)
                    raise

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._delivery.failure(self._gather, error) from error

    def _parameters(self) -> list[Any]:
        return [self._delivery.job.parameters[place] for place in self._used]

    def _hand_out(self, parameters: list[Any]) -> None:
        # A backward that the wrapper did not see coming may have left a gradient of its own already.
        newer = [parameter.grad for parameter in parameters]
        views = self._delivery.job.groups.views
        for place, parameter in zip(self._used, parameters, strict=True):
            parameter.grad = views[place]
        for update in self.updates:
            update.apply()
        for parameter, gradient in zip(parameters, newer, strict=True):
            if id(parameter) in self.dropped:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)


class DecoupledDelivery(Delivery):
    """Groups are scattered, and gathered in another grouping."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.arrivals: list[Arrival] = []
        self.attached = False
        """Some optimizer has been handed over."""
        self.lock = threading.RLock()
        _deliveries.add(self)

    def prepare(self, partition: Partition) -> None:
        self.finish()
        self._gather_of = [-1] * len(self.job.parameters)
        for index, places in enumerate(partition.gathers or ()):
            for place in places:
                self._gather_of[place] = index

    def bucket(self, spec: GroupSpec, tail: int) -> Bucket:
        if spec.sparse:
            return super().bucket(spec, tail)
        ranks = self.job.channels.size
        rides = tail * ranks * 4 <= CONTROL_BYTES
        return ShardedBucket(
            spec,
            self.job.parameters,
            gather_of=self._gather_of,
            rank=self.job.channels.rank,
            ranks=ranks,
            wire=self.job.wire,
            tail=tail if rides else 0,
        )

    def installed(self) -> None:
        groups = self.job.groups
        self.gathers = gathers_of(groups.partition.gathers or (), groups.buckets, self.job.channels.size)

    def opens(self) -> None:
        if not self.attached:
            raise InputError(
                f"the plan ({self.job.groups.partition.strategy}) gathers gradients behind the next forward, and "
                "updates follow: call model.attach(optimizer) before the first backward, or run a plan without phases"
            )
        self.finish()

    def hand_back(self, verdict: control.Verdict | None) -> None:
        """Queue every gather; gradients that nobody used are what they were."""
        if self.job.round.absent:
            self._gather_all(self._none)
            return
        backups = self.job.round.backups
        for bucket in self.job.groups.buckets:
            if bucket.sparse:
                bucket.hand_back(None if verdict is None else verdict.used, backups)
            elif verdict is not None:
                for place, parameter in zip(bucket.members, bucket.parameters, strict=True):
                    if not verdict.used[place]:
                        parameter.grad = backups.get(place)
        self._gather_all(None if verdict is None else verdict.used)

    def give_up(self) -> None:
        """The other ranks may learn of it only later, and have queued their gathers."""
        for bucket in self.job.groups.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.void()
        self._gather_all(self._none)

    def finish(self) -> None:
        """Wait for every gather and apply every update that is due."""
        for arrival in tuple(self.arrivals):
            arrival.land()

    def check_hook(self) -> None:
        raise InputError(
            "a communication hook reduces whole groups, and a decoupled plan scatters and gathers them: leave the hook "
            "out (wire='bf16' or 'fp16' compresses), or run a plan without phases"
        )

    @property
    def _none(self) -> list[bool]:
        return [False] * len(self.job.parameters)

    def _gather_all(self, used: Sequence[bool] | None) -> None:
        channel = self.job.channel(self.job.groups.buckets[0].spec.channel)
        launched = []
        recorder = self.job.recorder
        for index, gather in enumerate(self.gathers):
            work, whole = gather.launch(channel)
            if recorder is not None:
                recorder.gathered(index, work)
            brought = [place for place in gather.members if used is None or used[place]]
            arrival = Arrival(self, gather, brought, work, whole)
            self.arrivals.append(arrival)
            launched.append(arrival)
        for arrival, gather in zip(launched, self.gathers, strict=True):
            if all(pending.can_wait(self.job.parameters[place]) for place in gather.members):
                arrival.watch()
            else:
                arrival.land()

    def failure(self, gather: Gather, error: BaseException) -> CommunicationError:
        """A gather did not come."""
        job = self.job
        if job.fault is not None:
            return job.fault
        return CommunicationError(
            f"rank {job.channels.rank}: the gradients of {job.listed(gather.members)} ({format_bytes(gather.bytes)}) "
            f"were not gathered after step {job.step}: {job.monitor.blame()}. Restart from the last checkpoint (the "
            f"library says: {first_line(error)})"
        )


@contextlib.contextmanager
def plainly(device_type: str) -> Iterator[None]:
    """As `optimizer.step()` is mostly called: outside autograd, autocast and inference mode, whatever surrounds us.

    State that is made for the first time inside inference mode could never be changed outside.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@atexit.register
def _stay_for_the_others() -> None:
    """A rank that ends first must not take its parts of gathers along that other ranks still wait for."""
    for delivery in tuple(_deliveries):
        device = delivery.job.channels.device
        with contextlib.suppress(Exception):
            for arrival in tuple(delivery.arrivals):
                arrival._work.wait()
            if delivery.arrivals and device.type == "cuda":
                torch.cuda.synchronize(device)
