"""One backward of one rank is one step: its state machine, and which gradients have arrived in it.

ARCHITECTURE.md draws its states. Only this module writes them: whoever packs, sends or waits for a bucket returns what
came of it, and the caller (`exchange.Sender`, `runner.StepRunner`) hands that to a method here. Only `Step.arrivals` is
also written elsewhere. The hook of each gradient (`gradient_hooks.GradientHooks`, `StepRunner._note_unusual`) counts by
itself, since it runs so often. `Sender._launch_last` takes off late gradients that compressed buckets keep for the next
step.

How often each parameter's gradient arrives in one backward is learned from the steps before. It only decides *when* a
bucket may leave, never *whether*. A bucket waits for what does not arrive until backward ends, and what arrives after
its bucket has left is sent after it. So ranks need not agree on what they expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from backbeat.runtime.reduce.bucket import BucketMemory, BucketSet
    from backbeat.runtime.reduce.gradient_hooks import Streams

PATIENCE = 4
"""A parameter that stops arriving is still waited for this many steps, twice as many each time that proves too few."""


class StepState(Enum):
    """Where a backward stands on this rank."""

    IDLE = "idle"
    """No backward of ours runs."""
    ACCUMULATING = "accumulating"
    """A backward without synchronisation (`no_sync`) runs: gradients are kept, nothing leaves."""
    REDUCING = "reducing"
    """Gradients arrive, and complete buckets leave in the plan's order."""
    FINISHING = "finishing"
    """The graph is done: the rest leaves, every bucket is waited for, the status message is read."""
    BROKEN = "broken"
    """Autograd had raised: a later forward or backward has found it so, and tells the other ranks."""


TRANSITIONS: dict[StepState, frozenset[StepState]] = {
    StepState.IDLE: frozenset({StepState.ACCUMULATING, StepState.REDUCING}),
    StepState.ACCUMULATING: frozenset({StepState.REDUCING, StepState.BROKEN, StepState.IDLE}),
    StepState.REDUCING: frozenset({StepState.FINISHING, StepState.BROKEN}),
    StepState.FINISHING: frozenset({StepState.IDLE}),
    StepState.BROKEN: frozenset({StepState.IDLE}),
}


class InFlight(NamedTuple):
    """A bucket that has left and is not back."""

    bucket_index: int
    bucket: BucketMemory
    message: torch.Tensor
    work: Any
    """A `Work`, or the future that a communication hook returned."""


class TakenGradients(NamedTuple):
    """What was found when a bucket took its members' gradients one by one."""

    used: Sequence[int] = ()
    """Parameters of which this rank sends a gradient."""
    unused_grads: Mapping[int, torch.Tensor] = {}
    """Gradients of parameters that this rank did not use, for the case that nobody did."""
    removed: bool = False
    """A hook of the user's took a gradient away after it had arrived."""


class RankStatus(NamedTuple):
    """What this rank tells the others of its step, in the status message."""

    regular: bool
    """Every parameter arrived once and nothing else happened."""
    broken: bool
    late: Sequence[int]
    """Buckets that a gradient came too late for."""
    used: Sequence[int]
    """For each parameter, whether this rank used it; left out where the step was regular."""


_REGULAR = RankStatus(regular=True, broken=False, late=(), used=())


