"""Runs steps: hears of a backward, sends its buckets while it runs, and puts the sums in place when it ends.

One backward is one step (`step.Step`). It opens when autograd reaches an output of the wrapper, or the first gradient
of a loss that passes through no output. Without a forward of the wrapper before it, it only accumulates. It ends in a
callback that the engine runs when the graph is done. So whatever follows `backward()` sees reduced gradients. If
autograd raises, the next forward finds the step broken, and tells the other ranks.

At the end of a step, for each parameter that any rank used since the last one, `.grad` is the mean over ranks of what
each held. All rules follow from that: those of accumulation, of `no_sync`, of several backwards for one forward, and of
one backward for several.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

from backbeat.comm.communicators import Communicators
from backbeat.runtime.reduce.backward import Backward, GraphReach
from backbeat.runtime.reduce.bucket import BucketSet
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.exchange import Exchange, Sender
from backbeat.runtime.reduce.failures import Monitor, RankState
from backbeat.runtime.reduce.gradient_hooks import GradientHooks, Streams
from backbeat.runtime.reduce.lost_collectives import LostCollectives
from backbeat.runtime.reduce.managed_parameters import ManagedParameters, claim, release
from backbeat.runtime.reduce.partition import Partition
from backbeat.runtime.reduce.peers import Peers
from backbeat.runtime.reduce.status import StatusMessage, StatusOffsets
from backbeat.runtime.reduce.step import Arrivals, Step, StepState
from backbeat.runtime.reduce.timing import Recorder
from backbeat.runtime.torch_internals import graph_task, set_grad_enabled
from backbeat.units import first_few

logger = logging.getLogger("backbeat.runtime")

MakeExchange = Callable[[ReducerContext], Exchange]


class StepRunner:
    """Runs the steps of one reducer: one partition of its parameters at a time, through the exchange that the plan
    needs."""

    def __init__(
        self,
        managed: ManagedParameters,
        communicators: Communicators,
        partition: Partition,
        *,
        make_exchange: MakeExchange,
        reduce_dtype: torch.dtype | None,
        strict: bool,
        skip_unused: bool,
        peers: Peers,
        after_step: Callable[[], None],
    ) -> None:
        """strict: wait for the status of every step. skip_unused: a bucket that no rank used in the step before stays.
        after_step: a method, called at the end of each synchronised step; held weakly.
        """
        device = communicators.device
        self._arrivals = Arrivals(len(managed.names), Streams(device) if device.type == "cuda" else None)
        self.step = Step(self._arrivals)
        self.context = ReducerContext(
            managed=managed,
            communicators=communicators,
            reduce_dtype=reduce_dtype,
            step=self.step,
            scale=1.0 / communicators.size,
        )
        self._after_step = weakref.WeakMethod(after_step)
        self.status = StatusMessage(communicators.rank, communicators.size, strict=strict)
        self._sender = Sender(self.context, make_exchange(self.context), self.status, skip_unused=skip_unused)
        self._reach = GraphReach()
        self._default_sync = True
        self._warned_of_local = False
        self._backward = Backward()
        self.install(partition)
        self._hooks = GradientHooks(self._arrivals, self._note_unusual, self._sender)
        self._hooks.extend(managed.parameters, 0)
        claim(self, managed.names, managed.parameters)
        weakref.finalize(self, self._hooks.remove)
        self._lost = None if communicators.wait_raises else LostCollectives(self.context)
        look = None if self._lost is None else self._lost.look
        self.context.monitor = Monitor(
            communicators, self.rank_state, model_name=managed.model_name, look=look, peers=peers
        )
        self.context.monitor.start()

    @property
    def exchange(self) -> Exchange:
        return self._sender.exchange

    def time_steps(self, recorder: Recorder | None) -> None:
        """Time the steps from the next one on; None: no more."""
        self.context.recorder = recorder

    @property
    def late_buckets(self) -> int:
        """Buckets that had to be reduced again because a gradient came late."""
        return self._sender.late_buckets

    @property
    def forwarded(self) -> bool:
        """A forward has begun since the last step, or there was none."""
        return self._reach.forwarded

    def install(self, partition: Partition) -> None:
        """Run this partition from the next step on; gradients held now move into its buffers."""
        # A status still on its way from the device is laid out for the partition before.
        self.read_step_before()
        context = self.context
        managed = context.managed
        offsets = StatusOffsets(len(partition.buckets), context.communicators.size, len(managed.parameters))
        buckets = self.exchange.make_buckets(partition, status_length=offsets.length)
        context.bucket_set = BucketSet(partition, buckets, managed.parameters)
        self._arrivals.install(context.bucket_set)
        self.status.install(context.bucket_set, managed.names)
        self._sender.skip_none()
        context.bucket_set.move_all_into_buffers()

    def read_step_before(self) -> None:
        """Read the status of the step before, where it was put off; raises where that step has failed."""
        try:
            self.status.read_step_before()
        except BaseException as error:
            self.context.note_failure(error)
            self.exchange.undo()
            raise

    def add_parameters(self, first: int, partition: Partition) -> None:
        """Parameters from this one on became trainable: run the partition that holds them."""
        names, parameters = self.context.managed.names[first:], self.context.managed.parameters[first:]
        self._arrivals.add(len(parameters))
        self.status.expect_irregular()
        self.install(partition)
        self._hooks.extend(parameters, first)
        claim(self, names, parameters)

    def exchange_by(self, make_exchange: MakeExchange) -> None:
        """Send the same buckets in another way."""
        self._sender.exchange = make_exchange(self.context)

    def remove_hooks(self) -> None:
        self._hooks.remove()
        release(self, self.context.managed.parameters)
        self.context.monitor.stop()

    def rank_state(self) -> RankState:
        """Where this rank stands, for the others' messages."""
        step, context = self.step, self.context
        buckets = context.bucket_set.buckets
        sent = self._arrivals.next_bucket
        waiting = ""
        if not step.idle and sent < len(buckets):
            outstanding = self._arrivals.outstanding
            names = context.managed.names
            waiting = first_few([names[index] for index in buckets[sent].members if outstanding[index] > 0])
        return RankState(
            step=step.number,
            in_backward=not step.idle,
            waits=step.state is StepState.FINISHING,
            sent=sent,
            buckets=len(buckets),
            waiting=waiting,
            gave_up=context.gave_up,
        )

    def forward_begins(self, sync: bool) -> None:
        """Called at the start of every forward: ends a step whose backward raised."""
        self._default_sync = sync
        self._reach.forward_begins()
        self._hooks.restore()
        if not self.step.idle and self._backward.ended():
            self._break_off()

    def output_hook(self, sync: bool) -> Callable[[torch.Tensor], None]:
        """For outputs of a forward that ran with or without synchronisation: backward begins there."""
        held = weakref.ref(self)

        def reached(_: torch.Tensor) -> None:
            if (runner := held()) is not None:
                runner._output_reached(sync)

        return reached

    def _output_reached(self, sync: bool) -> None:
        if not self._backward.running:
            if self._reach.announced(self.context.managed.parameters):
                self._hooks.restore()
                self._begin(sync)
            else:
                self.context.managed.check_known()
        elif sync and self.step.state is StepState.ACCUMULATING:
            recorder = self.context.recorder
            self.step.synchronise(report_each=recorder is not None)
            if recorder is not None:
                recorder.begin(self.step.number, sync=True)

    def run_absent(self) -> None:
        """One step of a rank that has run out of data: it sends nothing, but takes part."""
        self.forward_begins(sync=True)
        if self.context.lost is not None:
            raise self.context.lost
        if not self.step.idle:
            self._break_off()
        self.step.open(sync=True, absent=True)
        self.read_step_before()
        self._finish()

    def _note_unusual(self, index: int) -> None:
        """A gradient arrived, and something about it is not ordinary."""
        arrivals, recorder = self._arrivals, self.context.recorder
        arrivals.arrived_since_reduce[index] = 1
        if not self._backward.running:
            ours = self._reach.note_unannounced()
            if not ours:
                self._warn_of_local()
            self._begin(self._default_sync and ours)
        if recorder is not None:
            recorder.gradient(index)
        bucket = arrivals.bucket_of[index]
        if arrivals.streams is not None:
            arrivals.streams.note(bucket)
        if self.status.expects_regular and graph_task() != arrivals.root:
            arrivals.count_nested(index, bucket)
        elif arrivals.count(index, bucket):
            if self.step.state is StepState.ACCUMULATING:
                self.context.bucket_set.move_into_buffer(bucket)
            elif arrivals.known:
                self._sender.send_ready()

    def _warn_of_local(self) -> None:
        """Once: gradients stay on this rank."""
        if not self._warned_of_local:
            self._warned_of_local = True
            logger.warning(
                "rank %d: a backward that passed through no forward of the wrapper keeps its gradients on this rank, "
                "as with torch's own; call the wrapper, not the model inside, to send them",
                self.context.communicators.rank,
            )

    def _begin(self, sync: bool) -> None:
        context = self.context
        if context.lost is not None:
            raise context.lost
        self._sender.exchange.check_open()
        if not self.step.idle:
            self._break_off()
        self._backward.begin(self._graph_done)
        self.step.open(sync=sync, root=graph_task(), report_each=context.recorder is not None)
        if self.status.unread:
            # In the open step: if this raises, the step counts as broken off, here and for the others.
            self.read_step_before()
        if context.recorder is not None:
            context.recorder.begin(self.step.number, sync=sync)

    def _graph_done(self) -> None:
        """Called by the engine when a backward is over."""
        self._backward.over()
        if self.step.state is StepState.ACCUMULATING:
            # Gradients of buckets that never became complete were not moved when they came.
            self.context.bucket_set.move_all_into_buffers()
            self.step.close()
            if self.context.recorder is not None:
                self.context.recorder.end()
        else:
            self._finish()

    def _finish(self) -> None:
        step, context = self.step, self.context
        step.finish()
        enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        regular_everywhere: bool | None = None
        try:
            regular_everywhere = self._sender.finish()
        except BaseException as error:
            context.note_failure(error)
            self.status.expect_irregular()
            context.drop_gradients()
            if context.lost is not None and error is not context.lost:
                raise context.lost from error
            if isinstance(error, RuntimeError):
                context.check_format(error)
            raise
        finally:
            set_grad_enabled(enabled)
            if self._lost is not None:
                self._lost.remember(step.in_flight, step.number)
            step.close(regular_everywhere=regular_everywhere)
        if context.recorder is not None:
            context.recorder.end()
        after_step = self._after_step()
        if after_step is not None:
            after_step()

    def _break_off(self) -> None:
        """Complete a step whose backward raised, so that the other ranks learn of it and nothing stays in flight."""
        step, context = self.step, self.context
        others_take_part = step.break_off()
        if others_take_part:
            with torch.no_grad():
                self._sender.send_rest()
                # Reading it waits for the device.
                self._sender.wait().cpu()
            context.drop_gradients()
        step.close()
        self.status.expect_irregular()
        self._backward.over()
        logger.warning(
            "an exception broke off the backward of step %d on rank %d", step.number, context.communicators.rank
        )
        if others_take_part:
            with torch.no_grad():
                self.exchange.give_up()
