"""What a reader follows through one backward of the wrapper: functions called, and how often into another file.

    python benchmarks/step_calls.py [--list]

Two gloo ranks train a model of four parameters in two buckets for as long as steps are timed, and then some. Then rank
0 counts one backward: calls of functions of backbeat's, the files they are in, and changes of file, which are calls
from one file into another. Sides: `two buckets`, dense; `compressed`, the same buckets by top-k with the optimizer
handed over. `--list` prints every call, indented by its depth.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import backbeat
from backbeat.model import Bucket, Compression, Plan
from backbeat.runtime import DistributedDataParallel

PACKAGE = f"{Path(backbeat.__file__).parent}/"
STEPS = 20
SIDES = ("two buckets", "compressed")


class Calls:
    """Calls of backbeat's functions on this thread."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.changes = 0
        self.lines: list[str] = []
        self._contexts: set[Any] = set()
        """Generators that were entered: held, so that no other gets their number."""

    def note(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions, and the second half of a context, are no functions to a reader.
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if code.co_flags & inspect.CO_GENERATOR:
            if frame in self._contexts:
                return
            self._contexts.add(frame)
        callers = list(_callers(frame))
        self.changes += not callers or callers[0] != code.co_filename
        self.files.append(code.co_filename)
        self.lines.append(f"{'  ' * len(callers)}{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}")

    def words(self) -> str:
        return f"{len(self.files)} calls, {self.changes} changes of file, {len(set(self.files))} files"


def _callers(frame: Any) -> Any:
    """The files of the functions of backbeat's that called this one, the nearest first."""
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_filename


def two_buckets(compression: Compression | None) -> Plan:
    names = (("2.bias", "2.weight"), ("0.bias", "0.weight"))
    buckets = tuple(Bucket(gradients=each, communicator=0, compression=compression) for each in names)
    return Plan(strategy="two", model="two", communicators=1, buckets=buckets)


def train(rank: int, folder: str, side: str, listed: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    compressed = side == "compressed"
    model = DistributedDataParallel(model, plan=two_buckets(Compression(density=0.01) if compressed else None))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if compressed:
        model.attach(optimizer, max_grad_norm=None)
    batch, calls = torch.randn(8, 64), Calls()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch).sum()
        counts = step == STEPS - 1 and rank == 0
        sys.setprofile(calls.note if counts else None)
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
    if rank == 0:
        print(f"{side}: {calls.words()}", flush=True)
        if listed:
            print("\n".join(calls.lines), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    listed = parser.parse_args().list
    for side in SIDES:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, (folder, side, listed), nprocs=2)


if __name__ == "__main__":
    main()
