"""Processes that begin with torch imported: forks of multiprocessing's server, one for all tests of a worker.

Importing torch, and what its optimizers import on first use, costs a process four seconds of CPU. A fork costs none.
`run_python` runs a program so, and the Python programs that it starts are forks of it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

ON_GPU = os.environ.get("BACKBEAT_TEST_DEVICE") == "cuda"
"""Which cannot be used in a fork."""
CONTEXT: Any = multiprocessing.get_context("spawn" if ON_GPU else "forkserver")
ALWAYS = (
    # First: the checks are found where it stands.
    "tests.runtime.rank_process",
    "parallel_checks", "recipe_checks", "runtime_checks", "sharded_checks", "sharded_order_checks",
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.launcher.api",
    "backbeat.cli.calibrate", "backbeat.planners", "backbeat.runtime.ddp.tuner",
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
        if self._process.exitcode is None:
            # It takes down what it started in sessions of their own.
            os.kill(self._process.ident, signal.SIGINT)
            self._process.join(20)
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


def run_python(*words: str, cwd: Path | None = None, limit_s: float = 240, **environment: str) -> CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *words])` does."""
    return Fork(python, *words, cwd=cwd, environment=environment).wait(limit_s)


def python(*words: str) -> None:
    """As `python WORDS` does. Where this program starts a Python program, it forks."""
    if not ON_GPU:
        started = subprocess.Popen.__init__
        subprocess.Popen.__init__ = lambda *given, **options: _popen(started, *given, **options)  # type: ignore
    _program(words)


def _popen(started: Callable[..., None], self: Any, args: Any, *rest: Any, **options: Any) -> None:
    if not isinstance(args, str) and len(args) > 1 and args[0] == sys.executable and args[1] != "-c":
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Called in the child, once its streams are in place.
        options["preexec_fn"] = partial(_become, args[1:], options.get("env"), options.get("pass_fds", ()))
    started(self, args, *rest, **options)


def _become(words: Sequence[str], environment: dict[str, str] | None, kept: Sequence[int]) -> NoReturn:
    """What a new process is after `exec`: no handlers, no files, other streams, a program of its own."""
    code: Any = 1
    try:
        # Among them the one on which the parent waits for `exec`.
        for file in map(int, os.listdir("/dev/fd")):
            if file > 2 and file not in kept:
                with suppress(OSError):
                    os.close(file)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        atexit._clear()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        _KEPT.append((sys.stdin, sys.stdout, sys.stderr))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        _program(words)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_KEPT: list[Any] = []
"""Streams whose buffers belong to the parent: closing them would print what it prints itself."""


def _program(words: Sequence[str]) -> None:
    words = list(words)[words[0] == "-u" :]
    # That a module was imported before it is run is meant.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script(*words)
