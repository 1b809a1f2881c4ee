"""Which gradients of a backward have arrived, and on which CUDA streams.

A hook on every parameter counts gradients down until a bucket is complete (`GradientHooks`, `Arrivals`).

How often each parameter's gradient arrives in one backward is learned from the steps before. It only decides *when* a
bucket may leave, never *whether*. A bucket waits for what does not arrive until backward ends, and what arrives after
its bucket has left is sent after it. So ranks need not agree on what they expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from backbeat.runtime.reduce.backward import graph_task
from backbeat.runtime.reduce.bucket import BucketSet

PATIENCE = 4
"""A parameter that stops arriving is still waited for this many steps, twice as many each time that proves too few."""


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


class Arrivals:
    """Which gradients of the present backward have arrived, and how often each is expected. One object serves every
    step: the hooks hold it."""

    __slots__ = (
        "_all_came", "_all_once", "_buckets", "_expected", "_expected_members", "_missed", "_patience",
        "arrived_since_reduce", "bucket_of", "known", "late", "missing", "nested", "next_bucket", "outstanding",
        "report_each", "root", "streams",
    )  # fmt: skip

    def __init__(self, parameters: int, streams: Streams | None = None) -> None:
        self._expected: list[int] = []
        """How often each parameter is expected to arrive."""
        self.known = False
        """That was learned from a step: a complete bucket may leave before backward ends."""
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

    def regular(self) -> bool:
        """Every parameter arrived once, in this backward's own graph."""
        return self._all_once and not (self.late or self.nested or any(self.outstanding))

    def learn(self, *, regular: bool) -> None:
        """After a step: expect what came. `regular`: every parameter came once on every rank."""
        if regular and self.known:
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

    def extend(self, parameters: Sequence[Any], first: int) -> None:
        """More parameters, numbered from `first`."""
        for index, parameter in enumerate(parameters, first):
            trains = parameter.requires_grad
            # Torch refuses a hook on one that is frozen, as all are in a copy that serves as a teacher.
            parameter.requires_grad_(True)
            self._handles.append(self._register(parameter, index))
            parameter.requires_grad_(trains)
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
            # Not only the next bucket: those before it may expect nothing and wait for no gradient of their own.
            if not left:
                send_ready()

        return parameter.register_post_accumulate_grad_hook(arrived)

    def restore(self) -> None:
        """Put our hooks behind the user's again, who may register one at any time. Cheap where nobody did."""
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
