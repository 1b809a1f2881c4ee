"""One backward of one rank is one step: its state machine.

ARCHITECTURE.md draws its states. Only this module writes them: whoever packs, sends or waits for a bucket returns what
came of it, and the caller (`exchange.Sender`, `runner.StepRunner`) hands that to a method here. Only `Step.arrivals` is
also written elsewhere. The hook of each gradient (`arrivals.GradientHooks`, `StepRunner._arrived`) counts by itself,
since it runs so often. `Sender._launch_last` takes off late gradients that compressed buckets keep for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from backbeat.runtime.reduce.arrivals import Arrivals
    from backbeat.runtime.reduce.bucket import BucketMemory


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
        self._whole: list[BucketMemory] = []
        """Buckets all of whose members were used: `_used` does not list them yet."""
        self._removed = False

    @property
    def idle(self) -> bool:
        return self.state is StepState.IDLE

    @property
    def broken(self) -> bool:
        return self.state is StepState.BROKEN

    @property
    def contributes_nothing(self) -> bool:
        """This rank has nothing to add to the sums: it has no data, or its backward raised."""
        return self.absent or self.state is StepState.BROKEN

    def open(self, *, sync: bool, absent: bool = False, root: int = -1, report_each: bool = False) -> None:
        """A backward begins. Called when autograd reaches an output of the wrapper, or the first gradient of a loss
        that passes through none. `root` is the engine's number of the backward. A rank without data calls it too
        (`absent`).

        report_each: somebody wants to hear of every gradient.
        """
        self._enter(StepState.REDUCING if sync else StepState.ACCUMULATING)
        self.arrivals.reset()
        self.arrivals.root = root
        self.absent = absent
        self.own_status = None
        self._used = bytearray(len(self.arrivals.arrived_since_reduce))
        self._whole = []
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

    def close(self) -> None:
        """The backward is over. Called when its gradients are in place, and when it has failed."""
        self._enter(StepState.IDLE)
        if self._reduces:
            self.arrivals.arrived_since_reduce = bytearray(len(self.arrivals.arrived_since_reduce))
        self._reduces = False
        self.in_flight = []
        self.status_in_flight = None
        self.unused_grads = {}

    def add_taken(self, bucket: BucketMemory, taken: TakenGradients | None) -> None:
        """A bucket has taken its gradients; None: every member had one."""
        if taken is None:
            self._whole.append(bucket)
            return
        for index in taken.used:
            self._used[index] = 1
        self.unused_grads.update(taken.unused_grads)
        self._removed = self._removed or taken.removed

    def add_sent(self, sent: InFlight) -> None:
        """A bucket has left."""
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
        if sent_all and not self.contributes_nothing and not self._removed and arrivals.regular():
            self.own_status = _REGULAR
        else:
            late = sorted({arrivals.bucket_of[index] for index in arrivals.late})
            for bucket in self._whole:
                for index in bucket.members:
                    self._used[index] = 1
            self.own_status = RankStatus(regular=False, broken=self.broken, late=late, used=self._used)
        return self.own_status

    def learn(self, *, regular: bool) -> None:
        """The step went well: expect the same gradients next time. `regular`: every rank said so."""
        if not self.absent:
            self.arrivals.learn(regular=regular)

    def _begin_to_reduce(self, report_each: bool) -> None:
        self._reduces = True
        self.number += 1
        self.arrivals.allow_sending(report_each=report_each)

    def _enter(self, state: StepState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"step {self.number} cannot go from {self.state.name} to {state.name}")
        self.state = state