class Step:
    """The state of the present backward; one object serves every step of a reducer."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.state = StepState.IDLE
        self.idle, self.broken = True, False
        """The state is IDLE; it is BROKEN."""
        self.contributes_nothing = False
        """This rank has nothing to add to the sums: it has no data, or its backward raised."""
        self.number = 0
        """Synchronised backwards so far, the present one included."""
        self.absent = False
        """This rank has run out of data (`join`) and only takes part."""
        self.own_status: RankStatus | None = None
        """What this rank says of the step, once its last bucket leaves."""
        self.in_flight: list[InFlight] = []
        self.status_in_flight: InFlight | None = None
        """The status message, where it does not travel inside the last bucket."""
        self.unused_grads: dict[int, torch.Tensor] = {}
        """Gradients of parameters that this rank did not use, for the case that nobody did."""
        self._reduces = False
        self._used = bytearray()
        self._packed: set[int] = set()
        """Buckets that took their gradients one by one. Of the others every member was used, which `_used` does not say
        yet."""
        self._removed = False

    def open(self, *, sync: bool, absent: bool = False, root: int = -1, report_each: bool = False) -> None:
        """A backward begins. Called when autograd reaches an output of the wrapper, or the first gradient of a loss
        that passes through none. `root` is the engine's number of the backward. A rank without data calls it too
        (`absent`).

        report_each: somebody wants to hear of every gradient.
        """
        self._enter(StepState.REDUCING if sync else StepState.ACCUMULATING)
        self.arrivals.reset()
        self.arrivals.root = root
        self.absent = self.contributes_nothing = absent
        self.own_status = None
        self._used = bytearray(len(self.arrivals.arrived_since_reduce))
        self._packed = set()
        self._removed = False
        if sync:
            self._begin_to_reduce(report_each)

    def synchronise(self, *, report_each: bool = False) -> None:
        """A later output of the same backward wants its gradients reduced. Called when autograd reaches it."""
        self._enter(StepState.REDUCING)
        self._begin_to_reduce(report_each)

    def finish(self) -> None:
        """The graph is done. Called by the engine's callback, and by a rank without data right after `open`."""
        self._enter(StepState.FINISHING)

    def break_off(self) -> bool:
        """The backward raised. The next forward or backward that finds the step open, and no backward running, calls
        this; it does so again where telling the others failed. True if the other ranks take part in this step and must
        be told."""
        if self.state is not StepState.BROKEN:
            self._enter(StepState.BROKEN)
        return self._reduces

    def close(self, *, regular_everywhere: bool | None = None) -> None:
        """The backward is over. Called when its gradients are in place, and when it has failed.

        regular_everywhere: of a step that went well, whether every rank said that each parameter came once. The same
            gradients are expected next time. None: nothing is learned.
        """
        self._enter(StepState.IDLE)
        if regular_everywhere is not None and not self.absent:
            self.arrivals.learn(regular_everywhere=regular_everywhere)
        if self._reduces:
            self.arrivals.arrived_since_reduce = bytearray(len(self.arrivals.arrived_since_reduce))
        self._reduces = False
        self.in_flight = []
        self.status_in_flight = None
        self.unused_grads = {}

    def add_taken(self, bucket_index: int, taken: TakenGradients) -> None:
        """A bucket has taken its gradients one by one; called for no other."""
        self._packed.add(bucket_index)
        for index in taken.used:
            self._used[index] = 1
        self.unused_grads.update(taken.unused_grads)
        self._removed = self._removed or taken.removed

    def add_sent(self, sent: InFlight) -> None:
        """A bucket has left. Buckets leave in order, each once, so that until late gradients are sent and where none
        is skipped, `in_flight[index]` is bucket `index`."""
        self.in_flight.append(sent)
        self.arrivals.next_bucket = sent.bucket_index + 1

    def add_skipped(self, bucket_index: int) -> None:
        """A bucket has taken its gradients and stays: no rank is expected to have any."""
        self.arrivals.next_bucket = bucket_index + 1

    def add_status_sent(self, sent: InFlight) -> None:
        """The status message has left on its own."""
        self.status_in_flight = sent

    def set_own_status(self, *, sent_all: bool = True) -> RankStatus:
        """Called when the last bucket is about to leave: nothing more can happen. `sent_all`: none was skipped."""
        arrivals = self.arrivals
        if sent_all and not self.contributes_nothing and not self._removed and arrivals.each_once():
            self.own_status = _REGULAR
        else:
            late = sorted({arrivals.bucket_of[index] for index in arrivals.late})
            for index, bucket_index in enumerate(arrivals.bucket_of):
                if bucket_index not in self._packed:
                    self._used[index] = 1
            self.own_status = RankStatus(regular=False, broken=self.broken, late=late, used=self._used)
        return self.own_status

    def _begin_to_reduce(self, report_each: bool) -> None:
        self._reduces = True
        self.number += 1
        self.arrivals.allow_sending(report_each=report_each)

    def _enter(self, state: StepState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"step {self.number} cannot go from {self.state.name} to {state.name}")
        self.state, self.idle, self.broken = state, state is StepState.IDLE, state is StepState.BROKEN
        self.contributes_nothing = self.absent or self.broken


