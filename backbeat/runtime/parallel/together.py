"""Ranks stay together while something may fail on one of them: by the job's store, never by a collective.

A rank that waits in a collective for one that raised waits until the timeout. At the store every rank leaves what came
of its part, good or bad, and reads what came of the others'.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from backbeat.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backbeat.comm.communicators import Communicators

_POLL_S = 0.05
_HEAD_START_S = 0.5
"""For the others to abort in."""


class Together:
    """What ranks tell each other; every rank makes the same calls in the same order."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.rank, self.size, self.device = communicators.rank, communicators.size, communicators.device
        self._calls = 0

    def every(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on all of them."""
        key, store = self._next(), self.communicators.store
        store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            found = [json.loads(store.get(f"{key}/{rank}")) for rank in range(self.size)]
            store.set(key, json.dumps(found))
        answer: list[Any] = json.loads(store.get(key))
        return answer

    def first(self, value: Any) -> Any:
        """What rank 0 gave."""
        key, store = self._next(), self.communicators.store
        if self.rank == 0:
            store.set(key, json.dumps(value))
        return json.loads(store.get(key))

    def failure(self, error: str | None, order: int = 0) -> str | None:
        """The error that came first by `order`, with its rank: others follow from it. None where no rank has one."""
        found = [(at, rank, text) for rank, (at, text) in enumerate(self.every([order, error])) if text is not None]
        return f"rank {min(found)[1]}: {min(found)[2]}" if found else None

    def raise_if_any(self, error: str | None, what: str) -> None:
        """Raise on every rank what went wrong on one."""
        found = self.failure(error)
        if found is not None:
            raise InputError(f"parallelize: {what}: {found}")

    @contextlib.contextmanager
    def released(self, backends: Sequence[Any]) -> Iterator[Callable[[], int]]:
        """Gives a function that ends the others' collectives on these backends, for a rank that cannot go on.

        It returns how many ranks have called it.

        Gloo needs no telling: a rank that takes its group down closes its connections, and the others raise. NCCL would
        wait, so on each rank a thread looks for the alarm and aborts. The rank that gives it aborts last: one that
        finds its peer gone before it aborts is taken down by torch, a minute later.
        """
        key = f"{self._next()}/alarm"
        nccl = self.communicators.backend == "nccl"
        done = threading.Event()
        thread = None
        if nccl:
            # The store's calls block each other: the thread has a connection of its own.
            shared: Any = self.communicators.store
            thread = threading.Thread(target=_abort_on_alarm, args=(shared.clone(), key, backends, done), daemon=True)
            thread.start()

        def alarm() -> int:
            # Before the thread could hear it.
            done.set()
            order = int(self.communicators.store.add(key, 1))
            if nccl:
                time.sleep(_HEAD_START_S)
                _abort(backends)
            return order

        try:
            yield alarm
        finally:
            done.set()
            if thread is not None:
                thread.join()

    def _next(self) -> str:
        self._calls += 1
        return f"parallelize/{self._calls}"


def _abort_on_alarm(store: Any, key: str, backends: Sequence[Any], done: threading.Event) -> None:
    while not done.wait(_POLL_S):
        if store.check([key]):
            _abort(backends)
            return


def _abort(backends: Sequence[Any]) -> None:
    for backend in backends:
        backend.abort()
