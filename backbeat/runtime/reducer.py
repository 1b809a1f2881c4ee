"""The reducer: watches gradients arrive and sends the groups of the plan, in its order, while backward still runs.

One backward is one *round*. It opens when autograd reaches an output of the wrapper (or, for a loss that does not pass
through one, the first gradient), and closes in a callback that the engine runs when the graph is done, so that whatever
follows `backward()` sees reduced gradients. If autograd raises, the engine drops that callback unrun; the round is then
known to be broken because the callback object is gone, and the next forward tells the other ranks.

At the end of a round, for each parameter that any rank used since the last one, `.grad` is the mean over ranks of what
each held. All rules follow from that: accumulation, `no_sync`, several backwards of one forward, or one of several.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from backbeat.errors import BackbeatError
from backbeat.runtime import control, deferral
from backbeat.runtime.buckets import Bucket, sparse_message
from backbeat.runtime.deferral import Deferral
from backbeat.runtime.expectation import Expectation
from backbeat.runtime.faults import CommunicationError, Monitor, Status, first_line
from backbeat.runtime.hooks import GradBucket, Hook, result_of
from backbeat.runtime.ownership import claim, release
from backbeat.runtime.streams import Streams
from backbeat.units import format_bytes

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.runtime.channels import Channels
    from backbeat.runtime.partition import GroupSpec, Partition
    from backbeat.runtime.timing import Recorder

logger = logging.getLogger("backbeat.runtime")

_profiling = torch._C._autograd._profiler_enabled
_nothing = nullcontext()
_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class Flight(NamedTuple):
    """A group on its way."""

    group: int
    bucket: Bucket
    message: torch.Tensor
    work: Any
    """A `Work`, or the future that a communication hook returned."""


class _Close:
    """Queued in the autograd engine; its life is the life of the backward pass it was queued in."""

    __slots__ = ("__weakref__", "_reducer")

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer._close()


def _no_round() -> None:
    return None


def _queued(reducer: Reducer) -> Callable[[], _Close | None]:
    close = _Close(reducer)
    Variable._execution_engine.queue_callback(close)
    return weakref.ref(close)


class Reducer:
    """Runs one partition over the parameters given."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Parameter],
        *,
        channels: Channels,
        partition: Partition,
        wire: torch.dtype | None = None,
        strict: bool = False,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.channels = channels
        self.wire = wire
        self.strict = strict
        """On a device, wait for the other ranks' word at the end of every backward instead of at the next one."""
        self.scale = 1.0 / channels.size
        self.step = 0
        """Backwards synchronised so far, this one included."""
        self.recorder: Recorder | None = None
        self.after_step: Callable[[], Callable[[], None] | None] = _no_round
        """A weak reference to what the wrapper does at the end of a step."""
        self.repeats = 0
        """Groups that had to be reduced again because a gradient came late."""
        self._comm_hook: tuple[Any, Hook] | None = None
        self._expectation = Expectation(len(self.parameters))
        self._dirty = bytearray(len(self.parameters))
        self._lock = threading.RLock()
        self._default_sync = True
        self._hidden = False
        self._leaf: Any = None
        self._passed = False
        self._regular = False
        self.attentive = False
        """What follows the next step acts on it, on every rank alike: its word is not read late."""
        self._deferral: Deferral | None = None
        self._token: Callable[[], Any] = _no_round
        self._open = False
        self._launched = 0
        self._reset_round()
        self.install(partition)
        self._weak = weakref.ref(self)
        self._handles = [self._watch(place) for place in range(len(self.parameters))]
        claim(self, self.names, self.parameters)
        weakref.finalize(self, _drop, self._handles)
        self.monitor = Monitor(channels.store, "fault", channels.rank, channels.size, self.status)
        self.monitor.start()

    def install(self, partition: Partition) -> None:
        """Run this partition from the next round on; gradients held now move into its buffers."""
        # Numbers still on their way from the device are laid out for the partition before.
        self._absorb()
        layout = control.Layout(groups=len(partition.groups), ranks=self.channels.size, parameters=len(self.parameters))
        last = len(partition.groups) - 1
        self.partition = partition
        self.layout = layout
        self.buckets = [
            self._bucket(spec, layout.length if index == last else 0) for index, spec in enumerate(partition.groups)
        ]
        self._home = [0] * len(self.parameters)
        self._view: list[torch.Tensor | None] = [None] * len(self.parameters)
        for index, bucket in enumerate(self.buckets):
            for place in bucket.members:
                self._home[place] = index
            for place, view in zip(bucket.members, bucket.views, strict=not bucket.sparse):
                self._view[place] = view
        tail = self.buckets[last]
        dtype = tail.wire or tail.dtype
        self._ledger = control.Ledger(layout, self.channels.rank, dtype, tail.device)
        late = tail.device.type in deferral.DEVICES and not self.strict and not any(b.sparse for b in self.buckets)
        self._deferral = Deferral(self._ledger, [b.reduced for b in self.buckets]) if late else None
        self._count_waits()
        for place in range(len(self.parameters)):
            self._keep(place)

    def _bucket(self, spec: GroupSpec, tail: int) -> Bucket:
        return Bucket(spec, self.parameters, wire=self.wire, tail=tail)

    def add_parameters(self, names: Sequence[str], parameters: Sequence[Parameter], partition: Partition) -> None:
        """Take in parameters that became trainable, with the partition that holds them."""
        first = len(self.parameters)
        self.names.extend(names)
        self.parameters.extend(parameters)
        self._expectation.add(len(parameters))
        self._dirty.extend(bytes(len(parameters)))
        self._regular = False
        self.install(partition)
        self._reset_round()
        self._handles.extend(self._watch(place) for place in range(first, len(self.parameters)))
        claim(self, names, parameters)

    def set_comm_hook(self, state: Any, hook: Hook) -> None:
        self._comm_hook = (state, hook)

    @property
    def comm_hook(self) -> tuple[Any, Hook] | None:
        return self._comm_hook

    def remove_hooks(self) -> None:
        """Stop watching the parameters."""
        _drop(self._handles)
        release(self, self.parameters)
        self.monitor.stop()

    def forward_begins(self, sync: bool) -> None:
        """Called at the start of every forward: ends a round that an exception broke off."""
        self._default_sync = sync
        self._passed = False
        if self._open and self._token() is None:
            self._break_off()

    def arm(self, sync: bool) -> None:
        """Called when autograd reaches an output of a forward that ran with or without synchronisation."""
        if self._token() is None:
            if self._accumulates():
                self._begin(sync)
        elif sync and not self._sync:
            self._number()

    def status(self) -> Status:
        """Where this rank stands, for the others' messages."""
        waiting = ""
        if self._open and self._launched < len(self.buckets):
            missing = [self.names[place] for place in self.buckets[self._launched].members if self._awaited[place] > 0]
            waiting = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return {
            "step": self.step,
            "in_backward": self._open,
            "launched": self._launched,
            "groups": len(self.buckets),
            "waiting": waiting,
        }

    def shadow(self) -> None:
        """One round of a rank that has run out of data: it sends nothing, but takes part."""
        self.forward_begins(sync=True)
        self._reset_round()
        self._open = True
        self._absent = True
        self._number()
        self._absorb()
        self._finish_round()

    def _watch(self, place: int) -> Any:
        # Held weakly: a wrapper that is dropped must stop communicating, though its model lives on.
        alive = self._weak

        def arrived(_: torch.Tensor) -> None:
            reducer = alive()
            if reducer is None:
                return
            # This runs once a gradient and is most of what the wrapper costs: the ordinary case is written out here.
            if reducer._slow or _graph_task() != reducer._root:
                reducer._fired(place)
                return
            reducer._dirty[place] = 1
            group = reducer._home[place]
            if reducer._streams is not None:
                reducer._streams.note(group)
            awaited = reducer._awaited
            outstanding = awaited[place] - 1
            awaited[place] = outstanding
            if outstanding:
                if outstanding < 0 and group < reducer._launched:
                    reducer._late.add(place)
                return
            waits = reducer._waits
            left = waits[group] - 1
            waits[group] = left
            if not left and group == reducer._launched:
                reducer._launch_ready()

        return self.parameters[place].register_post_accumulate_grad_hook(arrived)

    def _fired(self, place: int) -> None:
        self._dirty[place] = 1
        if self._token() is None:
            self._hidden = self._hidden or self._passed
            self._begin(self._default_sync)
        if self.recorder is not None:
            self.recorder.gradient(place)
        if not self._sync:
            self._keep(place)
        group = self._home[place]
        if self._streams is not None:
            self._streams.note(group)
        if self._regular and _graph_task() != self._root:
            # Inside a reentrant checkpoint more of this gradient may follow: its group waits for the end.
            self._nested = True
            if group < self._launched:
                self._late.add(place)
            return
        outstanding = self._awaited[place] - 1
        self._awaited[place] = outstanding
        if outstanding > 0:
            return
        if outstanding < 0:
            if group < self._launched:
                self._late.add(place)
            return
        waits = self._waits[group] - 1
        self._waits[group] = waits
        if waits == 0 and group == self._launched and self._sync and not self._hold:
            self._launch_ready()

    def _keep(self, place: int) -> None:
        """Move a gradient that is only accumulated into its buffer, so that it is not held twice."""
        view = self._view[place]
        gradient = self.parameters[place].grad
        if view is None or gradient is None or gradient is view or gradient.layout is not torch.strided:
            return
        with torch.no_grad():
            view.copy_(gradient)
            self.parameters[place].grad = view

    def _accumulates(self) -> bool:
        """Whether this graph ends in our parameters: `torch.autograd.grad` passes the outputs and leaves no `.grad`.

        Parameters inside reentrant checkpoints are not in the graph either; where they once began a round by
        themselves, every graph counts from then on.
        """
        if self._hidden or (self._leaf is not None and _will_execute(self._leaf)):
            return True
        for parameter in self.parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                if _will_execute(node):
                    # Finding a parameter's node costs more than a launch: the first that tells is asked first again.
                    self._leaf = node
                    return True
        self._passed = True
        return False

    def _begin(self, sync: bool) -> None:
        if self._open:
            self._break_off()
        self._reset_round()
        self._token = _queued(self)
        self._open = True
        self._root = _graph_task()
        if sync:
            self._number()
        # In the open round: if this raises, the round counts as broken off, here and for the others.
        self._absorb()
        if self.recorder is not None:
            self.recorder.begin(sync)

    def _number(self) -> None:
        self._sync = True
        self._slow = self._hold or self.recorder is not None
        self.step += 1

    def _reset_round(self) -> None:
        self._awaited = self._expectation.counts.copy()
        self._waits = self._all_waits.copy() if hasattr(self, "_all_waits") else []
        self._hold = not self._expectation.learned
        self._sync = False
        self._slow = True
        self._plain = False
        self._launched = 0
        self._flights: list[Flight] = []
        self._alone: Flight | None = None
        self._late: set[int] = set()
        self._used = bytearray(len(self.parameters))
        self._whole: list[Bucket] = []
        self._backups: dict[int, torch.Tensor] = {}
        self._nested = False
        self._absent = False
        self._broken = False
        self._root = -1
        self._streams: Streams | None = Streams(self.channels.device) if self.channels.device.type == "cuda" else None

    def _count_waits(self) -> None:
        counts = self._expectation.counts
        self._all_waits = [sum(1 for place in bucket.members if counts[place] > 0) for bucket in self.buckets]

    def _launch_ready(self) -> None:
        """Send every group that is due; the last one carries what happened in this round, so it leaves only when
        nothing more can happen, at its end."""
        with self._lock:
            last = len(self.buckets) - 1
            regular = self._regular
            # In a hook gradients are mostly off and nobody profiles: two contexts would cost more than the rest.
            launch = self._launch if torch.is_grad_enabled() or _profiling() else self._launch_one
            while self._launched < last and self._waits[self._launched] <= 0:
                # What comes late can be added to a dense sum, not to a sparse one.
                if not regular and self.buckets[self._launched].sparse:
                    return
                launch(self._launched, regular)

    def _launch(self, index: int, whole: bool) -> None:
        """Send one group. `whole`: every member is known to have arrived."""
        with torch.no_grad(), self._span("group", index):
            self._launch_one(index, whole)

    def _launch_one(self, index: int, whole: bool) -> None:
        bucket = self.buckets[index]
        last = index == len(self.buckets) - 1
        if self._streams is not None:
            self._streams.join(index)
        if bucket.sparse:
            flight = self._launch_sparse(index, bucket)
        else:
            if whole and bucket.take_all():
                self._whole.append(bucket)
            else:
                self._pack(bucket)
            flight = self._send(index, bucket, last)
        self._flights.append(flight)
        self._launched = index + 1
        if self.recorder is not None:
            self.recorder.launched(index, flight.work)
        if last and not self._rides(bucket):
            self._send_control_alone(bucket)

    def _rides(self, bucket: Bucket) -> bool:
        """The control numbers travel inside the last group, unless it is sparse or a hook reduces it."""
        return not bucket.sparse and self._comm_hook is None

    def _pack(self, bucket: Bucket) -> None:
        held = bucket.take()
        if self._absent:
            bucket.payload.zero_()
        elif self._broken:
            bucket.poison()
        else:
            for place, gradient, view in zip(bucket.members, held, bucket.views, strict=True):
                if gradient is None:
                    continue
                if self._dirty[place]:
                    self._used[place] = 1
                else:
                    self._backups[place] = gradient.clone() if gradient is view else gradient

    def _send(self, index: int, bucket: Bucket, last: bool) -> Flight:
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            return Flight(index, bucket, bucket.payload, hook(state, GradBucket(bucket, index, last)))
        message = bucket.message(self.scale, self._control() if last else None)
        return Flight(index, bucket, message, self._channel(bucket).all_reduce(message))

    def _channel(self, bucket: Bucket) -> Any:
        return self.channels[min(bucket.spec.channel, len(self.channels) - 1)]

    def _launch_sparse(self, index: int, bucket: Bucket) -> Flight:
        parameter = bucket.parameters[0]
        place = bucket.members[0]
        gradient = parameter.grad
        if self._absent or self._broken:
            gradient = None
        elif gradient is not None and self._dirty[place]:
            self._used[place] = 1
        elif gradient is not None:
            self._backups[place] = gradient
        message = sparse_message(parameter, gradient, self.scale)
        parameter.grad = None
        return Flight(index, bucket, message, self._channel(bucket).all_reduce(message))

    def _control(self) -> torch.Tensor:
        if not (self._broken or self._absent or self._late or self._irregular()):
            self._plain = True
            return self._ledger.plain(self.step)
        for bucket in self._whole:
            for place in bucket.members:
                self._used[place] = 1
        return control.write(
            self.layout,
            rank=self.channels.rank,
            step=self.step,
            broken=self._broken,
            irregular=True,
            late=sorted({self._home[place] for place in self._late}),
            used=self._used,
        )

    def _irregular(self) -> bool:
        return not self._expectation.plain or self._nested or any(self._awaited)

    def _send_control_alone(self, bucket: Bucket) -> None:
        message = self._control().to(device=self._ledger.device, dtype=self._ledger.dtype, copy=True)
        self._alone = Flight(len(self.buckets), bucket, message, self._channel(bucket).all_reduce(message))

    def _close(self) -> None:
        """The engine's callback: the graph is done."""
        self._token = _no_round
        if self._sync:
            self._finish_round()
        else:
            self._open = False
            if self.recorder is not None:
                self.recorder.end()

    def _finish_round(self) -> None:
        try:
            with torch.no_grad():
                with self._lock:
                    while self._launched < len(self.buckets):
                        # The last group of a regular round waited only for the round to end.
                        index = self._launched
                        self._launch(index, self._regular and not self._absent and self._waits[index] <= 0)
                numbers = self._land()
                verdict = self._read(numbers)
                if verdict is not None and verdict.late:
                    self._check_repeatable(verdict)
                    self._reduce_again(verdict)
                self._hand_back(verdict)
                self._learn(verdict)
        except BaseException:
            self._regular = False
            raise
        finally:
            self._open = False
            self._flights = []
            self._alone = None
            self._backups = {}
            self._dirty = bytearray(len(self.parameters))
        if self.recorder is not None:
            self.recorder.end()
        after = self.after_step()
        if after is not None:
            after()

    def _land(self) -> torch.Tensor:
        """Wait for every group in turn; returns the summed control numbers."""
        numbers: torch.Tensor | None = None
        for flight in self._flights:
            if _profiling():
                with self._span("wait", flight.group):
                    message = self._wait(flight)
            else:
                message = self._wait(flight)
            if flight.bucket.sparse:
                if not self._absent:
                    flight.bucket.parameters[0].grad = message
            else:
                numbers = flight.bucket.arrived(message)
        if self._alone is not None:
            try:
                self._alone.work.wait()
            except RuntimeError as error:
                raise self._failure(self._flights[-1], error) from error
            numbers = self._alone.message
        if numbers is None:
            raise CommunicationError(f"step {self.step} ended without any group: the partition is empty")
        return numbers

    def _wait(self, flight: Flight) -> torch.Tensor:
        """The group's sum, once it is there."""
        try:
            if self._comm_hook is not None and not flight.bucket.sparse:
                return result_of(flight.work, flight.group)
            flight.work.wait()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, BackbeatError):
                raise
            raise self._failure(flight, error) from error
        return flight.message

    def _failure(self, flight: Flight, error: BaseException) -> CommunicationError:
        names = [self.names[place] for place in flight.bucket.members]
        listed = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return CommunicationError(
            f"rank {self.channels.rank}: group {flight.group} of {len(self.buckets)} ({len(names)} gradients, "
            f"{listed}, {format_bytes(flight.bucket.bytes)}) was not reduced in step {self.step}: "
            f"{self.monitor.blame()}. Restart from the last checkpoint (the library says: {first_line(error)})"
        )

    def _read(self, numbers: torch.Tensor) -> control.Verdict | None:
        """What the ranks said; None for the plain step, or if that is to be read when the next round opens."""
        if self._deferral is not None and self._plain and self._reads_late():
            self._deferral.put_off(numbers, self.step)
            return None
        return self._judge(numbers if numbers.device.type == "cpu" else numbers.cpu())

    def _reads_late(self) -> bool:
        """Whether ranks whose own round was plain do not wait for the others' word; the same on every rank."""
        return self._deferral is not None and self._regular and not self.attentive

    def _check_repeatable(self, verdict: control.Verdict) -> None:
        """A rank that reads late does not know that it must reduce again."""
        if self._reads_late() and verdict.irregular < self.channels.size:
            raise self._came_late(verdict, self.step)

    def _came_late(self, verdict: control.Verdict, step: int) -> CommunicationError:
        return CommunicationError(
            f"a gradient of group {verdict.late[0]} came after its group had left in step {step}, on some ranks only "
            "and although every step before was regular: the step has no gradients on any rank. A graph that changes "
            "under reentrant checkpointing does so; use use_reentrant=False, or strict=True"
        )

    def _absorb(self) -> None:
        """Read the word on the step before, where it was put off."""
        found = self._deferral.take() if self._deferral is not None else None
        if found is None:
            return
        step, numbers = found
        self._regular = False
        verdict = self._judge(numbers, step)
        if verdict is not None and verdict.late:
            raise self._came_late(verdict, step)
        self._regular = verdict is None or not verdict.irregular

    def _judge(self, numbers: torch.Tensor, step: int | None = None) -> control.Verdict | None:
        step = self.step if step is None else step
        if self._ledger.is_plain(numbers, step):
            return None
        verdict = control.read(self.layout, numbers)
        if not self._broken:
            last = self.buckets[-1]
            self._ledger.check(verdict, step, f"group {len(self.buckets) - 1}, {self.names[last.members[-1]]}")
        return verdict

    def _reduce_again(self, verdict: control.Verdict) -> None:
        """Send what came after its group had left, and add it to what arrived."""
        for index in verdict.late:
            bucket = self.buckets[index]
            self.repeats += 1
            message = bucket.late_message(self._late, self.scale)
            work = self._channel(bucket).all_reduce(message)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(Flight(index, bucket, message, work), error) from error
            bucket.payload.add_(message[: bucket.numel])
            for place, count in zip(bucket.members, message[bucket.numel :].float().tolist(), strict=True):
                if count > 0:
                    verdict.used[place] = True

    def _hand_back(self, verdict: control.Verdict | None) -> None:
        """Give every parameter that some rank used its mean; the others keep what they had."""
        if self._absent:
            return
        for bucket in self.buckets:
            if bucket.sparse:
                place = bucket.members[0]
                if verdict is not None and not verdict.used[place]:
                    bucket.parameters[0].grad = self._backups.get(place)
            elif verdict is None:
                bucket.hand_out()
            else:
                for place, parameter, view in zip(bucket.members, bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view if verdict.used[place] else self._backups.get(place)

    def _learn(self, verdict: control.Verdict | None) -> None:
        if verdict is None:
            # Put off, it was regular before, and the word that comes will say whether it still is.
            self._regular = True
            if self._expectation.learned:
                return
        else:
            self._regular = False
        if not self._absent and not self._nested and self._expectation.learn(self._awaited):
            self._count_waits()

    def _break_off(self) -> None:
        """Complete a round that an exception ended, so that the other ranks learn of it and nothing stays in flight."""
        if self._sync:
            self._broken = True
            with torch.no_grad(), self._lock:
                while self._launched < len(self.buckets):
                    self._launch(self._launched, False)
                numbers = self._land()
            self._judge(numbers.cpu())
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
        self._dirty = bytearray(len(self.parameters))
        self._regular = False
        self._open = False
        self._token = _no_round
        self._flights = []
        self._alone = None
        self._backups = {}
        logger.warning("an exception broke off the backward of step %d on rank %d", self.step, self.channels.rank)

    def _span(self, what: str, index: int) -> AbstractContextManager[Any]:
        if not _profiling():
            return _nothing
        bucket = self.buckets[index]
        first = self.names[bucket.members[0]]
        return torch.profiler.record_function(
            f"backbeat::{what} {index} channel {bucket.spec.channel} {bucket.bytes} bytes {first}"
        )

    # Frameworks call these on the reducer they find; ours needs nothing of the kind.
    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _check_reducer_finalized(self) -> None:
        if self._open:
            raise CommunicationError(
                f"the backward of step {self.step} has not ended: {self._launched} groups are sent"
            )


def _drop(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
