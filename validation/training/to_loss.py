"""Time to the same loss: stock DDP, DDP with a tuned bucket size, FSDP2's tutorial and `plan="auto"`.

    python validation/training/to_loss.py FOLDER --task text --size 100M --backend nccl --nodes 4 --bandwidth 10gbit \
        --precision bf16 --limit 4min
    python validation/training/to_loss.py FOLDER --task images --size small --nodes 2 --bandwidth 200mbit --limit 8min
    python validation/training/to_loss.py FOLDER --sides ddp,again,drop_in --steps 500 --bandwidth 200mbit --limit 20min

A decoder learns Python's own sources byte by byte, or a convolutional network the direction of stripes. Data comes from
a DataLoader with workers; all sides see the same samples from the same weights. Sides advance by turns, `--block` steps
each, and a side's clock runs only in its own turns, waiting for data included. What `auto` searches and a bucket size
takes to tune is counted apart. `drop_in` is `DistributedDataParallel(model, plan="auto")`, which measures and plans in
its first steps; `again` is stock DDP once more, to see what the same thing differs by.
FOLDER/<task>-<size>-<lab>.json is written after every round. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import CLASSES, Gratings, Text, loader
from losses import Curve, table
from models import Decoder, Model, Residuals, classified, next_token
from sides import CAPS_MB, Rig, ddp

from backbeat.errors import BackbeatError, InputError
from backbeat.lab import experiment
from backbeat.lab.setting import Setting, check_requirements
from backbeat.measure.model.inputs import to_device
from backbeat.measure.model.training_step import autocast, release
from backbeat.model.files import write
from backbeat.runtime import DistributedDataParallel
from backbeat.units import parse_duration, parse_rate

HERE = Path(__file__).resolve().parent
SIDES = ("ddp", "tuned", "fsdp2", "auto")
OTHERS = ("again", "drop_in")
"""Sides that only run where they are asked for."""
COMMUNICATORS = 2
PREPARE_S = 900.0
"""What building all sides may take at most."""


def model_of(task: str, size: str) -> tuple[Model, Callable[[int], Any]]:
    """The model, and its data by seed."""
    if (task, size) not in TASKS:
        raise InputError(f"{task} of size {size!r} is not there: there are {', '.join(map(' '.join, TASKS))}")
    return TASKS[task, size]


def _decoder(width: int, layers: int, length: int, batch_size: int) -> tuple[Model, Callable[[int], Any]]:
    def batch(size: int, device: torch.device) -> torch.Tensor:
        return torch.randint(0, 256, (size, length + 1), device=device)

    def build() -> torch.nn.Module:
        return Decoder(width, layers, max(width // 64, 2), length)

    made = Model(
        build=build, batch=batch, loss=next_token, batch_size=batch_size, blocks=r"layers\.\d+", transformer=True
    )
    return made, lambda seed: Text(length, seed)


def _residuals(width: int, depth: int, pixels: int, batch_size: int) -> tuple[Model, Callable[[int], Any]]:
    def batch(size: int, device: torch.device) -> Any:
        shape = (size, 3, pixels, pixels)
        return torch.randn(shape, device=device), torch.randint(0, CLASSES, (size,), device=device)

    made = Model(
        build=lambda: Residuals(width, depth, CLASSES),
        batch=batch,
        loss=classified,
        batch_size=batch_size,
        blocks=r"blocks\.\d+",
        transformer=False,
    )
    return made, lambda seed: Gratings(pixels, seed)


TASKS = {
    ("text", "small"): _decoder(128, 4, 64, 16),
    ("text", "100M"): _decoder(768, 14, 512, 16),
    ("images", "small"): _residuals(32, 1, 32, 16),
    ("images", "40M"): _residuals(96, 3, 64, 64),
}


class Trainee:
    """One side on this rank, with a loader of its own."""

    def __init__(self, rig: Rig, name: str, trained: torch.nn.Module, data: Any, given: dict[str, Any]) -> None:
        self.name, self.rig = name, rig
        self.training = rig.training(trained)
        for group in self.training.optimizer.param_groups:
            group["lr"] = given["lr"]
        pinned = rig.device.type == "cuda"
        self.batches = iter(loader(data, given["batch_size"], given["workers"], pinned))
        self.losses: list[float] = []
        self.block_s: list[float] = []

    def advance(self, steps: int) -> None:
        """Train, and keep the mean over ranks of each step's loss."""
        rig, losses = self.rig, []
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            batch = to_device(next(self.batches), rig.device)
            with autocast(rig.precision, rig.device):
                loss = rig.step.loss(self.training.model, batch)
            loss.backward()
            self.training.update()
            losses.append(loss.detach())
        found = torch.stack(losses).float().cpu()
        self.block_s.append(max(rig.ranks.gather(time.perf_counter() - began)))
        every = rig.ranks.gather(found.tolist())
        self.losses += [sum(one) / len(every) for one in zip(*every, strict=True)]


