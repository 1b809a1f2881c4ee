"""The ranks of one cluster, from the controller's side: started, asked together, stopped whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection as pipes
from typing import Any

from backbeat.errors import MeasurementError
from backbeat.lab.namespaces import INTERFACE, VirtualNodes
from backbeat.lab.setting import Setting

START_S = 180.0
"""Importing torch in many processes on few cores takes its time."""
_STOP_S = 3.0


def rank_environment(backend: str, rank: int) -> dict[str, str]:
    """What makes the library use the rank's own interface, and take ranks on one GPU for separate hosts."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if backend == "gloo":
        return {**variables, "GLOO_SOCKET_IFNAME": INTERFACE, "CUDA_VISIBLE_DEVICES": ""}
    return {
        **variables,
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MAX_NCHANNELS": "2",
        # As on a card of one's own. Under MPS a process has fewer work queues, and streams that share one wait for
        # each other.
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }


class Session:
    """One process per rank, joined in a process group."""

    def __init__(
        self, cluster: VirtualNodes, setting: Setting, communicators: int, environment: Mapping[str, str]
    ) -> None:
        self.cluster = cluster
        self._setting = setting
        self._communicators = communicators
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[pipes.Connection] = []

    def __enter__(self) -> Session:
        try:
            for rank in range(self.cluster.ranks):
                self._start(rank)
            self._answers("starting", START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, command: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """Call a method of all ranks at once; their answers in order of ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((command, arguments))
        return self._answers(command, timeout_s)

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop", {}))
        limit = time.monotonic() + _STOP_S
        for process in self._processes:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self, rank: int) -> None:
        here, there = pipes.Pipe()
        own = rank_environment(self._setting.backend, rank)
        with open(self._log(rank), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "backbeat.lab.lab_rank", str(there.fileno()), str(os.getpid())],
                env={**os.environ, **own, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
            )
        there.close()
        self._processes.append(process)
        self._pipes.append(here)
        start = {"rank": rank, "communicators": self._communicators, "first_address": self.cluster.address(0)}
        here.send((self.cluster.namespace(rank), {"setting": self._setting, **start}))

    def _log(self, rank: int) -> str:
        return str(self.cluster.run.folder / f"rank{rank}.log")

    def _answers(self, what: str, timeout_s: float) -> list[Any]:
        limit = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready: Sequence[Any] = pipes.wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise self._failure(
                    f"{what}: no answer from rank {', '.join(map(str, late))} within {timeout_s:.0f} s", late[0]
                )
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    fine, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    code = self._processes[rank].poll()
                    fine, answer = False, f"the process is gone (exit code {code})"
                if not fine:
                    raise self._failure(f"{what}: rank {rank} failed: {answer}", rank)
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self._pipes))]

    def _failure(self, what: str, rank: int) -> MeasurementError:
        """One line for the user, with the ends of all ranks' logs as notes for whoever keeps them."""
        ends = {one: self._log_end(one) for one in range(self.cluster.ranks)}
        last = f" (last line of its log: {ends[rank][-1][:300]})" if ends[rank] else ""
        error = MeasurementError(f"{what}{last}")
        for one, lines in ends.items():
            error.add_note(f"--- rank {one}\n" + "\n".join(lines))
        return error

    def _log_end(self, rank: int) -> list[str]:
        try:
            with open(self._log(rank), errors="replace") as file:
                return [line.rstrip() for line in file if line.strip()][-60:]
        except OSError:
            return []
