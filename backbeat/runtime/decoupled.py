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
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError
from backbeat.runtime import pending
from backbeat.runtime.faults import CommunicationError, first_line
from backbeat.runtime.reducer import Flight, Reducer
from backbeat.runtime.shards import Gather, ShardedBucket, gathers_of
from backbeat.units import format_bytes

if TYPE_CHECKING:
    from backbeat.runtime import control
    from backbeat.runtime.buckets import Bucket
    from backbeat.runtime.handover import Update
    from backbeat.runtime.partition import GroupSpec, Partition

CONTROL_BYTES = 2**18
"""Control numbers ride with the last scatter, a copy for each rank, up to this size; beyond they travel alone."""

_reducers: weakref.WeakSet[DecoupledReducer] = weakref.WeakSet()


class Arrival:
    """One gather on its way, and what to do when it is there."""

    def __init__(self, reducer: DecoupledReducer, gather: Gather, used: list[int], work: Any, whole: Any) -> None:
        self._reducer = reducer
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
        for place in self._used:
            pending.watch(self._reducer.parameters[place], self)

    def land(self) -> None:
        """Wait, hand the gradients out, apply the updates that are due."""
        with self._reducer._lock:
            if self.landed:
                return
            self.landed = True
            parameters = [self._reducer.parameters[place] for place in self._used]
            for parameter in parameters:
                if pending.arrival_of(parameter) is self:
                    pending.unwatch(parameter)
            self._reducer._arrivals.remove(self)
            with plainly(self._reducer.channels.device.type):
                self.wait()
                self._gather.unpack(self._whole)
                self._hand_out(parameters)

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._reducer._gather_failure(self._gather, error) from error

    def _hand_out(self, parameters: list[Any]) -> None:
        # A backward that the wrapper did not see coming may have left a gradient of its own already.
        newer = [parameter.grad for parameter in parameters]
        for place, parameter in zip(self._used, parameters, strict=True):
            parameter.grad = self._reducer._view[place]
        for update in self.updates:
            update.apply()
        for parameter, gradient in zip(parameters, newer, strict=True):
            if id(parameter) in self.dropped:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)


class DecoupledReducer(Reducer):
    """Runs a partition whose groups are scattered, and gathered in another grouping."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arrivals: list[Arrival] = []
        self.attached = False
        """Some optimizer has been handed over."""
        super().__init__(*args, **kwargs)
        _reducers.add(self)

    def install(self, partition: Partition) -> None:
        self.finish()
        members = partition.gathers or ()
        self._gather_of = [-1] * len(self.parameters)
        for index, places in enumerate(members):
            for place in places:
                self._gather_of[place] = index
        super().install(partition)
        self.gathers = gathers_of(members, self.buckets, self.channels.size)

    def finish(self) -> None:
        """Wait for every gather and apply every update that is due."""
        for arrival in tuple(self._arrivals):
            arrival.land()

    def remove_hooks(self) -> None:
        self.finish()
        super().remove_hooks()

    def set_comm_hook(self, state: Any, hook: Any) -> None:
        raise InputError(
            "a communication hook reduces whole groups, and a decoupled plan scatters and gathers them: leave the hook "
            "out (wire='bf16' or 'fp16' compresses), or run a plan without phases"
        )

    def shadow(self) -> None:
        self.finish()
        super().shadow()

    def _bucket(self, spec: GroupSpec, tail: int) -> Bucket:
        ranks = self.channels.size
        rides = tail * ranks * 4 <= CONTROL_BYTES
        return ShardedBucket(
            spec,
            self.parameters,
            gather_of=self._gather_of,
            rank=self.channels.rank,
            ranks=ranks,
            wire=self.wire,
            tail=tail if rides else 0,
        )

    def _begin(self, sync: bool) -> None:
        if not self.attached:
            raise InputError(
                f"the plan ({self.partition.strategy}) gathers gradients behind the next forward, and updates follow: "
                "call model.attach(optimizer) before the first backward, or run a plan without phases"
            )
        self.finish()
        super()._begin(sync)

    def _rides(self, bucket: Bucket) -> bool:
        return bucket.tail > 0 and not bucket.sparse

    def _send(self, index: int, bucket: Bucket, last: bool) -> Flight:
        if not isinstance(bucket, ShardedBucket):
            raise CommunicationError(f"group {index} has no shards: the partition is not decoupled")
        whole = bucket.message(self.scale, self._control() if last and self._rides(bucket) else None)
        return Flight(index, bucket, bucket.shard, self._channel(bucket).reduce_scatter(bucket.shard, whole))

    def _read(self, numbers: torch.Tensor) -> control.Verdict | None:
        try:
            return super()._read(numbers)
        except BaseException:
            # The other ranks may learn of it only later, and have queued theirs.
            self._gather_all(lambda place: False)
            raise

    def _reduce_again(self, verdict: control.Verdict) -> None:
        for index in verdict.late:
            bucket = self.buckets[index]
            if not isinstance(bucket, ShardedBucket):
                continue
            self.repeats += 1
            message = bucket.late_message(self._late, self.scale)
            work = self._channel(bucket).all_reduce(message)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(Flight(index, bucket, message, work), error) from error
            for place, count in zip(bucket.members, bucket.add_late(message), strict=True):
                if count > 0:
                    verdict.used[place] = True

    def _hand_back(self, verdict: control.Verdict | None) -> None:
        """Queue every gather; gradients that nobody used are what they were."""
        if self._absent:
            self._gather_all(lambda place: False)
            return
        used: Callable[[int], bool] = (lambda place: True) if verdict is None else verdict.used.__getitem__
        for bucket in self.buckets:
            for place, parameter in zip(bucket.members, bucket.parameters, strict=True):
                if not used(place):
                    parameter.grad = self._backups.get(place)
        self._gather_all(used)

    def _gather_all(self, used: Callable[[int], bool]) -> None:
        channel = self._channel(self.buckets[0])
        launched = []
        for gather in self.gathers:
            work, whole = gather.launch(channel)
            arrival = Arrival(self, gather, [place for place in gather.members if used(place)], work, whole)
            self._arrivals.append(arrival)
            launched.append(arrival)
        for arrival, gather in zip(launched, self.gathers, strict=True):
            if all(pending.can_wait(self.parameters[place]) for place in gather.members):
                arrival.watch()
            else:
                arrival.land()

    def _break_off(self) -> None:
        synced = self._sync
        super()._break_off()
        if synced:
            with torch.no_grad():
                self._gather_all(lambda place: False)
            self.finish()

    def _gather_failure(self, gather: Gather, error: BaseException) -> CommunicationError:
        names = [self.names[place] for place in gather.members]
        listed = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return CommunicationError(
            f"rank {self.channels.rank}: the gradients of {listed} ({format_bytes(gather.bytes)}) were not gathered "
            f"after step {self.step}: {self.monitor.blame()}. Restart from the last checkpoint (the library says: "
            f"{first_line(error)})"
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
    for reducer in tuple(_reducers):
        with contextlib.suppress(Exception):
            for arrival in tuple(reducer._arrivals):
                arrival._work.wait()
            if reducer._arrivals and reducer.channels.device.type == "cuda":
                torch.cuda.synchronize(reducer.channels.device)
