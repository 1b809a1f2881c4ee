"""Collectives that were lost and the host was not told."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from backbeat.comm.communicators import abort
from backbeat.runtime.torch_internals import Future, c10d

if TYPE_CHECKING:
    from backbeat.runtime.reduce.context import ReducerContext
    from backbeat.runtime.reduce.step import InFlight

IN_FLIGHT, DONE = "", "done"
_NAMES = {int(value): str(name) for name, value in c10d.WorkResult.__members__.items()}
_GOOD = int(c10d.WorkResult.SUCCESS)
_KEPT = 3
"""Steps whose works are kept: the host reads the status of a step before it opens the one after the next, so that no
bucket in flight is older."""


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
    """Finds buckets that were lost and the host was not told: on NCCL waiting for a failed collective does not raise.

    Torch's own watchdog notices. It writes its error into the communicator and into the result of the oldest work that
    it has not yet ticked off, which may be a good one. After a pause for its dumps (a minute in torch 2.11) it ends the
    process, without a word on buckets or gradients. In that pause the monitor's thread reads the error, says which
    bucket of which step was lost and who is to blame, and aborts the communicators. Whatever waits for the device then
    returns, and the next use of the wrapper raises the same error. The thread has no clock of its own and guesses
    nothing from slowness, so it cannot stop a healthy job.
    """

    def __init__(self, context: ReducerContext) -> None:
        self._context = context
        self._steps: deque[_Sent] = deque(maxlen=_KEPT)
        self._device = device = context.managed.parameters[0].device
        # Made once and recorded again and again: an event of its own for each step would cost the host more.
        self._events = cycle([torch.cuda.Event() for _ in range(_KEPT + 1)] if device.type == "cuda" else [None])

    def remember(self, in_flight: Iterable[InFlight], step: int) -> None:
        """The host has let go of these buckets; the device may not have begun with them."""
        context = self._context
        # A Work keeps its tensors alive. For temporary tensors keep only its result, which does not.
        lean = context.reduce_dtype is not None or any(
            bucket.compressed or bucket.sparse for bucket in context.bucket_set.buckets
        )
        sent = [
            (one.bucket_index, _future_result(one.work) if lean or isinstance(one.work, Future) else one.work)
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
        found = (_error_of(backend) for backend in context.communicators.backends())
        fates = (work_result(work) for sent in steps for _, work in sent.works)
        failed = (fate for fate in fates if fate not in (IN_FLIGHT, DONE))
        why = next((error for error in found if error), "") or next(failed, "")
        if not why:
            return False
        missing = ((sent.step, index) for sent in steps if (index := sent.first_missing()) is not None)
        # Where everything has arrived, the first bucket of the step to come.
        number, index = next(missing, (present.step + 1, 0))
        context.lose(context.failure(index, f"the watchdog of torch found {why}", step=number))
        # Not by a logger alone, which may write anywhere: the process has a minute left.
        sys.stderr.write(f"backbeat: {context.lost}\n")
        sys.stderr.flush()
        abort(context.communicators.backends(), in_one_call=True)
        return True


@dataclass(frozen=True, slots=True)
class _Sent:
    """What left in one step, and an event after it on the device."""

    step: int
    works: list[tuple[int, Any]]
    event: Any

    def first_missing(self) -> int | None:
        """The first bucket that is not known to have arrived."""
        if self.event is not None and self.event.query():
            return None
        return next((index for index, work in self.works if work_result(work) != DONE), None)


def _future_result(work: Any) -> Any:
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
    return "" if value == int(c10d.ErrorType.SUCCESS) else str(c10d.ErrorType(value).name)
