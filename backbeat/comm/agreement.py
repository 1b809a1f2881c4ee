"""Ranks compare what they are about to do before they do it, and what came of it where any of them may fail.

A rank that waits in a collective for one that raised waits until the timeout. So what may fail goes through the job's
store: every rank leaves its result there, good or bad, and reads the others'.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup

from backbeat.comm.communicators import Communicators, abort
from backbeat.errors import AgreedError, BackbeatError, CommunicationError, first_line, where_raised
from backbeat.model.files import Document, decode, encode

T = TypeVar("T")
D = TypeVar("D", bound=Document | None)
WaitForKeys = Callable[[Sequence[str], Sequence[str]], None]
"""Waits until the keys given first are in the store. The second are those that each rank writes, one each."""

_POLL_S = 0.05
_HEAD_START_S = 0.5
"""How long a rank that gives the alarm waits before it aborts, so that the others abort first."""
_LONGEST_WAIT = timedelta(seconds=2)
"""The longest that ranks wait for each other where nothing but timing depends on it."""
_AFTER_A_MISS = timedelta(seconds=0.2)
"""The same once a rank did not come: it may never come again."""
_calls: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Calls of `same_on_all_ranks` on each process group: their number makes ranks use the same keys of the store."""


def first_difference(theirs: Sequence[str], mine: Sequence[str], rank: int) -> str:
    """
    >>> first_difference(["a", "b"], ["a", "c"], rank=3)
    "line 2 is 'b' on rank 0 and 'c' on rank 3"
    >>> first_difference(["a"], ["a", "c"], rank=3)
    "line 2 is missing on rank 0 and 'c' on rank 3"
    """
    for number, (their, my) in enumerate(zip_longest(theirs, mine), start=1):
        if their != my:
            there, here = ("missing" if line is None else repr(_short(line)) for line in (their, my))
            if there == here:
                there, here = _around(their, my)
            return f"line {number} is {there} on rank 0 and {here} on rank {rank}"
    return "nothing differs"


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "…"


