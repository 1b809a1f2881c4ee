"""What autograd's engine tells of a backward: whether it runs, whether it is over, and whether it reaches parameters.

The engine runs a callback that is queued in it when the graph is done. If autograd raises, it drops the callback unrun;
that the object is gone tells that the backward is over.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Parameter

logger = logging.getLogger("backbeat.runtime")

graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_TASK = -1
"""What it says outside of a backward."""
_LET_GO_S = 1.0
"""So long a thread of autograd's may take to let go of a backward that raised."""


class _GraphDone:
    """Queued in the engine; its life is the life of the backward it was queued in."""

    __slots__ = ("__weakref__", "_done")

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def __call__(self) -> None:
        self._done()


def _gone() -> None:
    return None


class Backward:
    """The last one that was begun, if any."""

    def __init__(self) -> None:
        self._token: Callable[[], Any] = _gone
        self._thread = threading.get_ident()
        """Began it."""

    @property
    def running(self) -> bool:
        """As far as is known: see `ended`."""
        return self._token() is not None

    def begin(self, done: Callable[[], None]) -> None:
        """Called inside a backward; `done` when its graph is."""
        callback = _GraphDone(done)
        Variable._execution_engine.queue_callback(callback)
        self._token = weakref.ref(callback)
        self._thread = threading.get_ident()

    def forget(self) -> None:
        """It is over, however it ended."""
        self._token = _gone

    def ended(self) -> bool:
        """Whether it is over. Where it ran in a thread of autograd's own, as on a GPU, that thread may hold on to it
        for a moment after `backward()` has raised, until it gets the interpreter's lock: it is given the time, or what
        is left to do of that backward would come in the middle of the next one."""
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

    `torch.autograd.grad` passes the wrapper's outputs and leaves no `.grad`. Parameters inside reentrant checkpoints
    are not in the graph either; where they once began a step by themselves, every graph counts from then on.
    """

    def __init__(self) -> None:
        self._hidden = False
        self._passed = False
        self._leaf: Any = None

    def forward_begins(self) -> None:
        self._passed = False

    def surprised(self) -> None:
        """A gradient arrived though no output announced it."""
        self._hidden = self._hidden or self._passed

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
