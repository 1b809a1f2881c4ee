"""Hooks on parameters: each counts its gradient down, and tells on which CUDA stream it was made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from backbeat.runtime.reduce.step import Arrivals
from backbeat.runtime.torch_internals import graph_task

if TYPE_CHECKING:
    from backbeat.runtime.reduce.exchange import Sender


class Streams:
    """CUDA streams on which a bucket's gradients were produced; the one that sends the bucket waits for the others."""

    __slots__ = ("_device", "_first", "_index", "_others")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.reset()

    def reset(self) -> None:
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


class GradientHooks:
    """A hook on each parameter counts its gradients down. It is behind the user's own: ours may take the gradient away.

    `note_unusual` hears of arrivals that are not ordinary, the sender of a bucket that is complete. Both are held
    weakly: a wrapper that is dropped must stop communicating, though its model lives on.
    """

    def __init__(self, arrivals: Arrivals, note_unusual: Callable[[int], None], sender: Sender) -> None:
        """note_unusual: a method."""
        self._arrivals = arrivals
        self._note_unusual, self._sender = weakref.WeakMethod(note_unusual), weakref.ref(sender)
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
        arrivals, note_unusual, sender = self._arrivals, self._note_unusual, self._sender

        def arrived(_: torch.Tensor) -> None:
            # This runs once a gradient and is most of what the wrapper costs: `Arrivals.count` is written out here.
            if arrivals.report_each or graph_task() != arrivals.root:
                if (note := note_unusual()) is not None:
                    note(index)
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
            if not left and (sends := sender()) is not None:
                sends.send_ready()

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
