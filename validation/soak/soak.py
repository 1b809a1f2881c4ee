"""Train for an hour on four gloo ranks under torchrun while ranks are killed, frozen and delayed, the world shrinks and
grows, a plan file is corrupted and the disk is full at a checkpoint; and say whether training came through.

    python validation/soak/soak.py --minutes 60 -o build/soak            # --plan units: under FSDP2

Each rank has a torchrun of its own (`--nnodes 2:4`), as on four machines. This process keeps the rendezvous. It takes
faults from a deck that a seed shuffles, waits after each until the job has named it and trains again, and writes
`soak.log` and `summary.json`. It ends with 1 where something was not as it must be, and says what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import queue
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rank import loss_of, make_model, make_optimizer  # noqa: E402

from backbeat.model import Bucket, Mesh, Plan, Sharding, ShardUnit  # noqa: E402
from backbeat.model.files import encode  # noqa: E402

ANSWER_S = 8.0
"""How long the runtime waits at most for other ranks' answers before it says who is missing."""
GRACE_S = 20.0
"""What a loaded machine may take longer."""
SETTLE_STEPS = 15
"""Steps between the end of one fault and the next."""
AHEAD_STEPS = 60
"""The job is told so many steps before its last one."""
SAME = {"buckets": 1e-9, "units": 1e-3}
"""Losses at another number of ranks differ by the order of sums. Units compute in single precision, which differs by
6e-5 after 2500 steps; one step left out differs by 2e-2."""
TORCHS_WORDS = re.compile(r"(reset|closed) by peer|[Tt]imed out waiting|Broken pipe|Connection refused")
"""Under units nothing of backbeat's is in the step: a loss is told by gloo's error, which names no rank."""
GROWTH_BYTES = 16 * 2**20
WARM_STEPS = 100
"""After these a rank's memory is compared with what it has later."""


class HangError(Exception):
    """The job did not do in time what it had to."""


class Job:
    """Four torchruns, what their ranks say, and what was done to them."""

    def __init__(self, folder: Path, *, ranks: int, timeout_s: float, step_ms: float, patience_s: float) -> None:
        self.most = ranks
        self.folder, self.timeout_s, self.step_ms, self.patience_s = folder, timeout_s, step_ms, patience_s
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._log = (folder / "soak.log").open("w")
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
        self._log.write(line + "\n")
        self._log.flush()

    def start(self, agent: int) -> None:
        conf = "is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=120"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{self.most // 2}:{self.most}",
            "--nproc-per-node", "1", "--max-restarts", "100000", "--monitor-interval", "1", "--local-addr", "127.0.0.1",
            "--rdzv-backend", "c10d", "--rdzv-id", "soak", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}",
            "--rdzv-conf", conf,
            str(HERE / "rank.py"), str(self.folder), "--step-ms", str(self.step_ms), "--timeout", str(self.timeout_s),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            # A torchrun that serves the ranks' store and goes away would not be replaced.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        noise = (self.folder / f"torchrun-{agent}.err").open("a")
        self.agents[agent] = process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment, start_new_session=True
        )
        threading.Thread(target=self._read, args=(agent, process), daemon=True).start()

    def _read(self, agent: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self._events.put((agent, json.loads(line)))

    def until(self, done: Callable[[], bool], what: str, limit_s: float | None = None) -> float:
        """Listen until something is so; returns the seconds that took."""
        begin = time.monotonic()
        limit = self.patience_s if limit_s is None else limit_s
        while not done():
            if time.monotonic() - begin > limit:
                raise HangError(f"{what}: not within {limit:.0f} s")
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=0.1))
        return time.monotonic() - begin

    def train(self, steps: int) -> float:
        """Listen until the job has trained so many further steps, or steps again."""
        count = len(self.losses) + steps
        return self.until(lambda: len(self.losses) >= count, f"{steps} steps of training")

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
        if kind == "began":
            self.ranks[agent] = event
            self.restarts += event["rank"] == 0
        self.heard.append(event)
        if kind not in ("saved", "began", "left", "ended"):
            self.say(f"rank {event['rank']} says: {event['text']}")
        elif kind == "began" and event["rank"] == 0:
            self.say(f"{event['ranks']} ranks begin at step {event['step']}")

    def said(self, *kinds: str) -> list[str]:
        return [event["text"] for event in self.heard if event["kind"] in kinds]

    def signal(self, agent: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[agent]["pid"], number)

    def remove(self, agent: int) -> None:
        """The machine is gone: its torchrun and its rank, at once."""
        self._kill(agent)
        del self.agents[agent]

    def _kill(self, agent: int) -> None:
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
                self._kill(agent)


