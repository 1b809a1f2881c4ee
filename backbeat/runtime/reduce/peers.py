"""The ranks of this machine as processes: of one that ends the kernel tells at once, and how.

The job's store answers within seconds. A launcher does not give the other ranks seconds: torchrun looks at its
processes ten times a second, and once one has ended it ends all others by SIGTERM. So what there is to say about a dead
rank is said before that signal comes. No handler of the signal could say it: Python runs one only between two lines of
the main thread, which may stand in a collective, and until then the process would no longer end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from backbeat.comm.communicators import Communicators
from backbeat.comm.machine import host_name

logger = logging.getLogger("backbeat.runtime")

_ASKED_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""By a launcher, a scheduler or a user: such a rank is no cause, or all are asked alike."""


class Ending(NamedTuple):
    """How a process has ended."""

    words: str
    cause: bool | None
    """Whether others may fail for it; None where how it has ended is not known."""


Told = Callable[[int, Ending], None]


class Peers:
    """The other ranks of one wrapper whose processes are on this machine. Every rank makes them."""

    def __init__(self, communicators: Communicators) -> None:
        self._store: Any = communicators.store
        self._rank = communicators.rank
        self._pids: dict[int, int] = {}
        self._key = self._announce() if communicators.size > 1 and hasattr(os, "pidfd_open") else ""

    def _announce(self) -> str:
        # Without them where the store cannot append, or the system has no /proc.
        with contextlib.suppress(Exception):
            key = f"fault/processes/{machine()}"
            self._store.append(key, f"{self._rank} {os.getpid()}\n")
            return key
        return ""

    def watch(self, told: Told) -> None:
        """Call `told` with the number of a process that ends. Called once every rank has made its `Peers`."""
        if not self._key:
            return
        found = (line.split() for line in self._store.get(self._key).decode().splitlines())
        self._pids = {int(rank): int(pid) for rank, pid in found if int(rank) != self._rank}
        for pid in self._pids.values():
            _watcher(os.getpid()).add(pid, told)

    def rank_of(self, pid: int) -> int | None:
        return next((rank for rank, own in self._pids.items() if own == pid), None)

    def ending(self, rank: int) -> str:
        """How this rank's process has ended; nothing where it lives, or is another machine's."""
        pid = self._pids.get(rank)
        found = None if pid is None else _watcher(os.getpid()).ended.get(pid)
        return "" if found is None else f"process {pid} on {host_name()} {found.words}"


class _Watcher:
    """A thread that sleeps until one of some processes has ended."""

    def __init__(self) -> None:
        self.ended: dict[int, Ending] = {}
        self._told: dict[int, Told] = {}
        self._pid_of: dict[int, int] = {}
        self._epoll = select.epoll()
        self._stop = os.eventfd(0)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._listen, name="backbeat-peers", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread: ranks end together, and one that asks where this rank stands while the interpreter ends would
        abort the process."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(timeout_s)

    def add(self, pid: int, told: Told) -> None:
        if pid in self._told:
            return
        self._told[pid] = told
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note(pid)
            return
        except OSError as error:
            logger.debug("the system does not tell when process %d ends: %s", pid, error)
            return
        self._pid_of[file] = pid
        self._epoll.register(file, select.EPOLLIN)

    def _listen(self) -> None:
        while True:
            for file, _ in self._epoll.poll():
                if file == self._stop:
                    return
                self._epoll.unregister(file)
                os.close(file)
                self._note(self._pid_of.pop(file))

    def _note(self, pid: int) -> None:
        self.ended[pid] = ending = _ending(pid)
        try:
            self._told[pid](pid, ending)
        except Exception as error:
            # A stream that is closed, say: the next end must be heard nevertheless.
            logger.debug("that process %d %s was not told: %s", pid, ending.words, error)


_watchers: dict[int, _Watcher] = {}


def _watcher(process: int) -> _Watcher:
    """One for this process; a fork has no threads of its parent's."""
    if process not in _watchers:
        _watchers[process] = _Watcher()
    return _watchers[process]


def stop_watching(timeout_s: float) -> None:
    """Before the process ends."""
    found = _watchers.pop(os.getpid(), None)
    if found is not None:
        found.stop(timeout_s)


def _ending(pid: int) -> Ending:
    """Read from the kernel, for as long as its parent has not asked: torchrun asks ten times a second."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, code = fields[0], int(fields[-1])
    except (OSError, ValueError):
        state, code = "", 0
    if state != "Z":
        return Ending("has ended", None)
    if number := code & 0x7F:
        return Ending(f"was killed by {signal.Signals(number).name}", number not in _ASKED_TO_END)
    return Ending(f"has ended with exit code {code >> 8}", code >> 8 != 0)


@functools.cache
def machine() -> str:
    """The same for processes that see each other's numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
