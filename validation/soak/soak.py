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
import random
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from job import HangError, Job
from rank import loss_of, make_model, make_optimizer

from backbeat.comm.machine import source
from backbeat.model import Bucket, Mesh, Plan, Sharding, ShardUnit

ANSWER_S = 8.0
"""How long the runtime waits at most for other ranks' answers before it says who is missing."""
GRACE_S = 20.0
"""What a loaded machine may take longer."""
SETTLE_STEPS = 15
"""Steps between the end of one fault and the next."""
SAME = {"buckets": 1e-9, "units": 1e-3}
"""Losses at another number of ranks differ by the order of sums. Units compute in single precision, which differs by
6e-5 after 2500 steps; one step left out differs by 2e-2."""
TORCHS_WORDS = re.compile(r"(reset|closed) by peer|[Tt]imed out waiting|Broken pipe|Connection refused")
"""Under units nothing of backbeat's is in the step: a loss is told by gloo's error, which names no rank."""
GROWTH_BYTES = 16 * 2**20
WARM_STEPS = 100
"""After these a rank's memory is compared with what it has later."""
ALL = ("freeze", "delay", "kill", "hang", "plan", "disk", "shrink")
"""`grow` follows each `shrink`."""
LOST = ("fault", "stopped")
"""What a rank says on the loss of another; torchrun may have told it to leave meanwhile."""
LOSES_A_RANK = ("kill", "hang", "plan", "shrink")


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
        said = lambda: self._job.said(*kinds, begin=begin)  # noqa: E731
        self._job.until(lambda: bool(said()), f"words of kind {' or '.join(kinds)}", limit_s)
        return said()

    def _lost(self) -> list[str]:
        """The others' words on a rank that is gone: after the timeout at the latest, and the time to ask around."""
        return self._named(*LOST, limit_s=self._job.options.timeout + ANSWER_S + GRACE_S)

    def kill(self) -> tuple[int, list[str]]:
        """A rank dies at some moment of a step."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGKILL)
        return rank, self._lost()

    def freeze(self) -> tuple[int, list[str]]:
        """A rank stands still for less than the timeout, and goes on."""
        agent, rank = self._victim()
        self._job.signal(agent, signal.SIGSTOP)
        self._job.listen(self._chance.uniform(1.5, self._job.options.timeout / 3))
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
        cut, letters = good[: self._chance.randrange(1, len(good) - 1)], self._chance.randbytes(200)
        another_models = good.replace(b".weight", b".kernel").replace(b'"2"', b'"kernel.2"')
        file.write_bytes(self._chance.choice([cut, letters, another_models]))
        try:
            rank, words = self.kill()
            # On every rank, before the file is good again: ranks that read different ones would not agree.
            every = lambda: len(self._job.said("plan")) >= len(self._job.agents)  # noqa: E731
            self._job.until(every, "a report of every rank on its plan")
            return rank, [*self._job.said("plan"), *words]
        finally:
            file.write_bytes(good)

    def disk(self) -> tuple[int, list[str]]:
        """No space is left on the device where the next checkpoint is written."""
        with contextlib.suppress(FileExistsError):
            (self._job.folder / "checkpoint.draft").symlink_to("/dev/full")
        return 0, self._named("unsaved")

    def shrink(self) -> tuple[int, list[str]]:
        """A machine is gone for good."""
        agent, rank = self._victim()
        self._job.kill(agent)
        del self._job.agents[agent]
        words = self._lost()
        self._world()
        return rank, words

    def grow(self) -> tuple[int, list[str]]:
        """A machine comes back."""
        agent = next(number for number in range(self._job.options.ranks) if number not in self._job.agents)
        self._job.start(agent)
        self._world()
        return self._job.ranks[agent]["rank"], [f"{len(self._job.agents)} ranks train"]

    def _world(self) -> None:
        job, count, ranks = self._job, len(self._job.losses), len(self._job.agents)
        job.until(lambda: len(job.losses) > count and job.world == ranks, f"training on {ranks} ranks")


def plan_of(kind: str) -> Plan:
    """Buckets of three gradients, last layer first, on two communicators; or units, of which half reshard."""
    if kind == "units":
        units = tuple(ShardUnit(modules=(name,), reshard=name in "02", prefetch=1) for name in "0246")
        sharding = Sharding(
            mesh=Mesh(replicate=1, shard=1), param_dtype="fp32", reduce_dtype="fp32", reduce_scatter_buffers=1,
            separate_reduce_scatter=False, units=units,
        )  # fmt: skip
        return Plan(strategy="soak", model="soak", sharding=sharding)
    names = [name for name, _ in make_model().named_parameters()][::-1]
    threes = [tuple(names[at : at + 3]) for at in range(0, len(names), 3)]
    buckets = tuple(Bucket(gradients=one, communicator=at % 2) for at, one in enumerate(threes))
    return Plan(strategy="soak", model="soak", communicators=2, buckets=buckets)


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
    warm = [[one for one in samples if one[0] >= samples[0][0] + WARM_STEPS] for samples in memory.values()]
    return max(((one[-1][1] - one[0][1], one[-1][0] - one[0][0]) for one in warm if len(one) >= 2), default=(0, 0))


def judge(job: Job, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """What must hold, and whether it does."""
    reference = undisturbed(max((step for step, _ in job.losses), default=-1) + 1)
    differs = [abs(loss - reference[step]) / max(abs(reference[step]), 1e-12) for step, loss in job.losses]
    grown, over = growth(job.memory)
    unnamed = [f"{fault['fault']} at step {fault['step']}" for fault in faults if not fault["named"]]
    wrong = []
    if not faults or not job.losses:
        wrong.append("nothing was tried")
    if not all(math.isfinite(one) and one <= SAME[job.options.plan] for one in differs):
        wrong.append(f"losses differ from an undisturbed run by up to {max(differs):.1e}")
    if unnamed:
        wrong.append(f"faults that nobody named: {', '.join(unnamed)}")
    if grown > GROWTH_BYTES:
        wrong.append(f"a rank's memory grew by {grown} bytes in {over} steps")
    return {
        "steps": len(reference),
        "steps_trained": len(job.losses),
        "largest_relative_difference_of_losses": max(differs, default=0.0),
        "memory_grew_bytes": grown,
        "memory_over_steps": over,
        "restarts": job.restarts - 1,
        "wrong": wrong,
    }


def soak(options: argparse.Namespace) -> int:
    options.output = folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for left in ("end", "checkpoint.pt", "checkpoint.draft"):
        (folder / left).unlink(missing_ok=True)
    plan_of(options.plan).save(folder / "plan.json")
    summary = msgspec.to_builtins(source(shlex.join(["python", *sys.argv]), torch.device("cpu")))
    summary |= {name: getattr(options, name) for name in ("ranks", "plan", "seed", "timeout")}
    job, chance, faults, stuck = Job(options), random.Random(options.seed), [], None
    tools, begin = Faults(job, chance), time.monotonic()
    try:
        for agent in range(options.ranks):
            job.start(agent)
        job.until(lambda: job.world == options.ranks, f"training on {options.ranks} ranks")
        deck: list[str] = []
        while time.monotonic() - begin < options.minutes * 60 and len(faults) < options.faults:
            if not deck:
                # Undisturbed: memory that grows shows here.
                job.train(options.rest)
                shuffled = chance.sample(options.kinds, len(options.kinds))
                deck = [one for fault in shuffled for one in (fault, "grow") if one != "grow" or fault == "shrink"]
            job.train(SETTLE_STEPS)
            faults.append(attempt(job, tools, deck.pop(0)))
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
    found = judge(job, faults)
    found["wrong"] += [f"hang: {stuck}"] if stuck else []
    summary.update(seconds=round(time.monotonic() - begin), **found, faults=faults)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    job.say("; ".join(found["wrong"]) or f"{len(faults)} faults, all told; {found}")
    return 1 if found["wrong"] else 0


def attempt(job: Job, tools: Faults, fault: str) -> dict[str, Any]:
    job.heard.clear()
    step, begin = job.step, time.monotonic()
    job.say(fault)
    rank, words = getattr(tools, fault)()
    named_s = time.monotonic() - begin
    job.train(1)
    words += job.said(*LOST, "plan") if fault in LOSES_A_RANK else []
    return {
        "fault": fault,
        "rank": rank,
        "step": step,
        "named": any(names(rank, one, job.options.plan) for one in words) if fault in LOSES_A_RANK else bool(words),
        "named_after_s": round(named_s, 1),
        "trains_after_s": round(time.monotonic() - begin, 1),
        "words": sorted(set(words)),
    }


def names(rank: int, words: str, plan: str) -> bool:
    """Whether an error says which rank is gone; under units, that one is. Rank 0 keeps the store that the others
    ask."""
    if plan == "units":
        return bool(TORCHS_WORDS.search(words))
    if rank == 0 and "the rank that keeps it" in words:
        return True
    return bool(re.search(rf"\branks? (\d+, )*{rank}\b", words)) and "not answer" in words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long to go on with faults")
    parser.add_argument("--faults", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plan", choices=sorted(SAME), default="buckets", help="what the ranks train under")
    parser.add_argument("--rest", type=int, default=500, help="steps without faults before each turn of the deck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=12, help="the process group's, in seconds")
    parser.add_argument("--step-ms", type=float, default=15, help="computing that a step stands for")
    parser.add_argument("--patience", type=float, default=180, help="seconds without progress that count as a hang")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/soak"))
    torch.set_num_threads(1)
    return soak(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