class Faults:
    """What is done to the job. Each returns the rank it was done to and the words that named it."""

    def __init__(self, job: Job, chance: random.Random) -> None:
        self._job, self._chance = job, chance

    def _victim(self) -> tuple[int, int]:
        agent = self._chance.choice(sorted(self._job.agents))
        rank: int = self._job.ranks[agent]["rank"]
        self._job.say(f"… rank {rank}")
        return agent, rank

    def _named(self, *kinds: str, begin: str = "", limit_s: float | None = None) -> list[str]:
        job = self._job

        def found() -> list[str]:
            return [text for text in job.said(*kinds) if text.startswith(begin)]

        job.until(lambda: bool(found()), f"words of kind {' or '.join(kinds)}", limit_s)
        return found()

    def _lost(self) -> list[str]:
        """The others' words on a rank that is gone: after the timeout at the latest, and the time to ask around."""
        return self._named(*LOST, limit_s=self._job.timeout_s + ANSWER_S + GRACE_S)

    def kill(self) -> tuple[int, list[str]]:
        """A rank dies at some moment of a step."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGKILL)
        return rank, self._lost()

    def freeze(self) -> tuple[int, list[str]]:
        """A rank stands still for less than the timeout, and goes on."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGSTOP)
        self._job.listen(self._chance.uniform(1.5, self._job.timeout_s / 3))
        self._job.signal(agent, signal.SIGCONT)
        return rank, self._named("still", begin=f"rank {rank} ")

    def hang(self) -> tuple[int, list[str]]:
        """A rank stands still for longer than the timeout: the others give it up."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGSTOP)
        try:
            return rank, self._lost()
        finally:
            self._job.signal(agent, signal.SIGCONT)

    def delay(self) -> tuple[int, list[str]]:
        """A rank takes many times as long for some steps."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGUSR1)
        return rank, self._named("slow", begin=f"rank {rank} ")

    def plan(self) -> tuple[int, list[str]]:
        """The plan file is damaged, and a rank dies: the next start finds it."""
        file = self._job.folder / "plan.json"
        good = file.read_bytes()
        damage = self._chance.choice(["cut", "letters", "another model's"])
        if damage == "cut":
            file.write_bytes(good[: self._chance.randrange(1, len(good) - 1)])
        elif damage == "letters":
            file.write_bytes(bytes(self._chance.randrange(256) for _ in range(200)))
        else:
            file.write_bytes(good.replace(b".weight", b".kernel").replace(b'"2"', b'"kernel.2"'))
        try:
            rank, words = self.kill()
            # On every rank, before the file is good again: ranks that read different ones would not agree.
            self._job.until(
                lambda: len(self._job.said("plan")) >= len(self._job.agents), "a report of every rank on its plan"
            )
            return rank, [*self._job.said("plan"), *words]
        finally:
            file.write_bytes(good)

    def disk(self) -> tuple[int, list[str]]:
        """No space is left on the device where the next checkpoint is written."""
        draft = self._job.folder / "checkpoint.draft"
        with contextlib.suppress(FileExistsError):
            draft.symlink_to("/dev/full")
        return 0, self._named("unsaved")

    def shrink(self) -> tuple[int, list[str]]:
        """A machine is gone for good."""
        agent, rank = self._victim()
        before = len(self._job.agents)
        self._job.remove(agent)
        words = self._lost()
        self._world(before - 1)
        return rank, words

    def grow(self) -> tuple[int, list[str]]:
        """A machine comes back."""
        agent = next(number for number in range(self._job.most) if number not in self._job.agents)
        self._job.start(agent)
        self._world(len(self._job.agents))
        return self._job.ranks[agent]["rank"], [f"{len(self._job.agents)} ranks train"]

    def _world(self, ranks: int) -> None:
        job = self._job
        count = len(job.losses)
        job.until(lambda: len(job.losses) > count and job.world == ranks, f"training on {ranks} ranks")


