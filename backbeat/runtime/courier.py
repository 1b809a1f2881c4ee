"""A thread that encodes groups, so that backward does not wait while their selection is submitted.

Selecting and packing a group takes dozens of launches, and on a fast GPU the host is the one who is late. The thread
that runs backward does not hold Python's lock while it submits kernels, so another one can submit the selection beside
it. It never starts a collective: these must keep their place among all others, on every rank alike.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

KINDS = {"cuda"}
"""Kinds of device whose work is submitted and not waited for: elsewhere a second thread would take cores from it."""


class Courier:
    """One thread that does what it is given, in order."""

    def __init__(self, device: torch.device) -> None:
        self._tasks: _Tasks = queue.Queue()
        self._failures: list[BaseException] = []
        # The thread holds none of this object, so that it ends with it; a process may end without it.
        arguments = (self._tasks, self._failures, device)
        threading.Thread(target=_work, args=arguments, name="backbeat courier", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def take(self, task: Callable[[], None]) -> None:
        """Do this after everything taken before."""
        self._tasks.put(task)

    def settle(self) -> None:
        """Wait until nothing is left to do; raises what went wrong first since the last time."""
        self._tasks.join()
        if self._failures:
            first = self._failures[0]
            self._failures.clear()
            raise first


_Tasks = queue.Queue[Callable[[], None] | None]


def _work(tasks: _Tasks, failures: list[BaseException], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        task = tasks.get()
        if task is None:
            return
        try:
            task()
        except BaseException as error:
            failures.append(error)
        # Between two tasks none is kept alive, nor what it holds.
        del task
        tasks.task_done()
