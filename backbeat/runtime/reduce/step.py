"""One backward of one rank is one step: its state machine (`Step`), when things happened in it (`Recorder`), and what
the parts of a reducer share (`ReducerContext`).

ARCHITECTURE.md draws its states. Only this module writes them: whoever packs, sends or waits for a bucket returns what
came of it, and the runner (`runner.StepRunner`) hands that to a method here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

from backbeat.comm.communicators import Communicators
from backbeat.errors import CommunicationError, InputError, first_line
from backbeat.runtime.reduce.failures import Monitor
from backbeat.units import first_to_last, format_bytes

if TYPE_CHECKING:
    from backbeat.runtime.reduce.arrivals import Arrivals
    from backbeat.runtime.reduce.bucket import BucketMemory, BucketSet


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
        self.told: RankStatus | None = None
        """What this rank told the others, once the last bucket has left."""
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
        self.told = None
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
        accumulated = self.state is StepState.ACCUMULATING
        self._enter(StepState.IDLE)
        if not accumulated:
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

    def add_status_sent(self, sent: InFlight) -> None:
        """The status message has left on its own."""
        self.status_in_flight = sent

    def tell(self) -> RankStatus:
        """What this rank says of the step, when its last bucket is about to leave: nothing more can happen."""
        arrivals = self.arrivals
        if not self.contributes_nothing and not self._removed and arrivals.regular():
            self.told = _REGULAR
        else:
            late = sorted({arrivals.bucket_of[index] for index in arrivals.late})
            for bucket in self._whole:
                for index in bucket.members:
                    self._used[index] = 1
            self.told = RankStatus(regular=False, broken=self.broken, late=late, used=self._used)
        return self.told

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


@dataclass(slots=True, kw_only=True)
class TimedStep:
    """One backward, in seconds from its start."""

    ready_s: dict[int, float] = field(default_factory=dict)
    """By parameter."""
    launched_s: dict[int, float] = field(default_factory=dict)
    """By bucket, in launch order."""
    done_s: dict[int, float] = field(default_factory=dict)
    computed_s: float = 0.0
    """When the last gradient arrived."""
    ended_s: float = 0.0
    """When the step was over: every bucket back."""
    iteration_s: float | None = None
    """From the end of the step before to the end of this one, where both were seen."""
    since_forward_s: float | None = None
    """From the step's forward to its end, likewise."""

    @property
    def exposed_s(self) -> float:
        """Communication left after the last gradient."""
        return max(self.ended_s - self.computed_s, 0.0)