ALL = ("freeze", "delay", "kill", "hang", "plan", "disk", "shrink")
"""`grow` follows each `shrink`."""


LOST = ("fault", "stopped")
"""What a rank says on the loss of another; torchrun may have told it to leave meanwhile."""
LOSES_A_RANK = ("kill", "hang", "plan", "shrink")


def write_plan(file: Path, kind: str) -> None:
    """Buckets of three gradients, last layer first, on two communicators; or units, of which half reshard."""
    if kind == "units":
        units = tuple(ShardUnit(modules=(name,), reshard=name in "02", prefetch=1) for name in "0246")
        sharding = Sharding(
            mesh=Mesh(replicate=1, shard=1), param_dtype="fp32", reduce_dtype="fp32", reduce_scatter_buffers=1,
            separate_reduce_scatter=False, units=units,
        )  # fmt: skip
        file.write_bytes(encode(Plan(strategy="soak", model="soak", sharding=sharding)))
        return
    names = [name for name, _ in make_model().named_parameters()][::-1]
    buckets = [tuple(names[at : at + 3]) for at in range(0, len(names), 3)]
    plan = Plan(
        strategy="soak",
        model="soak",
        communicators=2,
        buckets=tuple(Bucket(gradients=one, communicator=at % 2) for at, one in enumerate(buckets)),
    )
    file.write_bytes(encode(plan))


def undisturbed(steps: int) -> list[float]:
    """The losses of one process that nothing happens to, without communication."""
    model = make_model()
    optimizer = make_optimizer(model)
    found = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def growth(memory: dict[int, list[tuple[int, int]]]) -> tuple[int, int]:
    """The most that the memory of one rank grew by after it had warmed up, in bytes, and over how many steps."""
    worst = (0, 0)
    for samples in memory.values():
        warm = [one for one in samples if one[0] >= samples[0][0] + WARM_STEPS]
        if len(warm) >= 2:
            worst = max(worst, (warm[-1][1] - warm[0][1], warm[-1][0] - warm[0][0]))
    return worst


def judge(job: Job, faults: list[dict[str, Any]], same: float) -> dict[str, Any]:
    """What must hold, and whether it does."""
    reference = undisturbed(max((step for step, _ in job.losses), default=-1) + 1)
    differs = [
        abs(loss - reference[step]) / max(abs(reference[step]), 1e-12) for step, loss in job.losses
    ]  # fmt: skip
    grown, over = growth(job.memory)
    unnamed = [f"{fault['fault']} at step {fault['step']}" for fault in faults if not fault["named"]]
    wrong = []
    if not faults or not job.losses:
        wrong.append("nothing was tried")
    if not all(math.isfinite(one) and one <= same for one in differs):
        wrong.append(f"losses differ from an undisturbed run by up to {max(differs):.1e}")
    if unnamed:
        wrong.append(f"faults that nobody named: {', '.join(unnamed)}")
    if grown > GROWTH_BYTES:
        wrong.append(f"a rank's memory grew by {grown} bytes in {over} steps")
    return {
        "steps": len(reference),
        "steps_trained": len(job.losses),
        "largest_relative_difference_of_losses": max(differs, default=0.0),
        "last_loss": reference[-1] if reference else None,
        "memory_grew_bytes": grown,
        "memory_over_steps": over,
        "restarts": job.restarts - 1,
        "wrong": wrong,
    }


