"""Lets ranks compare results through the job's store, never by a collective, while any of them may fail.

A rank that waits in a collective for one that raised waits until the timeout. In the store every rank leaves its
result, good or bad, and reads the others'.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup

from backbeat.errors import BackbeatError, CommunicationError, InputError, MeasurementError, first_line
from backbeat.measure.model.training_step import where_raised
from backbeat.runtime.parallel.heartbeat import Heartbeat, LostRankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backbeat.comm.communicators import Communicators

T = TypeVar("T")

_POLL_S = 0.05
_HEAD_START_S = 0.5
"""How long a rank that gives the alarm waits before it aborts, so that the others abort first."""
_LINE_UP = timedelta(seconds=2)
"""The longest that ranks wait for each other where nothing but timing depends on it."""


_calls: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Calls of `asked_alike` on each process group so far: their number makes ranks use the same keys of the store."""


@contextlib.contextmanager
def asked_alike(what: str) -> Iterator[dict[str, Any]]:
    """An error raised inside on one rank is raised on every rank. So is a difference between the dictionaries that
    ranks fill. Otherwise the ranks that go on would wait for those that do not."""
    said: dict[str, Any] = {}
    error = None
    try:
        yield said
    except Exception as raised:
        if dist.get_world_size() == 1:
            raise
        error = _in_words(raised)
    if dist.get_world_size() == 1:
        return
    world: Any = dist.group.WORLD
    _calls[world] = _calls.get(world, 0) + 1
    store = PrefixStore(f"backbeat/asked/{_calls[world]}", dist.distributed_c10d._get_default_store())
    found = _every(store, "said", dist.get_rank(), dist.get_world_size(), [error, said])
    errors = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
    if errors:
        rank, text = next(iter(errors.items()))
        alike = len(errors) == len(found) and len(set(errors.values())) == 1
        raise InputError(text if alike else f"{what}: rank {rank}: {text}")
    first = found[0][1]
    for rank, (_, other) in enumerate(found):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise InputError(
                    f"{what}: {name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}: give the "
                    "same on every rank"
                )


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, BackbeatError) else where_raised(error)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Says who is lost where the store is: one of the ranks keeps it, unless torchrun does."""
    try:
        yield
    except DistNetworkError as error:
        raise CommunicationError(
            f"parallelize: the job's store does not answer ({first_line(error)}): the rank that keeps it, mostly "
            "rank 0, is gone; look at what it printed last, and start again on every rank"
        ) from error


@_answering()
def _every(store: Any, key: str, rank: int, size: int, value: Any, heartbeat: Heartbeat | None = None) -> list[Any]:
    keys = [f"{key}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(value))
    if rank == 0:
        store.set(key, json.dumps([json.loads(text) for text in _wait(store, keys, keys, heartbeat)]))
    answer: list[Any] = json.loads(*_wait(store, [key], keys, heartbeat))
    return answer


def _wait(store: Any, wanted: Sequence[str], by_rank: Sequence[str], heartbeat: Heartbeat | None = None) -> list[bytes]:
    """What is left under these keys, each rank at its own."""
    try:
        if heartbeat is not None:
            heartbeat.wait(wanted, by_rank)
        return [store.get(key) for key in wanted]
    except DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(by_rank) if not store.check([key])]
        raise CommunicationError(
            f"parallelize waited {store.timeout.total_seconds():g} s for rank {', '.join(missing) or '0'}: it ended, "
            "hangs, or did not call parallelize; look at what it printed last, and start again on every rank"
        ) from error


class RankStore:
    """Values that ranks exchange. Every rank makes the same calls in the same order."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.rank, self.size, self.device = communicators.rank, communicators.size, communicators.device
        self._calls = self._lined_up = 0
        self._heartbeat: Heartbeat | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a rank that is lost is named by all others, soon: where they wait for it, and where a collective
        fails."""
        self._heartbeat = heartbeat = Heartbeat(self.communicators.store, self.rank, self.size)
        heartbeat.start()
        try:
            yield
        except LostRankError:
            raise
        except (RuntimeError, MeasurementError) as error:
            with _answering():
                heartbeat.name_lost(error)
            raise
        finally:
            heartbeat.stop()
            self._heartbeat = None

    def every(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on all of them."""
        return _every(self.communicators.store, self._next(), self.rank, self.size, value, self._heartbeat)

    @_answering()
    def first(self, value: Any) -> Any:
        """What rank 0 gave."""
        key, store = self._next(), self.communicators.store
        if self.rank == 0:
            store.set(key, json.dumps(value))
        return json.loads(*_wait(store, [key], [key], self._heartbeat))

    def failure(self, error: str | None, order: int = 0) -> str | None:
        """The first error by `order`, with its rank; later ones follow from it. None where no rank has one."""
        found = [(at, rank, text) for rank, (at, text) in enumerate(self.every([order, error])) if text is not None]
        return f"rank {min(found)[1]}: {min(found)[2]}" if found else None

    def together(self, call: Callable[[], T], what: str) -> T:
        """What the call returns on this rank; what it raises on one rank is raised on all."""
        found, error = None, None
        try:
            found = call()
        except Exception as raised:
            error = _in_words(raised)
        failed = self.failure(error)
        if failed is not None:
            raise InputError(f"parallelize: {what}: {failed}")
        return cast("T", found)

    def first_of(self, call: Callable[[], Any], what: str) -> Any:
        """What the call returns on rank 0, which alone makes it."""
        return self.first(self.together(call if self.rank == 0 else lambda: None, what))

    def line_up(self) -> None:
        """Wait until every rank has come here as often as this one. It does not wait long: a rank that failed never
        comes, and what is timed next is timed without it."""
        self._lined_up += 1
        keys = [f"line-up/{self._lined_up}/{rank}" for rank in range(self.size)]
        self.communicators.store.set(keys[self.rank], "")
        with contextlib.suppress(DistStoreError):
            self.communicators.store.wait(keys, _LINE_UP)

    @contextlib.contextmanager
    def released(self, backends: Sequence[Any]) -> Iterator[Callable[[], int]]:
        """Yields an alarm: a function by which a rank that cannot go on ends the others' collectives on these backends.

        It returns how many ranks have called it.

        Gloo needs no telling: a rank that takes its group down closes its connections, and the others raise. NCCL would
        wait, so on each rank a thread looks for the alarm and aborts. The rank that gives the alarm aborts last: torch
        takes down a rank whose peer is gone before it has aborted, a minute later.
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

        @_answering()
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
