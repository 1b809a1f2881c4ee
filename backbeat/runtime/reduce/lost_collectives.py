"""Collectives that are lost while the host is not told: on NCCL waiting for a collective that fails does not raise.

Torch's own watchdog notices, writes its verdict into the communicator and into the result of the oldest work that it
has not yet ticked off, which may be a good one, and after a pause for its dumps (a minute in torch 2.11) ends the
process without a word on buckets or gradients. The monitor's thread reads that verdict meanwhile, says which bucket of
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
    from backbeat.runtime.reduce.context import ReducerContext
    from backbeat.runtime.reduce.step import InFlight

_results: Any = _distributed_c10d
WorkResult = _results.WorkResult
_future: Any = torch._C.Future
IN_FLIGHT, DONE = "", "done"
_NAMES = {int(value): str(name) for name, value in WorkResult.__members__.items()}
_GOOD = int(WorkResult.SUCCESS)
# The host reads the status of a step before it opens the one after the next: no bucket in flight is older.
_KEPT = 3


def work_result(work: Any) -> str:
    """`IN_FLIGHT`, `DONE`, or what the library says went wrong with it."""
    try:
        result = work.get_future_result() if hasattr(work, "get_future_result") else work
        if not result.done():
            return IN_FLIGHT
        found = result.value()
        if isinstance(found, torch.Tensor):
            # What a hook reduced: one element would pass for a number.
            return IN_FLIGHT
        value = int(found)
    except Exception:
        # Another library's work, or a hook's future: it tells by raising where it is waited for.
        return IN_FLIGHT
    return DONE if value == _GOOD else _NAMES.get(value, str(value))


class LostCollectives:
    """Looks after the buckets of one reducer from the monitor's thread."""

    def __init__(self, context: ReducerContext) -> None:
        self._context = context
        self._steps: deque[_Sent] = deque(maxlen=_KEPT)
        self._device = device = context.parameters[0].device
        # Made once and recorded again and again: an event of its own for each step would cost the host more.
        self._events = cycle([torch.cuda.Event() for _ in range(_KEPT + 1)] if device.type == "cuda" else [None])

    def remember(self, in_flight: Iterable[InFlight], step: int) -> None:
        """The host has let go of these buckets; the device may not have begun with them."""
        context = self._context
        # A work keeps its tensors. Those that are no buffers, which stay anyway, it must not keep; its result does not.
        lean = context.reduce_dtype is not None or any(
            bucket.compressed or bucket.sparse for bucket in context.bucket_set.buckets
        )
        sent = [
            (one.bucket_index, _result_of(one.work) if lean or isinstance(one.work, _future) else one.work)
            for one in in_flight
        ]
        event = next(self._events)
        if event is not None:
            # Another device may be the current one.
            event.record(torch.cuda.current_stream(self._device))
        self._steps.append(_Sent(step, sent, event))

    def look(self) -> bool:
        """True if a bucket was lost: it has been said, and the communicators are gone."""
        context = self._context
        if context.lost is not None:
            return True
        step = context.step
        present = _Sent(step.number, [(one.bucket_index, one.work) for one in tuple(step.in_flight)], None)
        steps = [*self._steps, present]
        why = self._verdict(steps)
        if not why:
            return False
        number, index = _first_missing(steps)
        context.lost = context.failure(index, f"the watchdog of torch found {why}", step=number)
        # Not by a logger alone, which may write anywhere: the process has a minute left.
        sys.stderr.write(f"backbeat: {context.lost}\n")
        sys.stderr.flush()
        abort(context.communicators)
        return True

    def _verdict(self, steps: Sequence[_Sent]) -> str:
        """What the watchdog has found, or nothing."""
        for backend in self._context.communicators.backends():
            found = _error_of(backend)
            if found:
                return found
        fates = (work_result(work) for sent in steps for _, work in sent.works)
        return next((fate for fate in fates if fate not in (IN_FLIGHT, DONE)), "")


@dataclass(frozen=True, slots=True)
class _Sent:
    """What left in one step, and an event behind it on the device."""

    step: int
    works: list[tuple[int, Any]]
    event: Any

    def first_missing(self) -> int | None:
        """The first bucket that is not known to have arrived."""
        if self.event is not None and self.event.query():
            return None
        return next((index for index, work in self.works if work_result(work) != DONE), None)


def _first_missing(steps: Sequence[_Sent]) -> tuple[int, int]:
    """Step and bucket; the first bucket of the step to come where everything has arrived."""
    for sent in steps:
        index = sent.first_missing()
        if index is not None:
            return sent.step, index
    return steps[-1].step + 1, 0


def abort(communicators: Communicators) -> None:
    """Give every communicator up, all in one call to the library: one abort may wait for another's."""
    backends = communicators.backends()
    grouped = hasattr(backends[0], "_group_start")
    calls = [backend.abort for backend in backends]
    if grouped:
        calls = [backends[0]._group_start, *calls, backends[0]._group_end]
    for call in calls:
        # One that is broken already must not keep the others from going.
        with contextlib.suppress(Exception):
            call()


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
