"""One run of the lab as the machine sees it: a name of its own, a folder, and a lock that dies with the process.

The kernel drops the lock however the process ends, so a folder that can be locked belongs to a dead run, and whatever
carries that run's name can be removed. Runs that are alive are never touched: two labs can live side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backbeat.lab.mps import stop_daemon

PREFIX = "bb"
NAMESPACES = Path("/run/netns")
_NAME = re.compile(rf"^({PREFIX}-(\d+)-\d+)-\w+$")
_MNT_DETACH = 2
_serial = itertools.count()


def home() -> Path:
    """Where runs keep their folders."""
    run = Path("/run")
    base = run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())
    return base / "backbeat-lab"


class LabRun:
    """The name, the folder and the lock of one lab. Entering it removes what dead runs have left behind."""

    def __init__(self) -> None:
        self.name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self.folder = home() / self.name
        self._lock: int | None = None

    def __enter__(self) -> LabRun:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone():
            sweep()
            self.folder.mkdir(mode=0o700)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take down everything that carries this run's name. Calling it again does nothing."""
        if self._lock is None:
            return
        remove(self.name)
        os.close(self._lock)
        self._lock = None


def sweep() -> None:
    """Remove what dead runs have left."""
    dead = [folder.name for folder in sorted(home().glob(f"{PREFIX}-*")) if not _locked(folder)]
    kept = {folder.name for folder in home().glob(f"{PREFIX}-*")} - set(dead)
    for name in _namespaces():
        match = _NAME.match(name)
        # A namespace without its run's folder: the process itself must be gone before it is touched.
        if match and match.group(1) not in kept and not Path(f"/proc/{match.group(2)}").exists():
            dead.append(match.group(1))
    for name in sorted(set(dead)):
        remove(name)


def remove(name: str) -> None:
    """Daemon, namespaces and folder of one run."""
    stop_daemon(home() / name / "mps")
    for namespace in _namespaces():
        if namespace.startswith(f"{name}-"):
            _remove_namespace(namespace)
    shutil.rmtree(home() / name, ignore_errors=True)


def _namespaces() -> list[str]:
    try:
        return sorted(os.listdir(NAMESPACES))
    except FileNotFoundError:
        return []


def _remove_namespace(name: str) -> None:
    path = NAMESPACES / name
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), _MNT_DETACH)
    # Another lab that starts at this moment may be sweeping the same leftovers.
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _locked(folder: Path) -> bool:
    try:
        handle = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Between making a folder and locking it a run looks dead; nobody sweeps at that moment."""
    handle = os.open(home() / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
