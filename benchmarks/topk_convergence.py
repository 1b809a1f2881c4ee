"""Training with compressed buckets against dense training: the loss that each reaches in as many steps.

    python benchmarks/topk_convergence.py [--task cnn,transformer] [--steps 600] [--seeds 0,1,2] [--json FILE]

Two ranks over gloo, on generated data. `cnn`: images of noise with one of eight small patterns somewhere, to be told
apart by a small convolutional network. `transformer`: sequences to be reversed by a small transformer. Every method
sees the same data in the same order, with the same optimizer, SGD with momentum 0.9; printed is the mean loss over
held-out data at the end, one column a seed, and the largest distance to the dense loss of the same seed. Rows are saved
as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The optimizers would import it, on every rank.
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.model import Bucket, Plan
from backbeat.model.files import write
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel

CLASSES, SIDE = 8, 16
VOCABULARY, LENGTH = 16, 10

FULL = {"momentum_correction": True, "warmup": 0.25}
"""Momentum correction, and a warm-up over a quarter of the steps."""

METHODS: dict[str, tuple[Compression | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "top-k 1 %": (Compression(density=0.01), FULL),
    "top-k 5 %": (Compression(density=0.05), FULL),
    "top-k 1 %, warm-up only": (Compression(density=0.01), {"warmup": 0.25}),
    "top-k 1 %, neither": (Compression(density=0.01), {}),
}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(48 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x).flatten(1))
        return found


class Transformer(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.3)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.tokens(x) + self.positions))
        return found


def images(source: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    patterns = (torch.rand(CLASSES, 5, 5, generator=torch.Generator().manual_seed(5)) > 0.5).float() * 2 - 1
    labels = torch.randint(CLASSES, (count,), generator=source)
    indices = torch.randint(SIDE - 5, (count, 2), generator=source).tolist()
    found = 0.4 * torch.randn(count, 1, SIDE, SIDE, generator=source)
    for image, label, (row, column) in zip(found, labels.tolist(), indices, strict=True):
        image[0, row : row + 5, column : column + 5] += patterns[label]
    return found, labels


def sequences(source: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=source)
    return tokens, tokens.flip(1)


TASKS = {
    "cnn": (Convolutional, images, 32, 0.03),
    "transformer": (Transformer, sequences, 32, 0.05),
}


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    scores = model(batch[0])
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), batch[1].reshape(-1))


def plan_of(model: nn.Module, compression: Compression) -> Plan:
    """Four buckets in the order of backward; vectors travel dense, as a planner would send them."""
    named = list(model.named_parameters())[::-1]
    vectors = [name for name, parameter in named if parameter.dim() < 2]
    matrices = [name for name, parameter in named if parameter.dim() > 1]
    size = math.ceil(len(matrices) / 3)
    buckets = [matrices[start : start + size] for start in range(0, len(matrices), size)]
    return Plan(
        strategy="compressed",
        model=type(model).__name__,
        communicators=1,
        buckets=(
            *(Bucket(gradients=tuple(bucket), communicator=0, compression=compression) for bucket in buckets),
            Bucket(gradients=tuple(vectors), communicator=0),
        ),
    )


def train(task: str, method: str, seed: int, steps: int, rank: int) -> float:
    """The loss over held-out data in the end."""
    factory, data, batch, rate = TASKS[task]
    torch.manual_seed(seed)
    model = factory()
    compression, options = METHODS[method]
    if compression is None:
        wrapped: Any = TorchDDP(model)
    else:
        chosen = {key: value for key, value in options.items() if key != "warmup"}
        chosen["warmup_steps"] = int(options.get("warmup", 0) * steps)
        wrapped = DistributedDataParallel(model, plan=plan_of(model, compression), compression=chosen)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate, momentum=0.9)
    if compression is not None:
        wrapped.attach(optimizer, max_grad_norm=None)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * rate, total_steps=steps, cycle_momentum=False)
    source = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        loss_of(wrapped, data(source, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(model.eval(), data(torch.Generator().manual_seed(99), 1024)))


@contextmanager
def job(rank: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(arguments: argparse.Namespace, rank: int, port: int) -> None:
    """One rank: every row in turn; rank 0 prints and saves."""
    rows: list[dict[str, Any]] = []
    with job(rank, port):
        for task in arguments.task.split(","):
            dense: list[float] = []
            for method in METHODS if arguments.methods is None else arguments.methods.split(";"):
                begin = time.perf_counter()
                losses = [train(task, method, int(seed), arguments.steps, rank) for seed in arguments.seeds.split(",")]
                dense = dense or losses
                gap = max(loss - other for loss, other in zip(losses, dense, strict=True))
                row = {
                    "task": task, "method": method, "steps": arguments.steps, "losses": losses, "worst_gap": gap,
                    "seconds": time.perf_counter() - begin,
                }  # fmt: skip
                rows.append(row)
                if rank == 0:
                    shown = "  ".join(f"{loss:.4f}" for loss in losses)
                    print(
                        f"{task:12s} {method:36s} {shown}   worst gap {gap:+.4f}   {row['seconds']:.0f} s", flush=True
                    )
                    if arguments.json:
                        save(arguments, rows)


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    record = {
        "command": " ".join(["python", "benchmarks/topk_convergence.py", *sys.argv[1:]]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "rows": rows,
    }
    write(Path(arguments.json), json.dumps(record, indent=1).encode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cnn,transformer")
    parser.add_argument("--methods", help="names from the table, separated by semicolons; the first is the base")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", default="", help="where to save the rows")
    arguments = parser.parse_args()
    # Forks, which find torch imported; before any thread is started.
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=work, args=(arguments, rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join()
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
