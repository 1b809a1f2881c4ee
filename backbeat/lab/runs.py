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

    def __enter__(self) -> LabRun:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone():
            sweep()
            self.folder.mkdir(mode=0o700)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *error: object) -> None:
        """Take down everything that carries this run's name."""
        remove(self.name)
        os.close(self._lock)


def sweep() -> None:
    """Remove what dead runs have left."""
    folders = list(home().glob(f"{PREFIX}-*"))
    dead = {folder.name for folder in folders if not _locked(folder)}
    kept = {folder.name for folder in folders} - dead
    for match in filter(None, (_NAME.match(path.name) for path in NAMESPACES.glob("*"))):
        # A namespace without its run's folder: the process itself must be gone before it is touched.
        if match.group(1) not in kept and not Path(f"/proc/{match.group(2)}").exists():
            dead.add(match.group(1))
    for name in sorted(dead):
        remove(name)


def remove(name: str) -> None:
    """Daemon, namespaces and folder of one run."""
    stop_daemon(home() / name / "mps")
    for path in sorted(NAMESPACES.glob(f"{name}-*")):
        ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), _MNT_DETACH)
        # Another lab that starts at this moment may be sweeping the same leftovers.
        path.unlink(missing_ok=True)
    shutil.rmtree(home() / name, ignore_errors=True)


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