class Recorder:
    """Times steps on the host's clock, or with events on the device's."""

    def __init__(self, device: torch.device, keep: int = 64) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._keep = keep
        self._steps: list[TimedStep | dict[str, Any]] = []
        """Times, or the marks that they will be told from once the device has passed them."""
        self._marks: dict[str, Any] | None = None
        """Of the step under way, if it is timed."""
        self._before: Any = None
        """The end of the step before."""
        self._forward: Any = None

    def mark_step_end(self) -> None:
        """A step is over, and the next one will be timed."""
        self._before, self._forward = self._now(), None

    def forward_begins(self) -> None:
        if self._forward is None:
            self._forward = self._now()

    def begin(self, sync: bool) -> None:
        self._marks = {"begin": self._now(), "ready": {}, "launched": {}, "done": {}} if sync else None

    def gradient(self, index: int) -> None:
        if self._marks is not None:
            self._marks["ready"][index] = self._now()

    def launched(self, index: int, work: Any) -> None:
        if self._marks is None:
            return
        self._marks["launched"][index] = self._now()
        done = self._marks["done"]
        if not self._cuda and hasattr(work, "get_future"):
            # The worker thread that finished the collective writes the time down.
            work.get_future().add_done_callback(lambda _: done.setdefault(index, time.perf_counter()))

    def end(self) -> None:
        if self._marks is None:
            return
        self._marks.update(end=self._now(), before=self._before, forward=self._forward)
        # Marks on the device hold memory of the driver: none is kept for longer than it takes to read.
        self._steps = [*map(self._passed, self._steps), self._marks][-self._keep :]
        self._marks = self._before = self._forward = None

    def steps(self) -> list[TimedStep]:
        """Every step measured so far."""
        if self._cuda and self._steps:
            torch.cuda.synchronize(self._device)
        self._steps = list(map(self._passed, self._steps))
        return [one if isinstance(one, TimedStep) else self._resolve(one) for one in self._steps]

    def clear(self) -> None:
        self._steps.clear()

    def _passed(self, one: TimedStep | dict[str, Any]) -> TimedStep | dict[str, Any]:
        # On the host the end of a step says nothing about buckets that are back later.
        if isinstance(one, TimedStep) or not self._cuda or not one["end"].query():
            return one
        try:
            return self._resolve(one)
        except RuntimeError:
            # Another stream has not passed its marks.
            return one

    def _resolve(self, marks: dict[str, Any]) -> TimedStep:
        begin, end = marks["begin"], marks["end"]
        ready = self._times(begin, marks["ready"])
        ended = self._since(begin, end)
        before, forward = marks["before"], marks["forward"]
        return TimedStep(
            ready_s=ready,
            launched_s=self._times(begin, marks["launched"]),
            done_s=self._times(begin, marks["done"]),
            computed_s=max(ready.values(), default=ended),
            ended_s=ended,
            iteration_s=None if before is None else self._since(before, end),
            since_forward_s=None if forward is None else self._since(forward, end),
        )

    def _times(self, begin: Any, marks: dict[int, Any]) -> dict[int, float]:
        # A copy: the thread that finishes a collective may write to it at this moment.
        return {index: self._since(begin, mark) for index, mark in dict(marks).items()}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, begin: Any, mark: Any) -> float:
        if not self._cuda:
            return float(mark - begin)
        return max(float(begin.elapsed_time(mark)) * 1e-3, 0.0)


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


@dataclass(slots=True, kw_only=True)
class ReducerContext:
    """Parameters, the buckets they travel in, the communicators, and where training stands."""

    names: list[str]
    parameters: list[Parameter]
    communicators: Communicators
    reduce_dtype: torch.dtype | None
    step: Step
    scale: float
    """Gradients are multiplied by it before the sum."""
    late_buckets: int = 0
    """Buckets that had to be reduced again because a gradient came late."""
    recorder: Recorder | None = None
    """Times the present step, where it is to be timed."""
    bucket_set: BucketSet = None  # type: ignore[assignment]  # there from the first partition on
    lost: CommunicationError | None = None
    """A collective was lost while the host was not told; whatever it waits for now is void."""
    monitor: Monitor = None  # type: ignore[assignment]  # likewise: it asks the reducer where it stands

    def check_not_lost(self) -> None:
        """Raise if a collective has been lost."""
        if self.lost is not None:
            raise self.lost

    def check_format(self, error: RuntimeError) -> None:
        """Where gradients and buffers do not go together: raise if a parameter was given another format since."""
        for name, parameter, made in zip(self.names, self.parameters, self.bucket_set.formats, strict=True):
            found = (parameter.dtype, parameter.shape, parameter.device)
            if found != made:
                now, then = (f"{dtype} {tuple(shape)} on {device}" for dtype, shape, device in (found, made))
                raise InputError(
                    f"parameter {name!r} is {now}, and was {then} when the model was wrapped: convert a model before "
                    "wrapping it, or wrap it again"
                ) from error

    def failure(self, index: int, why: BaseException | str, *, step: int | None = None) -> CommunicationError:
        """A bucket did not arrive: which one, what was in it, and who is to blame."""
        if self.lost is not None:
            return self.lost
        said = why if isinstance(why, str) else first_line(why)
        bucket = self.bucket_set.buckets[index]
        return CommunicationError(
            f"rank {self.communicators.rank}: bucket {index} of {len(self.bucket_set.buckets)} "
            f"(gradients {first_to_last([self.names[member] for member in bucket.members])}, "
            f"{format_bytes(bucket.bytes)}) was not reduced in step {self.step.number if step is None else step}: "
            f"{self.monitor.blame()}. Restart from the last checkpoint (the library says: {said})"
        )
