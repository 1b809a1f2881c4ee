"""What autograd reports: whether a backward runs, and which gradients have arrived, on which CUDA stream.

A hook on every parameter counts gradients down until a bucket is complete (`GradientHooks`, `Arrivals`).

How often each parameter's gradient arrives in one backward is learned from the steps before. It only decides *when* a
bucket may leave, never *whether*. A bucket waits for what does not arrive until backward ends, and what arrives after
its bucket has left is sent after it. So ranks need not agree on what they expect.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from backbeat.runtime.reduce.bucket import BucketSet
from backbeat.runtime.weak_call import nothing

logger = logging.getLogger("backbeat.runtime")

graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_TASK = -1
"""What it says outside of a backward."""
_LET_GO_S = 1.0
"""So long a thread of autograd's may take to let go of a backward that raised."""


class Backward:
    """The last one that was begun, if any.

    The engine runs a callback that is queued in it when the graph is done. If autograd raises, it drops the callback
    unrun: that the object is gone tells that the backward is over.
    """

    def __init__(self) -> None:
        self._token: Callable[[], Any] = nothing
        self._thread = threading.get_ident()
        """The thread that began it."""

    @property
    def running(self) -> bool:
        """As far as is known: see `ended`."""
        return self._token() is not None

    def begin(self, done: Callable[[], None]) -> None:
        """Called inside a backward; `done` when its graph is."""
        # An object of its own, which lives as long as the engine holds it.
        callback = functools.partial(done)
        Variable._execution_engine.queue_callback(callback)
        self._token = weakref.ref(callback)
        self._thread = threading.get_ident()

    def forget(self) -> None:
        """It is over, however it ended."""
        self._token = nothing

    def ended(self) -> bool:
        """Whether it is over. On a GPU a thread of autograd's own runs it, and may hold on to it for a moment after
        `backward()` has raised, until it gets the interpreter's lock. We give it that time: otherwise the rest of that
        backward would come in the middle of the next one."""
        until = time.monotonic() + _LET_GO_S
        while self.running:
            # A forward inside a backward may well find it running, and one beside a backward of another thread.
            if graph_task() != NO_TASK or _is_pythons(self._thread):
                return False
            if time.monotonic() > until:
                logger.warning("a backward seems to run beside this forward")
                return False
            time.sleep(0.0005)
        return True


def _is_pythons(ident: int) -> bool:
    """Whether Python started the thread, and not autograd."""
    # A thread of another's making has a stand-in here once it has asked who it is.
    found = (thread for thread in threading.enumerate() if thread.ident == ident)
    return any(not isinstance(thread, threading._DummyThread) for thread in found)


class GraphReach:
    """Whether the graph that the engine runs ends in our parameters.

    model(x).sum().backward()                          an output is reached, and parameters are in the graph: a step
    torch.autograd.grad(model(x).sum(), x)             an output is reached, and no parameter: no step
    checkpoint(model, x, use_reentrant=True)           parameters are not in the graph, and their gradients come
                                                       nevertheless: every graph counts from then on
    model.module(x).sum().backward()                   gradients come without a forward of the wrapper: this rank's
    """

    def __init__(self) -> None:
        self._hidden = False
        """Some parameters are inside reentrant checkpoints."""
        self._passed = False
        """Since the last forward, a backward has reached an output and seemed to end in no parameter."""
        self._forwarded = True
        """A forward has run since the last backward that was known to end in our parameters, or there was none yet."""
        self._leaf: Any = None

    def forward_begins(self) -> None:
        self._passed = False
        self._forwarded = True

    def announced(self) -> None:
        """An output has announced a backward that ends in our parameters."""
        self._forwarded = False

    def unannounced(self) -> bool:
        """A gradient arrived though no output announced it. False: it is of no forward of the wrapper's, as where one
        rank takes gradients of the model inside by itself."""
        self._hidden = self._hidden or (self._passed and self._forwarded)
        return self._forwarded

    def includes(self, parameters: Sequence[Parameter]) -> bool:
        if self._hidden or (self._leaf is not None and _will_execute(self._leaf)):
            return True
        for parameter in parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                if _will_execute(node):
                    # Finding a parameter's node costs more than a launch: the first that tells is asked first again.
                    self._leaf = node
                    return True
        self._passed = True
        return False


def _will_execute(leaf: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        # Torch's answer where `torch.autograd.grad` was asked for this very leaf: its gradient is handed out, not kept.
        return False


class Streams:
    """CUDA streams on which a bucket's gradients were produced; the one that sends the bucket waits for the others."""

    __slots__ = ("_device", "_first", "_index", "_others")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.forget()

    def forget(self) -> None:
        """Another backward begins."""
        self._first: int | None = None
        self._others: dict[int, set[int]] = {}

    def note(self, index: int) -> None:
        """A gradient of this bucket was just produced on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream != self._first:
            if self._first is None:
                self._first = stream
            else:
                self._others.setdefault(index, set()).add(stream)

    def join(self, index: int) -> None:
        """The current stream waits for those that produced the bucket's gradients."""
        if not self._others and self._first in (None, torch._C._cuda_getCurrentRawStream(self._index)):
            # As mostly: one stream, and it is this one. Asking for it as an object takes longer than all else here.
            return
        here = torch.cuda.current_stream(self._device)
        for raw in {self._first, *self._others.get(index, ())}:
            if raw != here.cuda_stream:
                here.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))