class Race:
    """All sides of one task on this rank, kept between the calls of the controller."""

    def __init__(self, node: Any, given: dict[str, Any]) -> None:
        model, data = model_of(given["task"], given["size"])
        self.rig = rig = Rig(node, model, given["batch_size"], given["precision"])
        given = {**given, "batch_size": given["batch_size"] or model.batch_size}
        self.prepared_s: dict[str, float] = {}
        self.words: dict[str, str] = {}
        built: dict[str, torch.nn.Module] = {}
        if "auto" in given["sides"]:
            # First, in ranks that have trained nothing.
            built["auto"], seen, self.prepared_s["auto"] = rig.auto(given["budget_s"])
            self.words["auto"] = seen.taken.words
        for name in given["sides"]:
            began = time.monotonic()
            if name == "auto":
                continue
            if name == "tuned":
                caps = rig.tuned(sorted({*CAPS_MB, 25}))
                cap = int(min(caps, key=lambda one: caps[one]))
                self.words[name] = f"{cap} MiB"
                built[name] = ddp(rig.copy(), cap)
            elif name in ("ddp", "again"):
                built[name] = ddp(rig.copy())
            elif name == "drop_in":
                built[name] = DistributedDataParallel(rig.copy(), plan="auto")
            else:
                built[name] = rig.fsdp2(rig.copy())
            self.prepared_s[name] = time.monotonic() - began
        release(rig.device)
        self.trainees = [Trainee(rig, name, one, data(node.rank), given) for name, one in built.items()]
        # Memory, kernels and workers are there before the clock runs: the same for all, and learned from.
        for one in self.trainees:
            one.advance(2)
            one.block_s.clear()
            one.losses.clear()
        self.turn = 0

    def round(self, steps: int) -> dict[str, Any]:
        """Every side by `steps` more; what is known of all."""
        order = self.trainees if self.turn % 2 == 0 else self.trainees[::-1]
        self.turn += 1
        for one in order:
            one.advance(steps)
        return {
            one.name: {
                "losses": one.losses,
                "block_s": one.block_s,
                "prepared_s": self.prepared_s.get(one.name, 0.0),
                "words": self.words.get(one.name, ""),
            }
            for one in self.trainees
        }


_race: Race | None = None


def prepare(node: Any, **given: Any) -> None:
    """Build all sides; the nodes import this module and call it."""
    global _race
    _race = Race(node, given)


def advance(node: Any, *, steps: int) -> dict[str, Any]:
    assert _race is not None
    return _race.round(steps)


def curves_of(sides: dict[str, Any], block: int) -> dict[str, Curve]:
    """A step's end lies on the line between its block's ends."""
    found = {}
    for name, side in sides.items():
        ends, past = [], 0.0
        for seconds in side["block_s"]:
            ends += [past + seconds * (step + 1) / block for step in range(block)]
            past += seconds
        found[name] = Curve(seconds=ends, losses=side["losses"], prepared_s=side["prepared_s"])
    return found


def run(given: argparse.Namespace) -> None:
    ends = time.monotonic() + given.limit
    setting = Setting(nodes=given.nodes, rate_bits=given.bandwidth, backend=given.backend, busy=True)
    path = given.folder / f"{given.task}-{given.size}-{setting.name}.json"
    arguments = {
        "task": given.task, "size": given.size, "batch_size": given.batch_size, "precision": given.precision,
        "sides": given.sides, "budget_s": given.budget, "lr": given.lr, "workers": given.workers,
    }  # fmt: skip
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "lab": setting.name, "block": given.block, **arguments
    }  # fmt: skip
    with experiment.open_lab(setting, COMMUNICATORS) as session:
        record |= session.ask("describe", 60)[0]
        session.ask("call", PREPARE_S, function="to_loss:prepare", arguments=arguments)
        round_s = 0.0
        steps = 0
        while not round_s or (time.monotonic() + round_s < ends and steps < given.steps):
            began = time.monotonic()
            asked = {"function": "to_loss:advance", "arguments": {"steps": given.block}}
            record["sides"] = session.ask("call", max(10 * round_s, PREPARE_S), **asked)[0]
            round_s = time.monotonic() - began
            curves = curves_of(record["sides"], given.block)
            steps = min(len(one.losses) for one in curves.values())
            record["table"] = table(curves, min(given.window, steps))
            write(path, (json.dumps(record, indent=1) + "\n").encode())
            last = {one["side"]: f"{one['last_loss']:.3f}" for one in record["table"]}
            print(f"{steps} steps in {round_s:.0f} s a round, losses {last}", file=sys.stderr, flush=True)
    for one in record["table"]:
        print(words_of(one, record["sides"][str(one["side"])]))


def words_of(row: dict[str, Any], side: dict[str, Any]) -> str:
    reached, whole = row["training_s"], row["with_preparation_s"]
    return (
        f"{row['side']:8} loss {row['loss']:.3f} after {reached:.1f} s of training ({whole:.1f} s with preparation), "
        f"{row['step_s'] * 1e3:.0f} ms a step; {row['last_loss']:.3f} after {row['steps']} steps. {side['words']}"
    )


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="text", choices=("text", "images"))
    parser.add_argument("--size", default="small", help=", ".join(f"{size} ({task})" for task, size in TASKS))
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--bandwidth", default="200mbit")
    parser.add_argument("--batch-size", type=int, help="of each rank; default: the task's own")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--workers", type=int, default=1, help="of each loader")
    parser.add_argument("--block", type=int, default=10, help="steps of one turn")
    parser.add_argument("--window", type=int, default=20, help="steps that a loss is averaged over")
    parser.add_argument("--steps", type=int, default=10**6, help="of each side, at most")
    parser.add_argument("--budget", default="50s", help="of `auto`")
    parser.add_argument("--limit", default="10min", help="begin no round but the first that would pass it")
    given = parser.parse_args(arguments)
    given.sides = given.sides.split(",")
    unknown = [side for side in given.sides if side not in SIDES + OTHERS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no side: there are {', '.join(SIDES + OTHERS)}")
    model_of(given.task, given.size)
    given.bandwidth = parse_rate(given.bandwidth)
    for option in ("budget", "limit"):
        setattr(given, option, parse_duration(getattr(given, option)))
    return given


def main() -> None:
    try:
        given = parsed()
        check_requirements(given.backend)
        given.folder.mkdir(parents=True, exist_ok=True)
        # The nodes import this module.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        run(given)
    except BackbeatError as error:
        print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