def soak(options: argparse.Namespace) -> int:
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for left in ("end", "checkpoint.pt", "checkpoint.draft"):
        (folder / left).unlink(missing_ok=True)
    write_plan(folder / "plan.json", options.plan)
    chance = random.Random(options.seed)
    job = Job(
        folder, ranks=options.ranks, timeout_s=options.timeout, step_ms=options.step_ms, patience_s=options.patience
    )
    tools = Faults(job, chance)
    summary: dict[str, Any] = {
        "command": " ".join(["python", "validation/soak/soak.py", *sys.argv[1:]]),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "ranks": options.ranks,
        "plan": options.plan,
        "seed": options.seed,
        "timeout_s": options.timeout,
    }
    faults: list[dict[str, Any]] = []
    stuck = None
    begin = time.monotonic()
    try:
        for agent in range(options.ranks):
            job.start(agent)
        job.until(lambda: job.world == options.ranks, f"training on {options.ranks} ranks")
        deck: list[str] = []
        while time.monotonic() - begin < options.minutes * 60 and len(faults) < options.faults:
            if not deck:
                # Undisturbed: memory that grows shows here.
                job.train(options.rest)
                deck = [one for fault in chance.sample(options.kinds, len(options.kinds)) for one in _with_grow(fault)]
            job.train(SETTLE_STEPS)
            faults.append(_try(job, tools, deck.pop(0), options.plan))
        job.train(SETTLE_STEPS)
        job.end()
        job.say("ended as asked")
    except HangError as error:
        stuck = str(error)
        job.say(f"hang: {stuck}; where each rank stands is in torchrun-*.err")
        for agent in job.ranks:
            job.signal(agent, signal.SIGUSR2)
        time.sleep(1)
    finally:
        job.close()
    found = judge(job, faults, SAME[options.plan])
    found["wrong"] += [f"hang: {stuck}"] if stuck else []
    summary.update(seconds=round(time.monotonic() - begin), **found, faults=faults)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    job.say("; ".join(found["wrong"]) or _praise(found, len(faults), options.plan))
    return 1 if found["wrong"] else 0


def _with_grow(fault: str) -> list[str]:
    return [fault, "grow"] if fault == "shrink" else [fault]


def _try(job: Job, tools: Faults, fault: str, plan: str) -> dict[str, Any]:
    job.heard.clear()
    step, begin = job.step, time.monotonic()
    job.say(fault)
    rank, words = getattr(tools, fault)()
    named_s = time.monotonic() - begin
    job.train(1)
    again_s = time.monotonic() - begin
    words += job.said(*LOST, "plan") if fault in LOSES_A_RANK else []
    return {
        "fault": fault,
        "rank": rank,
        "step": step,
        "named": any(_names(rank, one, plan) for one in words) if fault in LOSES_A_RANK else bool(words),
        "named_after_s": round(named_s, 1),
        "trains_after_s": round(again_s, 1),
        "words": sorted(set(words)),
    }


def _names(rank: int, words: str, plan: str) -> bool:
    """Whether an error says which rank is gone; under units, that one is. Rank 0 keeps the store that the others
    ask."""
    if plan == "units":
        return bool(TORCHS_WORDS.search(words))
    if rank == 0 and "the rank that keeps it" in words:
        return True
    return bool(re.search(rf"\branks? (\d+, )*{rank}\b", words)) and "not answer" in words


def _praise(found: dict[str, Any], faults: int, plan: str) -> str:
    told = "all named" if plan == "buckets" else "all told, lost ranks in torch's words"
    return (
        f"{faults} faults, {told}; {found['steps_trained']} steps, losses within "
        f"{found['largest_relative_difference_of_losses']:.0e} of an undisturbed run; {found['restarts']} restarts; "
        f"memory grew by {found['memory_grew_bytes'] / 2**20:.1f} MiB over {found['memory_over_steps']} steps"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="How long to go on with faults.")
    parser.add_argument("--faults", type=int, default=10**9, help="Stop after so many.")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(ALL), help=f"Of {', '.join(ALL)}.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plan", choices=sorted(SAME), default="buckets", help="What the ranks train under.")
    parser.add_argument("--rest", type=int, default=500, help="Steps without faults before each turn of the deck.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=12, help="The process group's, in seconds.")
    parser.add_argument("--step-ms", type=float, default=15, help="Computing that a step stands for.")
    parser.add_argument("--patience", type=float, default=180, help="Seconds without progress that count as a hang.")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/soak"))
    torch.set_num_threads(1)
    return soak(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
