"""One run of the lab as the machine sees it: a name of its own, a folder, and a lock that dies with the process.

The kernel drops the lock however the process ends, so a folder that can be locked belongs to a dead run, and whatever
carries that run's name can be removed. Runs that are alive are never touched: two labs can live side by side.

Where nodes share a GPU, a run has a private CUDA MPS daemon, so that their kernels run at the same time. Without it the
GPU gives each process a time slice, and a collective between two of them waits milliseconds for turns. The daemon has a
pipe folder of its own: it neither meets nor stops one that the machine may already run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from backbeat.errors import MeasurementError

PREFIX = "bb"
NAMESPACES = Path("/run/netns")
_NAME = re.compile(rf"^({PREFIX}-(\d+)-\d+)-\w+$")
_MNT_DETACH = 2
_serial = itertools.count()
CONTROL = "nvidia-cuda-mps-control"
_QUIT_S = 10.0


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


def find_control() -> str | None:
    """The daemon's program, also where it is installed beside the driver and not on the PATH."""
    return shutil.which(CONTROL) or shutil.which(CONTROL, path="/usr/local/nvidia/bin:/usr/bin:/opt/nvidia/bin")


def environment(folder: Path) -> dict[str, str]:
    """What a process needs to find the daemon of this folder."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def start_daemon(folder: Path) -> dict[str, str]:
    """Start the daemon, which `check_requirements` has found; returns the environment of its clients."""
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    variables = environment(folder)
    done = subprocess.run(
        [find_control() or CONTROL, "-d"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise MeasurementError(f"the MPS daemon did not start ({(done.stderr or '').strip() or done.returncode})")
    return variables


def stop_daemon(folder: Path) -> None:
    """Ask the daemon of this folder to quit, then make sure that it and its server are gone."""
    if not folder.exists():
        return
    control = find_control()
    if control is not None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(
                [control],
                input="quit -t 1\n",
                text=True,
                env={**os.environ, **environment(folder)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_QUIT_S,
                check=False,
            )
    limit = time.monotonic() + _QUIT_S
    while (left := _members(folder)) and time.monotonic() < limit:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _members(folder: Path) -> list[int]:
    """MPS processes that belong to this folder: the daemon and its server, not their clients."""
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={folder / 'pipe'}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().startswith("nvidia-cuda-mps") and wanted in (
                (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
