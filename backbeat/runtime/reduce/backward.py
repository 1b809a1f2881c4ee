"""Whether a backward runs, and whether it ends in our parameters: what autograd's engine knows."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from backbeat.runtime.torch_internals import NO_TASK, graph_task, queue_callback, will_engine_execute

logger = logging.getLogger("backbeat.runtime")

_gone: Callable[[], Any] = weakref.ref(set())
"""Refers to nothing."""
_LET_GO_S = 1.0
"""So long a thread of autograd's may take to let go of a backward that raised."""


class Backward:
    """The last one that was begun, if any.

    The engine runs a callback that is queued in it when the graph is done. If autograd raises, it drops the callback
    unrun: that the object is gone tells that the backward is over.
    """

    def __init__(self) -> None:
        self._token: Callable[[], Any] = _gone
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
        queue_callback(callback)
        self._token = weakref.ref(callback)
        self._thread = threading.get_ident()

    def over(self) -> None:
        """It has ended, however."""
        self._token = _gone

    def ended(self) -> bool:
        """Whether it is over. On a GPU a thread of autograd's own runs it, and may hold on to it for a moment after
        `backward()` has raised, until it gets the interpreter's lock. We give it that time: otherwise the rest of that
        backward would come in the middle of the next one."""
        until = time.monotonic() + _LET_GO_S
        while self.running:
            # A forward inside a backward may well find it running, and one beside a backward of another thread.
            if graph_task() != NO_TASK or _started_by_python(self._thread):
                return False
            if time.monotonic() > until:
                logger.warning("a backward seems to run beside this forward")
                return False
            time.sleep(0.0005)
        return True


def _started_by_python(ident: int) -> bool:
    """Whether Python started the thread: otherwise autograd did."""
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
        self.forwarded = True
        """A forward has run since the last backward that was known to end in our parameters, or there was none yet."""
        self._leaf: Any = None

    def forward_begins(self) -> None:
        self._passed = False
        self.forwarded = True

    def note_unannounced(self) -> bool:
        """A gradient arrived though no output announced it. Returns whether it may be of a forward of the wrapper's; it
        is of none where one rank takes gradients of the model inside by itself."""
        self._hidden = self._hidden or (self._passed and self.forwarded)
        return self.forwarded

    def announced(self, parameters: Sequence[Parameter]) -> bool:
        """An output was reached: whether the backward ends in our parameters."""
        if self._hidden or (self._leaf is not None and _will_execute(self._leaf)):
            self.forwarded = False
            return True
        for parameter in parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                if _will_execute(node):
                    # Finding a parameter's node costs more than a launch: the first that tells is asked first again.
                    self._leaf = node
                    self.forwarded = False
                    return True
        self._passed = True
        return False


def _will_execute(leaf: Any) -> bool:
    try:
        return bool(will_engine_execute(leaf))
    except RuntimeError:
        # Torch's answer where `torch.autograd.grad` was asked for this very leaf: its gradient is handed out, not kept.
        return False
