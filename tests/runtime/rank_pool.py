"""Rank processes kept alive over many scenarios: starting torch costs seconds, a process group costs milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forks import CONTEXT
from tests.runtime import rank_process

HERE = Path(__file__).parent
DEVICE = os.environ.get("BACKBEAT_TEST_DEVICE", "cpu")
QUIET = "BACKBEAT_TEST_LOUD" not in os.environ
LIMIT_S = 120 if DEVICE == "cpu" else 300
"""What every rank must have answered within; ranks that share a GPU take turns on it."""
SIZES = [int(size) for size in os.environ.get("BACKBEAT_TEST_RANKS", "2,4" if DEVICE == "cpu" else "1").split(",")]


SHARED = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def node_environment(rank: int, size: int) -> dict[str, str]:
    """What makes a process one of `size` ranks; on a GPU that they share, a node of its own to NCCL."""
    found = {"RANK": str(rank), "WORLD_SIZE": str(size), **SHARED}
    if DEVICE != "cpu" and size > 1:
        found.update(
            NCCL_HOSTID=f"node{rank}", NCCL_NET="Socket", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1",
            NCCL_IB_DISABLE="1", NCCL_MAX_NCHANNELS="2",
            # Before the first communicator exists: several communicators need it.
            NCCL_LAUNCH_ORDER_IMPLICIT=os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
        )  # fmt: skip
    return found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "nor where it stood"


class RankPool:
    """`size` rank processes and the store they meet at."""

    def __init__(self, size: int) -> None:
        import torch.distributed as dist

        self.size = size
        self._dist = dist
        self._number = 0
        self._fresh = False
        self._start()

    def _start(self) -> None:
        self._store = self._dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        requests, answers = ([CONTEXT.Pipe(duplex=False) for _ in range(self.size)] for _ in range(2))
        ranks = [
            (told, telling, node_environment(rank, self.size))
            for rank, ((told, _), (_, telling)) in enumerate(zip(requests, answers, strict=True))
        ]
        self._folder = tempfile.TemporaryDirectory()
        self._process = CONTEXT.Process(target=rank_process.main, args=(ranks, {**os.environ, **SHARED}, QUIET))
        self._process.start()
        self._told = [os.fdopen(os.dup(tell.fileno()), "w", buffering=1) for _, tell in requests]
        self._telling = [os.fdopen(os.dup(hear.fileno())) for hear, _ in answers]
        for end in (end for ends in (*requests, *answers) for end in ends):
            end.close()
        self._answers(180)

    def run(
        self,
        scenario: str,
        route: str,
        timeout: float = 30,
        limit: float = LIMIT_S,
        fresh: bool = False,
        record: bool = False,
    ) -> list[dict[str, Any]]:
        """Every rank's answer; a rank that gives none within the limit is killed, and the pool begins anew. Its answer
        then says where it stood.

        `fresh`: in processes that have run nothing before. `record`: with what each rank sent (`collective_log`).
        """
        self._number += 1
        stacks = Path(self._folder.name) / str(self._number)
        self._tell(
            {
                "stacks": str(stacks),
                "limit": limit,
                "scenario": scenario,
                "route": route,
                "timeout": timeout,
                "port": self._store.port,
                "number": self._number,
                "fresh": self._fresh or fresh,
                "record": record,
            }
        )
        answers = self._answers(limit)
        for rank, answer in enumerate(answers):
            if answer["outcome"] == "hung":
                answer["detail"] += f"\n{_text(stacks.with_suffix(f'.{rank}'))}"
        # What went wrong, was made to, or is another library's may leave traces in the process.
        peaceful = all(answer["outcome"] in ("right", "skipped") for answer in answers) and timeout >= 30
        self._fresh = not peaceful
        if any(answer["outcome"] == "hung" for answer in answers):
            self.close()
            self._start()
        else:
            self._tell({})
        return answers

    def close(self) -> None:
        # With all that it forked, which are of its process group.
        os.killpg(self._process.ident or 0, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._folder.cleanup()
        for pipe in (*self._told, *self._telling):
            # What a dead rank was not told any more must not be sent when the pipe is closed.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for pipe in self._told:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(message) + "\n")

    def _answers(self, limit: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._telling):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(found) < self.size and time.monotonic() < deadline:
                for key, _ in selector.select(timeout=max(deadline - time.monotonic(), 0)):
                    line = self._telling[key.data].readline()
                    selector.unregister(key.fileobj)
                    found[key.data] = json.loads(line) if line else {"outcome": "died", "detail": "the process ended"}
        return [found.get(rank, {"outcome": "hung", "detail": "no answer"}) for rank in range(self.size)]
