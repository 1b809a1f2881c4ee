"""One rank of the soak: trains a small model under torchrun, resumes from the last checkpoint, names what goes wrong.

It prints one JSON line for each thing that `soak.py` wants to know. The batch is the same at any number of ranks and
all is in double precision, so losses are those of one process up to rounding. Units gather parameters in single
precision: a plan knows no other.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from backbeat.errors import BackbeatError
from backbeat.model import Mesh, Plan
from backbeat.runtime import DistributedDataParallel, full_state_dict, load_full_state_dict, parallelize
from backbeat.show.drift import Level

BATCH = 12
"""Divisible by 1, 2, 3 and 4 ranks."""
WIDTH = 48
SAVE_EVERY = 10
TELL_EVERY = 10
SLOW_S, SLOW_STEPS = 0.2, 30
"""What a rank that is slowed down waits in each step, and for how many."""
STILL_S = 1.0
"""A process that nothing ran in for this long says that it stood still."""


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    wanted = inputs[:, :4].prod(dim=1, keepdim=True)
    return inputs[rank::ranks], wanted[rank::ranks]


def loss_of(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    inputs, wanted = batch_of(step, rank, ranks)
    return nn.functional.mse_loss(model(inputs).double(), wanted)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What any kind of plan on any number of ranks goes on from, on rank 0. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": full_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "step": step,
    }


def save(file: Path, state: dict[str, Any]) -> None:
    """The whole file or none: what is there stays until the new one is on disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    draft = file.with_suffix(".draft")
    try:
        with draft.open("wb", buffering=0) as stream:
            stream.write(buffer.getbuffer())
            os.fsync(stream.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def tell(kind: str, **facts: Any) -> None:
    # One write of less than a pipe's buffer: lines of several ranks do not mix.
    line = json.dumps({"kind": kind, "rank": int(os.environ["RANK"]), "pid": os.getpid(), **facts})
    os.write(1, (line + "\n").encode())


def notice_stops() -> None:
    """A thread that ticks: a gap means that the whole process stood still, whatever it was doing."""
    before = time.monotonic()
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        if now - before > STILL_S:
            tell("still", text=f"rank {os.environ['RANK']} stood still for {now - before:.1f} s")
        before = now


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Rank:
    """The training loop of one rank."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder, self.step_s = folder, step_s
        self.checkpoint = folder / "checkpoint.pt"
        self.leaving = False
        self.slow_s, self.slow_until = 0.0, 0
        self.step = 0
        self._level = Level()

    def asked_to_leave(self, *_: object) -> None:
        """torchrun ends this process. An error on its way is told before: the flag is looked at between steps."""
        self.leaving = True

    def slowed_down(self, *_: object) -> None:
        self.slow_s, self.slow_until = SLOW_S, self.step + SLOW_STEPS

    def run(self) -> int:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = self._parallel(ranks)
        optimizer = make_optimizer(model)
        if self.checkpoint.exists():
            kept = torch.load(self.checkpoint)
            load_full_state_dict(model, kept["model"])
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, optimizer, kept["optimizer"], options=options)
            self.step = kept["step"]
        tell("began", step=self.step, ranks=ranks)
        ended = False
        while not ended and not self.leaving:
            ended = self._one_step(model, optimizer, rank, ranks)
        # torchrun takes a rank that leaves with 0 for one that has done its work.
        return 0 if ended else 1

    def _parallel(self, ranks: int) -> nn.Module:
        try:
            plan = Plan.load(self.folder / "plan.json")
            if plan.sharding is not None:
                # Units are planned for one number of ranks, and this job has several.
                mesh = Mesh(replicate=1, shard=ranks)
                plan = replace(plan, sharding=replace(plan.sharding, mesh=mesh))
            return parallelize(make_model(), plan)
        except BackbeatError as error:
            tell("plan", text=str(error))
            return DistributedDataParallel(make_model())

    def _one_step(self, model: nn.Module, optimizer: Any, rank: int, ranks: int) -> bool:
        begin = time.monotonic()
        time.sleep(self.step_s + (self.slow_s if self.step < self.slow_until else 0.0))
        loss = loss_of(model, self.step, rank, ranks)
        self._look(time.monotonic() - begin)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # No collective of our own: what fails, fails in backward, where the runtime names it.
        tell("loss", step=self.step, loss=loss.item(), ranks=ranks, start=os.environ["MASTER_PORT"])
        if self.step % TELL_EVERY == 0:
            tell("alive", step=self.step, bytes=resident_bytes())
        self.step += 1
        if self.step % SAVE_EVERY == 0:
            state = state_of(model, optimizer, self.step)
            if rank == 0:
                self._save(state)
        return self._last()

    def _save(self, state: dict[str, Any]) -> None:
        try:
            save(self.checkpoint, state)
        except OSError as error:
            tell("unsaved", step=self.step, text=f"the checkpoint of step {self.step} is not written: {error}")

    def _last(self) -> bool:
        """Whether this was the last step: the file names one far enough ahead that every rank sees it in time."""
        end = self.folder / "end"
        return end.exists() and self.step >= int(end.read_text())

    def _look(self, own_s: float) -> None:
        """Name this rank where it takes longer than it did."""
        self._level, shift = self._level.after(self.step, own_s)
        if shift is not None and shift.ratio > 1.5:
            text = f"rank {dist.get_rank()} takes {shift.ratio:.1f} times as long since step {shift.since_step}"
            tell("slow", step=self.step, text=text)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = Rank(options.folder, options.step_ms * 1e-3)
    signal.signal(signal.SIGTERM, rank.asked_to_leave)
    signal.signal(signal.SIGUSR1, rank.slowed_down)
    # A hang is reported with every rank's stack.
    faulthandler.register(signal.SIGUSR2)
    threading.Thread(target=notice_stops, daemon=True).start()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
        return rank.run()
    except (BackbeatError, RuntimeError) as error:
        # A rank that was told to leave meets others that have left.
        tell("stopped" if rank.leaving else "fault", step=rank.step, text=" ".join(str(error).split()))
        return 1


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Threads of a process group whose peers are gone may wait for them at a regular exit.
    os._exit(code)
