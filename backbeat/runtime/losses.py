"""Groups that are lost while the host is not told: on NCCL waiting for a collective that fails does not raise.

Torch's own watchdog notices, writes its verdict into the work's result, and after a pause for its dumps (a minute in
torch 2.11) ends the process without a word on groups or gradients. The monitor's thread reads that verdict meanwhile,
says which group of which step was lost and who is to blame, and aborts the communicators, so that whatever waits for
the device returns and the next use of the wrapper raises the same. It never judges by itself: no clock of its own, no
guess from slowness, so it cannot stop a healthy job.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backbeat.runtime.channels import Channels
    from backbeat.runtime.job import Job
    from backbeat.runtime.rounds import Flight

_results: Any = _distributed_c10d
WorkResult = _results.WorkResult
FLYING, DONE = "", "done"
_NAMES = {int(value): str(name) for name, value in WorkResult.__members__.items()}
_GOOD = int(WorkResult.SUCCESS)


def fate_of(work: Any) -> str:
    """`FLYING`, `DONE`, or what the library says went wrong with it."""
    try:
        result = work.get_future_result() if hasattr(work, "get_future_result") else work
        if not result.done():
            return FLYING
        value = int(result.value())
    except Exception:
        # Another library's work, or a hook's future: it tells by raising where it is waited for.
        return FLYING
    return DONE if value == _GOOD else _NAMES.get(value, str(value))


class Losses:
    """Looks after the groups of one job from the monitor's thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before: list[tuple[int, Any]] = []
        self._step = 0

    def remember(self, flights: Iterable[Flight], step: int) -> None:
        """The host has let go of these groups; the device may not have begun with them."""
        # A work keeps its tensors, which in a wire format are no buffers that stay anyway; its result does not.
        lean = self._job.wire is not None
        self._before = [(flight.group, _result_of(flight.work) if lean else flight.work) for flight in flights]
        self._step = step

    def look(self) -> bool:
        """True, once, if a group was lost: it has been said, and the communicators are gone."""
        job = self._job
        if job.fault is not None:
            return True
        found = self._first_lost()
        if found is None:
            return False
        step, group, why = found
        job.fault = job.failure(group, f"the watchdog of torch found {why}", step=step)
        # Not by a logger alone, which may write anywhere: the process has a minute left.
        sys.stderr.write(f"backbeat: {job.fault}\n")
        sys.stderr.flush()
        abort(job.channels)
        return True

    def _first_lost(self) -> tuple[int, int, str] | None:
        round_, step = self._job.round, self._job.step
        present = [(flight.group, flight.work) for flight in tuple(round_.flights)]
        for number, sent in ((self._step, self._before), (step, present)):
            for group, work in sent:
                fate = fate_of(work)
                if fate not in (FLYING, DONE):
                    return number, group, fate
        return None


def abort(channels: Channels) -> None:
    """Give every communicator up, all in one call to the library: one abort may wait for another's."""
    backends = channels.backends()
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