class Arrivals:
    """Which gradients of the present backward have arrived, and how often each is expected. One object serves every
    step: the hooks hold it."""

    __slots__ = (
        "_all_came", "_buckets", "_expected", "_expected_members", "_expects_once", "_missed", "_patience",
        "arrived_since_reduce", "bucket_of", "known", "late", "missing", "nested", "next_bucket", "outstanding",
        "report_each", "root", "streams",
    )  # fmt: skip

    def __init__(self, parameters: int, streams: Streams | None = None) -> None:
        self._expected: list[int] = []
        """How often each parameter is expected to arrive."""
        self.known = False
        """That was learned from a step: a complete bucket may leave before backward ends."""
        self._expects_once = True
        self._all_came = False
        """A step came in between in which nothing was missing."""
        self._missed: list[int] = []
        self._patience: list[int] = []
        self.arrived_since_reduce = bytearray()
        """Parameters that got a gradient since the last step that reduced; outlives backwards that only accumulate."""
        self.add(parameters)
        self.streams = streams

    def install(self, buckets: BucketSet) -> None:
        """Count for these buckets from the next backward on."""
        self._buckets = buckets
        self.bucket_of = buckets.bucket_of
        """The bucket of each parameter."""
        self._expected_members = buckets.expected_members(self._expected)
        self.reset()

    def add(self, count: int) -> None:
        """More parameters, expected once each."""
        self._expected.extend([1] * count)
        self._missed.extend([0] * count)
        self._patience.extend([PATIENCE] * count)
        self.arrived_since_reduce.extend(bytes(count))

    def reset(self) -> None:
        """A backward begins: nothing has arrived."""
        self.outstanding = self._expected.copy()
        """Arrivals outstanding of each parameter; negative where more came than were expected."""
        self.missing = self._expected_members.copy()
        """Members of each bucket that are outstanding."""
        self.next_bucket = 0
        """The bucket that leaves next: those before it have left."""
        self.report_each = True
        """Arrivals go through `StepRunner._note_unusual`: nothing may leave yet, or somebody wants to hear of each."""
        self.root = -1
        """The engine's number of this backward; arrivals inside another come from a reentrant checkpoint."""
        self.nested = False
        """Some did."""
        self.late: set[int] = set()
        """Parameters that arrived after their bucket had left."""
        if self.streams is not None:
            self.streams.reset()

    def allow_sending(self, *, report_each: bool) -> None:
        """Complete buckets may leave from now on, where it is known how often each parameter arrives."""
        self.report_each = report_each or not self.known

    def count(self, index: int, bucket: int) -> bool:
        """Count one arrival of a parameter; True if its bucket is complete."""
        outstanding = self.outstanding[index] - 1
        self.outstanding[index] = outstanding
        if outstanding:
            if outstanding < 0:
                self._note_late(index, bucket)
            return False
        left = self.missing[bucket] - 1
        self.missing[bucket] = left
        return left == 0

    def count_nested(self, index: int, bucket: int) -> None:
        """An arrival inside a reentrant checkpoint, where more of this gradient may follow: its bucket waits for the
        end of backward."""
        self.nested = True
        self._note_late(index, bucket)

    def _note_late(self, index: int, bucket: int) -> None:
        if bucket < self.next_bucket:
            self.late.add(index)

    def each_once(self) -> bool:
        """Every parameter arrived once, in this backward's own graph."""
        return self._expects_once and not (self.late or self.nested or any(self.outstanding))

    def learn(self, *, regular_everywhere: bool) -> None:
        """After a step: expect what came. `regular_everywhere`: every parameter came once on every rank."""
        if regular_everywhere and self.known:
            self._all_came = True
            return
        if self.nested:
            return
        if self._all_came:
            self._missed = [0] * len(self._missed)
            self._all_came = False
        changed = False
        for index, outstanding in enumerate(self.outstanding):
            if outstanding < 0 and self.known:
                self._patience[index] *= 2
            elif outstanding > 0:
                self._missed[index] += 1
                if self.known and self._missed[index] < self._patience[index]:
                    continue
            self._missed[index] = 0
            if outstanding:
                self._expected[index] -= outstanding
                changed = True
        self.known = True
        if changed:
            self._expects_once = all(count == 1 for count in self._expected)
            self._expected_members = self._buckets.expected_members(self._expected)
