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

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup

from backbeat.comm.communicators import Communicators, abort
from backbeat.errors import BackbeatError, CommunicationError, InputError, first_line, where_raised

T = TypeVar("T")
WaitForKeys = Callable[[Sequence[str], Sequence[str]], None]
"""Waits until all of the first keys are in the store; of the second each rank writes its own."""

_POLL_S = 0.05
_HEAD_START_S = 0.5
"""How long a rank that gives the alarm waits before it aborts, so that the others abort first."""
_LONGEST_WAIT = timedelta(seconds=2)
"""The longest that ranks wait for each other where nothing but timing depends on it."""
_AFTER_A_MISS = timedelta(seconds=0.2)
"""The same once a rank did not come: it may never come again."""
_calls: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Calls of `same_on_all_ranks` on each process group: their number makes ranks use the same keys of the store."""


def agree(communicators: Communicators, topic: str, lines: Sequence[str], what: str) -> None:
    """Raise on every rank, naming the first difference, unless all ranks hold these lines."""
    if communicators.size == 1:
        return
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store = communicators.store
    if communicators.rank == 0:
        store.set(f"{topic}/text", text)
        store.set(f"{topic}/hash", digest)
    difference = ""
    if store.get(f"{topic}/hash").decode() != digest:
        theirs = store.get(f"{topic}/text").decode().split("\n")
        difference = f"{what} differs between ranks: {first_difference(theirs, list(lines), communicators.rank)}"
        store.set(f"{topic}/difference", difference)
    if total(communicators, 1.0 if difference else 0.0) > 0:
        raise InputError(
            (difference or store.get(f"{topic}/difference").decode())
            + ". Every rank must build the same model and give the same plan"
        )


def wait_for_all(communicators: Communicators, topic: str, what: str, advice: str) -> None:
    """Wait until every rank is here, by the store alone. Ranks that are not here yet may be sending gradients, and on
    gloo a message of another size among these ends the process. `advice` is for a rank that others leave alone."""
    if communicators.size == 1:
        return
    store = communicators.store
    if store.add(f"{topic}/here", 1) == communicators.size:
        store.set(f"{topic}/all", "")
    try:
        store.wait([f"{topic}/all"], communicators.timeout)
    except DistStoreError as error:
        raise CommunicationError(
            f"rank {communicators.rank}: {what} on this rank, and only {store.add(f'{topic}/here', 0)} of "
            f"{communicators.size} ranks came to compare it: {advice}"
        ) from error


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


def share(communicators: Communicators, topic: str, value: str | None) -> str:
    """Rank 0's text on every rank."""
    if communicators.size == 1:
        return value or ""
    if communicators.rank == 0:
        communicators.store.set(topic, value or "")
        return value or ""
    return str(communicators.store.get(topic).decode())


def total(communicators: Communicators, value: float) -> float:
    """The sum of every rank's figure."""
    figure = torch.tensor([value], dtype=torch.float32, device=communicators.device)
    communicators[0].all_reduce(figure).wait()
    return float(figure.item())


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "…"


def _around(theirs: str, mine: str) -> tuple[str, str]:
    """The parts around the first differing character of two long lines."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    start = max(at - 60, 0)
    return repr("…" + theirs[start : at + 60] + "…"), repr("…" + mine[start : at + 60] + "…")


def collect(communicators: Communicators, topic: str, value: Any, within: timedelta) -> list[Any] | None:
    """On rank 0, what every rank left for this topic, which the store then forgets; None on the others. Raises
    TimeoutError where some rank leaves nothing in time."""
    keys = [f"{topic}/{rank}" for rank in range(communicators.size)]
    communicators.store.set(keys[communicators.rank], json.dumps(value))
    if communicators.rank != 0:
        return None
    try:
        communicators.store.wait(keys, within)
    except RuntimeError as error:
        # As every kind of store raises it.
        raise TimeoutError(f"{topic}: some rank left nothing in {within.total_seconds():g} s") from error
    found = [json.loads(communicators.store.get(key)) for key in keys]
    for key in keys:
        communicators.store.delete_key(key)
    return found


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
    found = _every(what, store, "said", dist.get_rank(), dist.get_world_size(), [error, said])
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
def answering(caller: str) -> Iterator[None]:
    """Turns a store that does not answer into an error: the rank that keeps it, mostly rank 0, is gone."""
    try:
        yield
    except DistNetworkError as error:
        raise CommunicationError(
            f"{caller}: the job's store does not answer ({first_line(error)}): the rank that keeps it, mostly "
            "rank 0, is gone; look at what it printed last, and start again on every rank"
        ) from error


def _every(
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
    """What is left under these keys, each rank at its own."""
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
    """Values that ranks exchange in the job's store, never by a collective. Every rank makes the same calls in the same
    order."""

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

    def every(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks, on all of them."""
        return _every(self._caller, self.communicators.store, self._next(), self.rank, self.size, value, self.waiting)

    def first(self, value: Any) -> Any:
        """What rank 0 gave."""
        key, store = self._next(), self.communicators.store
        with answering(self._caller):
            if self.rank == 0:
                store.set(key, json.dumps(value))
            return json.loads(*_wait(self._caller, store, [key], [key], self.waiting))

    def failure(self, error: str | None, order: int = 0) -> str | None:
        """The first error by `order`, with its rank; later ones follow from it. None where no rank has one."""
        found = [(at, rank, text) for rank, (at, text) in enumerate(self.every([order, error])) if text is not None]
        return f"rank {min(found)[1]}: {min(found)[2]}" if found else None

    def raise_on_all(self, call: Callable[[], T], what: str) -> T:
        """What the call returns on this rank; what it raises on one rank is raised on all."""
        found, error = None, None
        try:
            found = call()
        except Exception as raised:
            error = _in_words(raised)
        failed = self.failure(error)
        if failed is not None:
            raise InputError(f"{self._caller}: {what}: {failed}")
        return cast("T", found)

    def first_of(self, call: Callable[[], Any], what: str) -> Any:
        """What the call returns on rank 0, which alone makes it."""
        return self.first(self.raise_on_all(call if self.rank == 0 else lambda: None, what))

    def wait_for_others(self) -> None:
        """Wait until every rank has come here as often as this one. It does not wait long: a rank that failed never
        comes, and what is timed next is timed without it."""
        self._come("here", "")

    def compare(self, what: str, value: float) -> list[float]:
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
