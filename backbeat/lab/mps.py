"""A private CUDA MPS daemon for one run of the lab, on whose GPU all nodes compute.

With it the nodes' kernels run at the same time. Without it the GPU gives each process a time slice, and a collective
between two of them waits milliseconds for turns. The daemon has a pipe folder of its own: it neither meets nor stops
one that the machine may already run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from backbeat.errors import MeasurementError

CONTROL = "nvidia-cuda-mps-control"
_QUIT_S = 10.0


def find_control() -> str | None:
    """The daemon's program, also where it is installed beside the driver and not on the PATH."""
    return shutil.which(CONTROL) or shutil.which(CONTROL, path="/usr/local/nvidia/bin:/usr/bin:/opt/nvidia/bin")


def client_environment(folder: Path) -> dict[str, str]:
    """What a process needs to find the daemon of this folder."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def start_daemon(folder: Path) -> dict[str, str]:
    """Start the daemon, which `check_requirements` has found; returns the environment of its clients."""
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    variables = client_environment(folder)
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
                env={**os.environ, **client_environment(folder)},
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
