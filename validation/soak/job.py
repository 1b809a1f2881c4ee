"""The job that `soak.py` disturbs: a torchrun for each rank, and what the ranks say (`rank.py`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

RANK = Path(__file__).with_name("rank.py")
ELASTIC = "is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=120"
AHEAD_STEPS = 60
"""The job is told so many steps before its last one."""


class HangError(Exception):
    """The job did not do in time what it had to."""


class Job:
    """The torchruns, what their ranks say, and what was done to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.output
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._log = (self.folder / "soak.log").open("w")
        self._began = time.monotonic()
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.ranks: dict[int, dict[str, Any]] = {}
        """By agent: the rank that it runs."""
        self.heard: list[dict[str, Any]] = []
        """What was said since the last fault."""
        self.losses: list[tuple[int, float]] = []
        """Of every step trained, also of those that were trained again."""
        self._shares: dict[tuple[str, int], list[float]] = {}
        """By start of the ranks and step: the losses of those ranks that have said theirs."""
        self.memory: dict[int, list[tuple[int, int]]] = {}
        """By process: step and resident bytes."""
        self.step, self.world, self.restarts = 0, 0, 0

    def say(self, text: str) -> None:
        # What gloo and the store add to an error is long, and the same each time.
        text = textwrap.shorten(text, 420, placeholder=" …")
        line = f"{time.monotonic() - self._began:8.1f} s  step {self.step:6d}  {text}"
        print(line, flush=True)
        print(line, file=self._log, flush=True)

    def start(self, agent: int) -> None:
        most, options = self.options.ranks, self.options
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{most // 2}:{most}", "--nproc-per-node", "1",
            "--max-restarts", "100000", "--monitor-interval", "1", "--local-addr", "127.0.0.1", "--rdzv-backend",
            "c10d", "--rdzv-id", "soak", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-conf", ELASTIC,
            str(RANK), str(self.folder), "--step-ms", str(options.step_ms), "--timeout",
            str(options.timeout),
        ]  # fmt: skip
        # A torchrun that serves the ranks' store and goes away would not be replaced.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **own}
        noise = (self.folder / f"torchrun-{agent}.err").open("a")
        self.agents[agent] = process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment, start_new_session=True
        )
        threading.Thread(target=self._read, args=(agent, process.stdout), daemon=True).start()

    def _read(self, agent: int, lines: Any) -> None:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                self._events.put((agent, json.loads(line)))

    def until(self, done: Callable[[], bool], what: str, limit_s: float | None = None) -> None:
        """Listen until something is so."""
        limit = self.options.patience if limit_s is None else limit_s
        end = time.monotonic() + limit
        while not done():
            if time.monotonic() > end:
                raise HangError(f"{what}: not within {limit:.0f} s")
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=0.1))

    def train(self, steps: int) -> None:
        """Listen until the job has trained so many further steps, or steps again."""
        count = len(self.losses) + steps
        self.until(lambda: len(self.losses) >= count, f"{steps} steps of training")

    def listen(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "listening", seconds + 5)

    def _take(self, agent: int, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "loss":
            shares = self._shares.setdefault((event["start"], event["step"]), [])
            shares.append(event["loss"])
            if len(shares) == event["ranks"]:
                self.step, self.world = event["step"], event["ranks"]
                self.losses.append((event["step"], sum(shares) / len(shares)))
                del self._shares[event["start"], event["step"]]
            return
        if kind == "alive":
            self.memory.setdefault(event["pid"], []).append((event["step"], event["bytes"]))
            return
        self.heard.append(event)
        if kind == "began":
            self.ranks[agent] = event
            if event["rank"] == 0:
                self.restarts += 1
                self.say(f"{event['ranks']} ranks begin at step {event['step']}")
        elif "text" in event:
            self.say(f"rank {event['rank']} says: {event['text']}")

    def said(self, *kinds: str, begin: str = "") -> list[str]:
        return [event["text"] for event in self.heard if event["kind"] in kinds and event["text"].startswith(begin)]

    def signal(self, agent: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[agent]["pid"], number)

    def kill(self, agent: int) -> None:
        """A torchrun and its rank, at once."""
        self.agents[agent].kill()
        if agent in self.ranks:
            self.signal(agent, signal.SIGKILL)
        self.agents[agent].wait()

    def end(self) -> None:
        """Let the ranks end after the same step."""
        draft = self.folder / "end.draft"
        draft.write_text(str(self.step + AHEAD_STEPS))
        draft.replace(self.folder / "end")
        self.until(lambda: all(one.poll() is not None for one in self.agents.values()), "the end of the job")

    def close(self) -> None:
        """End what still runs: torchruns end their ranks where they can."""
        for process in self.agents.values():
            process.terminate()
        for agent, process in self.agents.items():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill(agent)