# A parameter that stops arriving is still waited for this many steps, twice as many each time that proves too few.
PATIENCE = 4


class Arrivals:
    """Which gradients of the present backward have arrived, and how often each is expected. One object serves every
    step: the hooks hold it."""

    __slots__ = (
        "_all_came", "_all_once", "_buckets", "_expected", "_expected_members", "_known", "_missed", "_patience",
        "arrived_since_reduce", "bucket_of", "late", "missing", "nested", "next_bucket", "outstanding", "report_each",
        "root", "streams",
    )  # fmt: skip

    def __init__(self, parameters: int, streams: Streams | None = None) -> None:
        self._expected: list[int] = []
        """How often each parameter is expected to arrive."""
        self._known = False
        """That was learned from a step."""
        self._all_once = True
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
        """Arrivals go through `StepRunner._arrived`: nothing may leave yet, or somebody wants to hear of each."""
        self.root = -1
        """The engine's number of this backward; arrivals inside another come from a reentrant checkpoint."""
        self.nested = False
        """Some did."""
        self.late: set[int] = set()
        """Parameters that arrived after their bucket had left."""
        if self.streams is not None:
            self.streams.forget()

    def allow_sending(self, *, report_each: bool) -> None:
        """Complete buckets may leave from now on, where it is known how often each parameter arrives."""
        self.report_each = report_each or not self._known

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

    def may_leave(self, index: int) -> bool:
        """Whether a complete bucket may leave before backward ends."""
        return index == self.next_bucket and self._known

    def regular(self) -> bool:
        """Every parameter arrived once, in this backward's own graph."""
        return self._all_once and not (self.late or self.nested or any(self.outstanding))

    def learn(self, *, regular: bool) -> None:
        """After a step: expect what came. `regular`: every parameter came once on every rank."""
        if regular and self._known:
            self._all_came = True
            return
        if self.nested:
            return
        if self._all_came:
            self._missed = [0] * len(self._missed)
            self._all_came = False
        changed = False
        for index, outstanding in enumerate(self.outstanding):
            if outstanding < 0 and self._known:
                self._patience[index] *= 2
            elif outstanding > 0:
                self._missed[index] += 1
                if self._known and self._missed[index] < self._patience[index]:
                    continue
            self._missed[index] = 0
            if outstanding:
                self._expected[index] -= outstanding
                changed = True
        self._known = True
        if changed:
            self._all_once = all(count == 1 for count in self._expected)
            self._expected_members = self._buckets.expected_members(self._expected)


class GradientHooks:
    """A hook on each parameter counts its gradients down. It is behind the user's own: ours may take the gradient away.

    `on_unusual` hears of arrivals that are not ordinary, `send_ready` when a bucket is complete. Both hold their object
    weakly: a wrapper that is dropped must stop communicating, though its model lives on.
    """

    def __init__(self, arrivals: Arrivals, on_unusual: Callable[[int], None], send_ready: Callable[[], None]) -> None:
        self._calls = (arrivals, on_unusual, send_ready)
        self._handles: list[Any] = []
        self._hooks: list[Any] = []
        """Of each parameter, all of them; torch's own dictionary."""

    def extend(self, parameters: Sequence[Any]) -> None:
        """Parameters that come after those there are."""
        for parameter in parameters:
            self._handles.append(self._register(parameter, len(self._handles)))
            self._hooks.append(parameter._post_accumulate_grad_hooks)

    def _register(self, parameter: Parameter, index: int) -> Any:
        arrivals, on_unusual, send_ready = self._calls

        def arrived(_: torch.Tensor) -> None:
            # This runs once a gradient and is most of what the wrapper costs: `Arrivals.count` is written out here.
            if arrivals.report_each or graph_task() != arrivals.root:
                on_unusual(index)
                return
            arrivals.arrived_since_reduce[index] = 1
            bucket = arrivals.bucket_of[index]
            if arrivals.streams is not None:
                arrivals.streams.note(bucket)
            counts = arrivals.outstanding
            outstanding = counts[index] - 1
            counts[index] = outstanding
            if outstanding:
                if outstanding < 0 and bucket < arrivals.next_bucket:
                    arrivals.late.add(index)
                return
            missing = arrivals.missing
            left = missing[bucket] - 1
            missing[bucket] = left
            if not left and bucket == arrivals.next_bucket:
                send_ready()

        return parameter.register_post_accumulate_grad_hook(arrived)

    def restore(self) -> None:
        """Cheap where nobody else has a hook: a user may register one at any time."""
        if max(map(len, self._hooks), default=0) <= 1:
            return
        for hooks, handle in zip(self._hooks, self._handles, strict=True):
            if handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
