"""A backward of autograd's engine, seen through a callback that is queued in it.

The engine runs the callback when the graph is done. If autograd raises, it drops the callback unrun; that the object is
gone tells that the backward is over.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable

from backbeat.runtime.reduce.arrivals import NO_TASK, graph_task

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("backbeat.runtime")

_LET_GO_S = 1.0
"""So long a thread of autograd's may take to let go of a backward that raised."""


class _Close:
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
        close = _Close(done)
        Variable._execution_engine.queue_callback(close)
        self._token = weakref.ref(close)
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
            if graph_task() != NO_TASK or _is_ours(self._thread):
                return False
            if time.monotonic() > until:
                logger.warning("a backward seems to run beside this forward")
                return False
            time.sleep(0.0005)
        return True


def _is_ours(ident: int) -> bool:
    """Whether Python started the thread, and not autograd."""
    # A thread of another's making has a stand-in here once it has asked who it is.
    found = (thread for thread in threading.enumerate() if thread.ident == ident)
    return any(not isinstance(thread, threading._DummyThread) for thread in found)