def _around(theirs: str, mine: str) -> tuple[str, str]:
    """The parts around the first differing character of two long lines."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    start = max(at - 60, 0)
    return repr("…" + theirs[start : at + 60] + "…"), repr("…" + mine[start : at + 60] + "…")


@contextlib.contextmanager
def same_on_all_ranks(what: str) -> Iterator[dict[str, Any]]:
    """An error raised inside on one rank is raised on every rank. So is a difference between the dictionaries that
    ranks fill. Otherwise the ranks that go on would wait for those that do not. `what` is the call that all make."""
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
    found = _gather(what, store, "said", dist.get_rank(), dist.get_world_size(), [error, said])
    errors = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
    if errors:
        rank, text = next(iter(errors.items()))
        alike = len(errors) == len(found) and len(set(errors.values())) == 1
        raise AgreedError(text if alike else f"{what}: rank {rank}: {text}")
    first = found[0][1]
    for rank, (_, other) in enumerate(found):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise AgreedError(
                    f"{what}: {name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}: give the "
                    "same on every rank"
                )


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, BackbeatError) else where_raised(error)


@contextlib.contextmanager
def answering(caller: str) -> Iterator[None]:
    """Turns a store that does not answer into an error: the rank that keeps it, mostly rank 0, is gone."""
    try:
        yield
    except DistNetworkError as error:
        raise CommunicationError(
            f"{caller}: the job's store does not answer ({first_line(error)}): the rank that keeps it, mostly "
            "rank 0, is gone; look at what it printed last, and start again on every rank"
        ) from error


def _gather(
    caller: str, store: Any, key: str, rank: int, size: int, value: Any, waiting: WaitForKeys | None = None
) -> list[Any]:
    keys = [f"{key}/{other}" for other in range(size)]
    with answering(caller):
        store.set(keys[rank], json.dumps(value))
        if rank == 0:
            store.set(key, json.dumps([json.loads(text) for text in _wait(caller, store, keys, keys, waiting)]))
        answer: list[Any] = json.loads(*_wait(caller, store, [key], keys, waiting))
        return answer


def _wait(
    caller: str, store: Any, wanted: Sequence[str], by_rank: Sequence[str], waiting: WaitForKeys | None = None
) -> list[bytes]:
    """The values of the keys `wanted`, once all are there. `by_rank`: the key that each rank writes, so that an error
    can name the ranks that did not."""
    try:
        if waiting is not None:
            waiting(wanted, by_rank)
        return [store.get(key) for key in wanted]
    except DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(by_rank) if not store.check([key])]
        raise CommunicationError(
            f"{caller} waited {store.timeout.total_seconds():g} s for rank {', '.join(missing) or '0'}: it ended, "
            f"hangs, or did not call {caller}; look at what it printed last, and start again on every rank"
        ) from error


class RankStore:
    """Ranks exchange values through the job's store, which a rank that raised can still do. Every rank makes the same
    calls in the same order.

    from_rank_0, document_from_rank_0, call_on_rank_0     rank 0's value, on every rank
    gather, gather_some, collect_on_rank_0                every rank's value; of those that came in time; on rank 0
    agree, failure, attempt, raise_on_all                 a difference, or an error of one rank, on every rank
    wait_for_all, wait_for_others                         for ranks to meet: until the timeout; not for long
    """

    def __init__(self, communicators: Communicators, caller: str) -> None:
        """caller: the function that every rank calls, for messages."""
        self.communicators = communicators
        self._caller = caller
        self.rank, self.size, self.device = communicators.rank, communicators.size, communicators.device
        self._calls = 0
        self._waits: Counter[str] = Counter()
        self._missed = False
        self.waiting: WaitForKeys | None = None
        """How to wait for others, in place of the store's own way."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on all of them."""
        return _gather(self._caller, self.communicators.store, self._next(), self.rank, self.size, value, self.waiting)

    def from_rank_0(self, value: Any) -> Any:
        """What rank 0 gave."""
        key, store = self._next(), self.communicators.store
        with answering(self._caller):
            if self.rank == 0:
                store.set(key, json.dumps(value))
            return json.loads(*_wait(self._caller, store, [key], [key], self.waiting))

    def document_from_rank_0(self, document: D, kind: type[Document]) -> D:
        """The plan, profile or network that rank 0 gave."""
        text = self.from_rank_0(None if document is None else encode(document).decode())
        where = f"rank 0's {kind.__name__.lower()}"
        return cast("D", None if text is None else decode(text.encode(), kind, where=where))

    def call_on_rank_0(self, call: Callable[[], Any], what: str) -> Any:
        """What the call returns on rank 0, which alone makes it."""
        return self.from_rank_0(self.raise_on_all(call if self.rank == 0 else lambda: None, what))

    def failure(self, error: str | None, order: int = 0) -> str | None:
        """The first error by `order`, with its rank; later ones follow from it. None where no rank has one."""
        found = [(at, rank, text) for rank, (at, text) in enumerate(self.gather([order, error])) if text is not None]
        return f"rank {min(found)[1]}: {min(found)[2]}" if found else None

    def attempt(self, call: Callable[[], T]) -> tuple[T | None, str | None]:
        """What the call returns on this rank, None where it raised; and the error of the first rank that raised, None
        where none did."""
        found, error = None, None
        try:
            found = call()
        except Exception as raised:
            error = _in_words(raised)
        return found, self.failure(error)

    def raise_on_all(self, call: Callable[[], T], what: str) -> T:
        """What the call returns on this rank; what it raises on one rank is raised on all."""
        found, failed = self.attempt(call)
        if failed is not None:
            raise AgreedError(f"{self._caller}: {what}: {failed}")
        return cast("T", found)

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Raise on every rank, naming the first difference, unless all ranks hold these lines.

        One all-reduce tells every rank whether any differs. It is the only collective here: ranks that come to agree
        are about to run collectives.
        """
        if self.size == 1:
            return
        topic, store = self._next(), self.communicators.store
        text = "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.rank == 0:
            store.set(f"{topic}/text", text)
            store.set(f"{topic}/hash", digest)
        difference = ""
        if store.get(f"{topic}/hash").decode() != digest:
            theirs = store.get(f"{topic}/text").decode().split("\n")
            difference = f"{what} differs between ranks: {first_difference(theirs, list(lines), self.rank)}"
            store.set(f"{topic}/difference", difference)
        if self.communicators.sums([1.0 if difference else 0.0])[0] > 0:
            raise AgreedError(
                (difference or store.get(f"{topic}/difference").decode())
                + ". Every rank must build the same model and give the same plan and arguments"
            )

    def wait_for_all(self, what: str, advice: str) -> None:
        """Wait until every rank is here, by the store alone. Ranks that are not here yet may be sending gradients, and
        on gloo a message of another size among these ends the process. `advice` is for a rank that others leave
        alone."""
        if self.size == 1:
            return
        topic, store = self._next(), self.communicators.store
        if store.add(f"{topic}/here", 1) == self.size:
            store.set(f"{topic}/all", "")
        try:
            store.wait([f"{topic}/all"], self.communicators.timeout)
        except DistStoreError as error:
            raise CommunicationError(
                f"rank {self.rank}: {what} on this rank, and only {store.add(f'{topic}/here', 0)} of "
                f"{self.size} ranks came to compare it: {advice}"
            ) from error

    def collect_on_rank_0(self, topic: str, value: Any, within: timedelta) -> list[Any] | None:
        """On rank 0, what every rank left for this topic, which the store then forgets; None on the others. Raises
        TimeoutError where some rank leaves nothing in time."""
        store = self.communicators.store
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(value))
        if self.rank != 0:
            return None
        try:
            store.wait(keys, within)
        except RuntimeError as error:
            # As every kind of store raises it.
            raise TimeoutError(f"{topic}: some rank left nothing in {within.total_seconds():g} s") from error
        found = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return found

    def wait_for_others(self) -> None:
        """Wait until every rank has come here as often as this one. It does not wait long: a rank that failed never
        comes, and what is timed next is timed without it."""
        self._come("here", "")

    def gather_some(self, what: str, value: float) -> list[float]:
        """What every rank gave for this that came in time, this one's own at least. Waits no longer than
        `wait_for_others`."""
        keys = self._come(what, repr(value))
        return [float(text) for text in self.communicators.store.multi_get(keys)]

    def _come(self, what: str, text: str) -> list[str]:
        """The keys of those that came."""
        self._waits[what] += 1
        store = self.communicators.store
        keys = [f"others/{what}/{self._waits[what]}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        try:
            store.wait(keys, _AFTER_A_MISS if self._missed else _LONGEST_WAIT)
            self._missed = False
        except RuntimeError:
            # As every kind of store raises it.
            self._missed = True
            keys = [key for key in keys if store.check([key])]
        return keys

    @contextlib.contextmanager
    def alarm_for(self, backends: Sequence[Any]) -> Iterator[Callable[[], int]]:
        """Yields an alarm: a function by which a rank that cannot go on ends the others' collectives on these backends.
        It returns how many ranks have called it.

        Gloo needs no telling: a rank that takes its group down closes its connections, and the others raise. NCCL would
        wait for ever. There

        1. a rank fails, and calls the alarm, which writes a key into the store;
        2. on each of the others a thread finds the key and aborts the collectives, in which its rank waits;
        3. the rank that failed aborts its own last: torch takes down a rank whose peer is gone before it has aborted,
           a minute later.
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

        @answering(self._caller)
        def alarm() -> int:
            # Before the thread could hear it.
            done.set()
            order = int(self.communicators.store.add(key, 1))
            if nccl:
                time.sleep(_HEAD_START_S)
                abort(backends)
            return order

        try:
            yield alarm
        finally:
            done.set()
            if thread is not None:
                thread.join()

    def _next(self) -> str:
        self._calls += 1
        return f"{self._caller}/{self._calls}"


def _abort_on_alarm(store: Any, key: str, backends: Sequence[Any], done: threading.Event) -> None:
    while not done.wait(_POLL_S):
        if store.check([key]):
            abort(backends)
            return
