"""Processes that begin with torch imported: forks of multiprocessing's server, one for all tests of a worker.

Importing torch, and what its optimizers import on first use, costs a process four seconds of CPU. A fork costs none.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

ON_GPU = os.environ.get("BACKBEAT_TEST_DEVICE") == "cuda"
"""Which cannot be used in a fork."""
CONTEXT: Any = multiprocessing.get_context("spawn" if ON_GPU else "forkserver")
ALWAYS = (
    # First: the checks are found where it stands.
    "tests.runtime.rank_process",
    "parallel_checks", "recipe_checks", "runtime_checks", "sharded_checks", "sharded_order_checks",
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.launcher.api",
    "backbeat.cli.calibrate", "backbeat.planners", "backbeat.runtime.auto",
)  # fmt: skip


def preload(*modules: str) -> None:
    """Also these are imported once, unless the server runs already."""
    CONTEXT.set_forkserver_preload([*ALWAYS, *modules])


preload()


class Fork:
    """A process that calls a function, as `subprocess.Popen` starts a program."""

    def __init__(
        self, call: Callable[..., None], *arguments: Any, cwd: Path | None = None, environment: dict[str, str]
    ) -> None:
        self._call = call
        self._output = tempfile.TemporaryDirectory()
        self._files = [str(Path(self._output.name) / name) for name in ("out", "err")]
        where = str(cwd or Path.cwd())
        self._process = CONTEXT.Process(
            target=_begin, args=(self._files, where, {**os.environ, **environment}, call, arguments)
        )
        self._process.start()

    def wait(self, limit_s: float) -> CompletedProcess[str]:
        """How it ended, within the limit."""
        self._process.join(limit_s)
        name, code = self._call.__name__, self._process.exitcode
        out, err = (Path(file).read_text("utf-8") for file in self._files)
        self.end()
        assert code is not None, f"{name} has not ended after {limit_s} s:\n{out}\n{err}"
        return CompletedProcess(name, code, out, err)

    def end(self) -> None:
        """With all that it started."""
        with suppress(ValueError):  # It was ended before.
            with suppress(ProcessLookupError):
                os.killpg(self._process.ident or 0, signal.SIGKILL)
            self._process.join()
            self._process.close()
            self._output.cleanup()


def _begin(
    files: list[str], where: str, environment: dict[str, str], call: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    call(*arguments)


def script(path: str, *arguments: str) -> None:
    """As `python PATH ARGUMENTS` does."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def torchrun(ranks: int, restarts: int, path: str, *arguments: str) -> None:
    """As `torchrun --standalone --nproc-per-node RANKS --max-restarts RESTARTS PATH ARGUMENTS` does, with forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=restarts, run_id="forks", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, script)(path, *arguments)
