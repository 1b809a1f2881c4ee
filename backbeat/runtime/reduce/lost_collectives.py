"""Groups that are lost while the host is not told: on NCCL waiting for a collective that fails does not raise.

Torch's own watchdog notices, writes its verdict into the communicator and into the result of the oldest work that it
has not yet ticked off, which may be a good one, and after a pause for its dumps (a minute in torch 2.11) ends the
process without a word on groups or gradients. The monitor's thread reads that verdict meanwhile, says which group of
which step was lost and who is to blame, and aborts the communicators, so that whatever waits for the device returns and
the next use of the wrapper raises the same. It never judges by itself: no clock of its own, no guess from slowness, so
it cannot stop a healthy job.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backbeat.comm.communicators import Communicators
    from backbeat.runtime.reduce.job import Job
    from backbeat.runtime.reduce.step import Flight

_results: Any = _distributed_c10d
WorkResult = _results.WorkResult
_future: Any = torch._C.Future
FLYING, DONE = "", "done"
_NAMES = {int(value): str(name) for name, value in WorkResult.__members__.items()}
_GOOD = int(WorkResult.SUCCESS)
# The host waits for the word on a step before it opens the one after the next: no group in flight is older.
_KEPT = 3


def fate_of(work: Any) -> str:
    """`FLYING`, `DONE`, or what the library says went wrong with it."""
    try:
        result = work.get_future_result() if hasattr(work, "get_future_result") else work
        if not result.done():
            return FLYING
        found = result.value()
        if isinstance(found, torch.Tensor):
            # What a hook reduced: one element would pass for a number.
            return FLYING
        value = int(found)
    except Exception:
        # Another library's work, or a hook's future: it tells by raising where it is waited for.
        return FLYING
    return DONE if value == _GOOD else _NAMES.get(value, str(value))


class Losses:
    """Looks after the groups of one job from the monitor's thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rounds: deque[_Sent] = deque(maxlen=_KEPT)
        self._device = device = job.parameters[0].device
        # Made once and recorded again and again: an event of its own for each step would cost the host more.
        self._events = cycle([torch.cuda.Event() for _ in range(_KEPT + 1)] if device.type == "cuda" else [None])

    def remember(self, flights: Iterable[Flight], step: int) -> None:
        """The host has let go of these groups; the device may not have begun with them."""
        job = self._job
        # A work keeps its tensors. Those that are no buffers, which stay anyway, it must not keep; its result does not.
        lean = job.wire is not None or any(bucket.compressed or bucket.sparse for bucket in job.bucket_set.buckets)
        sent = [
            (flight.group, _result_of(flight.work) if lean or isinstance(flight.work, _future) else flight.work)
            for flight in flights
        ]
        event = next(self._events)
        if event is not None:
            # Another device may be the current one.
            event.record(torch.cuda.current_stream(self._device))
        self._rounds.append(_Sent(step, sent, event))

    def look(self) -> bool:
        """True, once, if a group was lost: it has been said, and the communicators are gone."""
        job = self._job
        if job.fault is not None:
            return True
        present = _Sent(job.step, [(flight.group, flight.work) for flight in tuple(job.round.flights)], None)
        rounds = [*self._rounds, present]
        why = self._verdict(rounds)
        if not why:
            return False
        step, group = _first_missing(rounds)
        job.fault = job.failure(group, f"the watchdog of torch found {why}", step=step)
        # Not by a logger alone, which may write anywhere: the process has a minute left.
        sys.stderr.write(f"backbeat: {job.fault}\n")
        sys.stderr.flush()
        abort(job.communicators)
        return True

    def _verdict(self, rounds: Sequence[_Sent]) -> str:
        """What the watchdog has found, or nothing."""
        for backend in self._job.communicators.backends():
            found = _error_of(backend)
            if found:
                return found
        fates = (fate_of(work) for sent in rounds for _, work in sent.works)
        return next((fate for fate in fates if fate not in (FLYING, DONE)), "")


@dataclass(frozen=True, slots=True)
class _Sent:
    """What left in one step, and an event behind it on the device."""

    step: int
    works: list[tuple[int, Any]]
    event: Any

    def first_missing(self) -> int | None:
        """The first group that is not known to have arrived."""
        if self.event is not None and self.event.query():
            return None
        return next((group for group, work in self.works if fate_of(work) != DONE), None)


def _first_missing(rounds: Sequence[_Sent]) -> tuple[int, int]:
    """Step and group; the first group of the step to come where everything has arrived."""
    for sent in rounds:
        group = sent.first_missing()
        if group is not None:
            return sent.step, group
    return rounds[-1].step + 1, 0


def abort(communicators: Communicators) -> None:
    """Give every communicator up, all in one call to the library: one abort may wait for another's."""
    backends = communicators.backends()
    with contextlib.suppress(Exception):
        grouped = hasattr(backends[0], "_group_start")
        if grouped:
            backends[0]._group_start()
        for backend in backends:
            backend.abort()
        if grouped:
            backends[0]._group_end()


def _result_of(work: Any) -> Any:
    try:
        return work.get_future_result()
    except Exception:
        return None


def _error_of(backend: Any) -> str:
    """What a communicator says is wrong with it; nothing where it does not say such things."""
    try:
        value = int(backend.get_error())
    except Exception:
        return ""
    return "" if value == int(_results.ErrorType.SUCCESS) else str(_results.ErrorType(value).name)
