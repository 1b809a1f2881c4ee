"""Tells a rank that is gone from one that is slow: while a search runs, a thread on each counts in the job's store.

A rank counts on however long its step takes. Who waits for another looks whether that one still counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import DistStoreError

from backbeat.comm.agreement import RankStore, answering
from backbeat.errors import LostRankError, MeasurementError, do_not_answer, first_line

BEAT_S = 1.0
LOST_S = 30.0
"""A rank that has not counted for so long is lost: its process is gone or stands still. A thread may wait some seconds
for the interpreter, or for a busy machine."""
FAILED_S = 5.0
"""The same where a collective has failed already."""
_LONGEST_PAUSE_S = 0.05


@contextlib.contextmanager
def heartbeat_of(ranks: RankStore) -> Iterator[None]:
    """Inside, a rank that is lost is named by all others, soon: where they wait for it, and where a collective
    fails."""
    heartbeat = Heartbeat(ranks.communicators.store, ranks.rank, ranks.size)
    ranks.waiting = heartbeat.wait
    heartbeat.start()
    try:
        yield
    except LostRankError:
        raise
    except (RuntimeError, MeasurementError) as error:
        with answering("parallelize"):
            heartbeat.name_lost(error)
        raise
    finally:
        heartbeat.stop()
        ranks.waiting = None


class Heartbeat:
    """Counts for this rank, and looks at the counts of the others."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        """The count of each rank, and when it was first found so."""

    def start(self) -> None:
        # The store's calls block each other: the thread has a connection of its own.
        own = self._store.clone()
        self._thread = threading.Thread(target=self._beat, args=(own,), name="backbeat-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(FAILED_S)

    def _beat(self, store: Any) -> None:
        # The store goes away with the rank that keeps it.
        with contextlib.suppress(Exception):
            store.add(_key(self._rank), 1)
            while not self._stop.wait(BEAT_S):
                store.add(_key(self._rank), 1)

    def wait(self, keys: Sequence[str], by_rank: Sequence[str]) -> None:
        """Until these keys are in the store. Raises where a rank that has not written its own of `by_rank` is lost, and
        after the store's timeout."""
        began = asked = time.monotonic()
        pause_s = 1e-3
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now - began > self._store.timeout.total_seconds():
                raise DistStoreError(f"{', '.join(keys)}: not there")
            if now - asked > BEAT_S:
                asked = now
                missing = [rank for rank, key in enumerate(by_rank) if not self._store.check([key])]
                self._raise_if_silent(missing or [0], LOST_S, now - began)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def name_lost(self, error: Exception) -> None:
        """After this error: raises where ranks are lost, naming them. Returns once all others have been heard."""
        began = time.monotonic()
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._seen.clear()
        first = {rank: self._count(rank) for rank in others}
        while any(self._count(rank) == first[rank] for rank in others):
            self._raise_if_silent(others, FAILED_S, time.monotonic() - began, error)
            time.sleep(_LONGEST_PAUSE_S)

    def _raise_if_silent(
        self, ranks: Sequence[int], seconds: float, waited_s: float, error: Exception | None = None
    ) -> None:
        now = time.monotonic()
        for rank in ranks:
            count = self._count(rank)
            if self._seen.get(rank, (None, now))[0] != count:
                self._seen[rank] = (count, now)
        lost = [rank for rank in ranks if now - self._seen[rank][1] > seconds]
        if lost:
            what = "" if error is None else f" ({first_line(error)})"
            raise LostRankError(
                f"parallelize: {do_not_answer(lost)}, after {waited_s:.0f} s{what}: look at "
                "what it printed last, and start again on every rank"
            ) from error

    def _count(self, rank: int) -> int:
        return int(self._store.add(_key(rank), 0))


def _key(rank: int) -> str:
    return f"parallelize/alive/{rank}"
