"""The reducer: watches gradients arrive and sends the buckets of the plan, in its order, while backward still runs.

One backward is one *round*. It opens when autograd reaches an output of the wrapper (or, for a loss that does not pass
through one, the first gradient), and closes in a callback that the engine runs when the graph is done, so that whatever
follows `backward()` sees reduced gradients. If autograd raises, the round is known to be broken by the next forward
(`backward`), which tells the other ranks.

At the end of a round, for each parameter that any rank used since the last one, `.grad` is the mean over ranks of what
each held. All rules follow from that: accumulation, `no_sync`, several backwards of one forward, or one of several.

Its parts: `rounds` what happened so far, `watching` the hooks on the parameters, `flights` buckets that leave and come
back, `word` what ranks tell each other, `delivery` what kinds of plan do differently.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import CommunicationError
from backbeat.runtime.reduce.arrivals import Reach, graph_task, unwatch, watch, watch_last
from backbeat.runtime.reduce.backward import Backward
from backbeat.runtime.reduce.bucket_set import BucketSet
from backbeat.runtime.reduce.delivery import Delivery, HookDelivery
from backbeat.runtime.reduce.expectation import Expectation
from backbeat.runtime.reduce.failures import Monitor, Status
from backbeat.runtime.reduce.in_flight import Flights
from backbeat.runtime.reduce.job import Job
from backbeat.runtime.reduce.lost_collectives import Losses
from backbeat.runtime.reduce.ownership import claim, release
from backbeat.runtime.reduce.status import Word
from backbeat.runtime.reduce.step import Round
from backbeat.runtime.reduce.streams import Streams

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.comm.communicators import Communicators
    from backbeat.runtime.reduce.bucket import BucketBuffer
    from backbeat.runtime.reduce.comm_hooks import Hook
    from backbeat.runtime.reduce.partition import Partition
    from backbeat.runtime.reduce.status_layout import Verdict
    from backbeat.runtime.reduce.timing import Recorder

logger = logging.getLogger("backbeat.runtime")


def _nothing() -> None:
    return None


class Reducer:
    """Runs one partition over the parameters given, by the delivery that its kind of plan needs."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Parameter],
        *,
        communicators: Communicators,
        partition: Partition,
        reduce_dtype: torch.dtype | None = None,
        strict: bool = False,
        delivery: Callable[[Job], Delivery] = Delivery,
    ) -> None:
        self.job = Job(
            names=list(names),
            parameters=list(parameters),
            communicators=communicators,
            reduce_dtype=reduce_dtype,
            round=Round(len(parameters)),
            scale=1.0 / communicators.size,
        )
        self.after_step: Callable[[], Callable[[], None] | None] = _nothing
        """A weak reference to what the wrapper does at the end of a step."""
        self.unreached: Callable[[], Callable[[], None] | None] = _nothing
        """As weak: what it does when autograd reaches an output, and none of the parameters."""
        self.word = Word(communicators.rank, communicators.size, strict=strict)
        self._round = self.job.round
        self._flights = Flights(self.job, delivery(self.job), self.word)
        self._expectation = Expectation(len(parameters))
        self._reach = Reach()
        self._default_sync = True
        self._round.streams = Streams(communicators.device) if communicators.device.type == "cuda" else None
        self._backward = Backward()
        self.weak = weakref.ref(self)
        self.install(partition)
        self._reset()
        self._handles = self._watch(0)
        claim(self, self.job.names, self.job.parameters)
        weakref.finalize(self, unwatch, self._handles)
        self._losses = None if communicators.raises else Losses(self.job)
        self.job.monitor = Monitor(
            communicators.store,
            "fault",
            communicators.rank,
            communicators.size,
            self.status,
            look=None if self._losses is None else self._losses.look,
        )
        self.job.monitor.start()

    @property
    def delivery(self) -> Any:
        return self._flights.delivery

    @property
    def names(self) -> list[str]:
        return self.job.names

    @property
    def buckets(self) -> list[BucketBuffer]:
        return self.job.bucket_set.buckets

    @property
    def partition(self) -> Partition:
        return self.job.bucket_set.partition

    @property
    def step(self) -> int:
        """Backwards synchronised so far, the present one included."""
        return self.job.step

    @property
    def recorder(self) -> Recorder | None:
        return self.job.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.job.recorder = recorder

    def install(self, partition: Partition) -> None:
        """Run this partition from the next round on; gradients held now move into its buffers."""
        # Numbers still on their way from the device are laid out for the partition before.
        self.absorb()
        job, delivery = self.job, self.delivery
        delivery.prepare(partition)
        last = len(partition.buckets) - 1
        length = self.word.length_for(len(partition.buckets), len(job.parameters))
        buckets = [
            delivery.bucket(spec, length if index == last else 0) for index, spec in enumerate(partition.buckets)
        ]
        job.bucket_set = BucketSet(partition, buckets, job.parameters)
        self._round.home = job.bucket_set.home
        self.word.install(job.bucket_set, job.names)
        delivery.installed()
        self._waits = job.bucket_set.waits(self._expectation.counts)
        job.bucket_set.keep_all()

    def absorb(self) -> None:
        """Read the word on the step before, where it was put off; raises where that step has failed."""
        try:
            self.word.absorb()
        except BaseException:
            self.delivery.undo()
            raise

    def add_parameters(self, names: Sequence[str], parameters: Sequence[Parameter], partition: Partition) -> None:
        """Take in parameters that became trainable, with the partition that holds them."""
        first = len(self.job.parameters)
        self.job.names.extend(names)
        self.job.parameters.extend(parameters)
        self._expectation.add(len(parameters))
        self._round.dirty.extend(bytes(len(parameters)))
        self.word.regular = False
        self.install(partition)
        self._reset()
        self._handles.extend(self._watch(first))
        claim(self, names, parameters)

    def set_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let a hook reduce the buckets from now on."""
        self.delivery.check_hook()
        self._flights.delivery = HookDelivery(self.job, state, hook)

    def remove_hooks(self) -> None:
        """Stop watching the parameters."""
        unwatch(self._handles)
        release(self, self.job.parameters)
        self.job.monitor.stop()

    def forward_begins(self, sync: bool) -> None:
        """Called at the start of every forward: ends a round that an exception broke off."""
        self._default_sync = sync
        self._reach.forward_begins()
        if self._handles and (self.job.recorder is not None or not self._expectation.learned):
            watch_last(self.job.parameters, self._handles)
        if self._round.open and self._backward.ended():
            self._break_off()

    def arm(self, sync: bool) -> None:
        """Called when autograd reaches an output of a forward that ran with or without synchronisation."""
        if not self._backward.running:
            if self._reach.includes(self.job.parameters):
                self._begin(sync)
            elif (unreached := self.unreached()) is not None:
                unreached()
        elif sync and not self._round.sync:
            self._number()

    def status(self) -> Status:
        """Where this rank stands, for the others' messages."""
        round_, job = self._round, self.job
        waiting = ""
        if round_.open and round_.launched < len(self.buckets):
            missing = [job.names[place] for place in self.buckets[round_.launched].members if round_.awaited[place] > 0]
            waiting = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return {
            "step": job.step,
            "in_backward": round_.open,
            "launched": round_.launched,
            "groups": len(self.buckets),
            "waiting": waiting,
        }

    def shadow(self) -> None:
        """One round of a rank that has run out of data: it sends nothing, but takes part."""
        self.forward_begins(sync=True)
        self._reset()
        self._round.open = True
        self._round.absent = True
        self._number()
        self.absorb()
        self._finish_round()

    def _watch(self, first: int) -> list[Any]:
        slowly, flights = weakref.WeakMethod(self._fired), weakref.ref(self._flights)
        places = enumerate(self.job.parameters[first:], start=first)
        return [watch(parameter, place, self._round, slowly, flights) for place, parameter in places]

    def _fired(self, place: int) -> None:
        """A gradient arrived, and something about it is not ordinary."""
        round_ = self._round
        round_.dirty[place] = 1
        if not self._backward.running:
            self._reach.surprised()
            self._begin(self._default_sync)
        if self.job.recorder is not None:
            self.job.recorder.gradient(place)
        group = round_.home[place]
        if round_.streams is not None:
            round_.streams.note(group)
        if self.word.regular and graph_task() != round_.root:
            # Inside a reentrant checkpoint more of this gradient may follow: its bucket waits for the end.
            round_.nested = True
            round_.arrive_late(place, group)
        elif round_.arrive(place, group):
            if not round_.sync:
                self.job.bucket_set.keep(group)
            elif group == round_.launched and not round_.hold:
                self._flights.launch_ready()

    def _begin(self, sync: bool) -> None:
        self.job.check()
        self.delivery.opens()
        if self._round.open:
            self._break_off()
        self._reset()
        self._backward.begin(self._close)
        self._round.open = True
        self._round.root = graph_task()
        if sync:
            self._number()
        # In the open round: if this raises, the round counts as broken off, here and for the others.
        self.absorb()
        if self.job.recorder is not None:
            self.job.recorder.begin(sync)

    def _number(self) -> None:
        round_, job = self._round, self.job
        round_.sync = True
        round_.slow = round_.hold or job.recorder is not None
        job.step += 1

    def _reset(self) -> None:
        expectation = self._expectation
        self._round.reset(expectation.counts, self._waits, learned=expectation.learned, ordinary=expectation.plain)
        if self._round.streams is not None:
            self._round.streams.forget()

    def _close(self) -> None:
        """The engine's callback: the graph is done."""
        self._backward.forget()
        if self._round.sync:
            self._finish_round()
        else:
            # What came more than once, or not as expected.
            self.job.bucket_set.keep_all()
            self._round.open = False
            if self.job.recorder is not None:
                self.job.recorder.end()

    def _finish_round(self) -> None:
        round_ = self._round
        # As `no_grad`, whose object costs as much as a short wait.
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self._flights.launch_rest()
            if round_.plain:
                # Most likely all will be well. This takes as long as the last bucket's thread needs to wake up.
                round_.lent = self.job.bucket_set.lend()
            numbers = self._flights.land()
            verdict = self._read(numbers)
            self.job.check()
            if verdict is not None and verdict.late:
                self._flights.repeat(verdict)
            self.delivery.hand_back(verdict)
            self._learn(verdict)
        except BaseException as error:
            self.word.regular = False
            if round_.lent:
                self.job.bucket_set.take_back()
            if self.job.fault is not None and error is not self.job.fault:
                raise self.job.fault from error
            if isinstance(error, RuntimeError):
                self.job.check_format(error)
            raise
        finally:
            torch._C._set_grad_enabled(enabled)
            round_.open = False
            if self._losses is not None:
                self._losses.remember(round_.flights, self.job.step)
            round_.forget_flights()
            round_.clean()
        if self.job.recorder is not None:
            self.job.recorder.end()
        after = self.after_step()
        if after is not None:
            after()

    def _read(self, numbers: torch.Tensor) -> Verdict | None:
        try:
            return self.word.read(numbers, self._round, self.job.step)
        except BaseException:
            self.delivery.give_up()
            raise

    def _learn(self, verdict: Verdict | None) -> None:
        # Put off, it was regular before, and the word that comes will say whether it still is.
        self.word.regular = verdict is None
        if verdict is None and self._expectation.learned:
            self._expectation.all_came = True
            return
        round_ = self._round
        if not round_.absent and not round_.nested and self._expectation.learn(round_.awaited):
            self._waits = self.job.bucket_set.waits(self._expectation.counts)

    def _break_off(self) -> None:
        """Complete a round that an exception ended, so that the other ranks learn of it and nothing stays in flight."""
        round_ = self._round
        if round_.sync:
            round_.broken = True
            with torch.no_grad():
                self._flights.launch_rest()
                numbers = self._flights.land()
            self.word.judge(numbers, self.job.step, check=False)
            for parameter in self.job.parameters:
                parameter.grad = None
        round_.clean()
        self.word.regular = False
        round_.open = False
        self._backward.forget()
        round_.forget_flights()
        logger.warning(
            "an exception broke off the backward of step %d on rank %d", self.step, self.job.communicators.rank
        )
        if round_.sync:
            with torch.no_grad():
                self.delivery.give_up()

    # Frameworks call these on the reducer they find; ours needs nothing of the kind.
    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _check_reducer_finalized(self) -> None:
        if self._round.open:
            raise CommunicationError(
                f"the backward of step {self.step} has not ended: {self._round.launched} buckets are sent"
            )
