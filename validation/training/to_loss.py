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
FOLDER/<task>-<size>-<lab>.json is written after every round. Needs root; with `--backend nccl` a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.errors import InputError
from backbeat.lab import experiment
from backbeat.measure.model.inputs import to_device
from backbeat.measure.model.training_step import autocast, release
from backbeat.runtime import DistributedDataParallel
from validation import collect
from validation.training.data import Gratings, Text, loader
from validation.training.models import Model, decoder, residuals
from validation.training.sides import Rig, ddp

SIDES = ("ddp", "tuned", "fsdp2", "auto", "again", "drop_in")
COMMUNICATORS = 2
PREPARE_S = 900.0
"""What building all sides may take at most."""
TASKS: dict[tuple[str, str], tuple[Model, Callable[[int], Any]]] = {
    ("text", "small"): (decoder(128, 4, 64, 16), partial(Text, 64)),
    ("text", "100M"): (decoder(768, 14, 512, 16), partial(Text, 512)),
    ("images", "small"): (residuals(32, 1, 32, 16), partial(Gratings, 32)),
    ("images", "40M"): (residuals(96, 3, 64, 64), partial(Gratings, 64)),
}
"""The model, and its data by seed."""


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
        model, data = TASKS[given["task"], given["size"]]
        self.rig = rig = Rig(node, model, given["batch_size"], given["precision"])
        given = {**given, "batch_size": given["batch_size"] or model.batch_size}
        self.prepared_s: dict[str, float] = {}
        self.words: dict[str, str] = {}
        built: dict[str, torch.nn.Module] = {}
        if "auto" in given["sides"]:
            # First, in ranks that have trained nothing.
            built["auto"], seen, self.prepared_s["auto"] = rig.auto(given["budget_s"])
            self.words["auto"] = seen.taken.words
        for name in [name for name in given["sides"] if name != "auto"]:
            began = time.monotonic()
            if name == "tuned":
                cap, _ = rig.fastest_cap()
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


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` losses at each step, from the first full window on.

    >>> smooth([4.0, 2.0, 2.0, 0.0], 2)
    [3.0, 2.0, 1.0]
    """
    return [sum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def ends_s(block_s: Sequence[float], block: int) -> list[float]:
    """A step's end lies on the line between its block's ends.

    >>> ends_s([2.0, 4.0], 2)
    [1.0, 2.0, 4.0, 6.0]
    """
    found, past = [], 0.0
    for seconds in block_s:
        found += [past + seconds * (step + 1) / block for step in range(block)]
        past += seconds
    return found


def table(sides: Mapping[str, Mapping[str, Any]], block: int, window: int) -> list[dict[str, Any]]:
    """A row a side: time to the lowest loss that all reach, without and with what came before the first step."""
    curves = {name: smooth(side["losses"], window) for name, side in sides.items()}
    loss = max(min(curve) for curve in curves.values())
    found = []
    for name, side in sides.items():
        ends = ends_s(side["block_s"], block)
        reached = ends[window - 1 + next(step for step, value in enumerate(curves[name]) if value <= loss)]
        found.append(
            {
                "side": name, "loss": loss, "training_s": reached, "with_preparation_s": reached + side["prepared_s"],
                "steps": len(side["losses"]), "step_s": ends[-1] / len(ends), "last_loss": curves[name][-1],
            }
        )  # fmt: skip
    return found


def race(given: argparse.Namespace) -> bool:
    (setting,) = collect.settings(given, busy=True)
    path = given.folder / f"{given.task}-{given.size}-{setting.name}.json"
    options = ("task", "size", "batch_size", "precision", "sides", "lr", "workers")
    arguments = {"budget_s": given.budget} | {name: getattr(given, name) for name in options}
    record: dict[str, Any] = {"lab": setting.name, "block": given.block, **arguments}
    module = "validation.training.to_loss"
    with experiment.open_lab(setting, COMMUNICATORS) as session:
        record |= collect.described(session)
        session.ask("call", PREPARE_S, function=f"{module}:prepare", arguments=arguments)
        round_s, steps = 0.0, 0
        while not round_s or (time.monotonic() + round_s < given.end and steps < given.steps):
            began = time.monotonic()
            asked = {"function": f"{module}:advance", "arguments": {"steps": given.block}}
            record["sides"] = session.ask("call", max(10 * round_s, PREPARE_S), **asked)[0]
            round_s = time.monotonic() - began
            steps = min(len(side["losses"]) for side in record["sides"].values())
            record["table"] = table(record["sides"], given.block, min(given.window, steps))
            collect.save(path, record)
            collect.tell(f"{steps} steps in {round_s:.0f} s a round")
    for row in record["table"]:
        collect.tell(
            f"{row['side']:8} loss {row['loss']:.3f} after {row['training_s']:.1f} s of training "
            f"({row['with_preparation_s']:.1f} s with preparation), {row['step_s'] * 1e3:.0f} ms a step; "
            f"{row['last_loss']:.3f} after {row['steps']} steps. {record['sides'][row['side']]['words']}"
        )
    return True


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = collect.options(__doc__, nodes="2", bandwidth="200mbit", budget="50s", limit="10min")
    parser.add_argument("--task", default="text", choices=("text", "images"))
    parser.add_argument("--size", default="small", help=", ".join(f"{size} ({task})" for task, size in TASKS))
    parser.add_argument("--batch-size", type=int, help="of each rank; default: the task's own")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--sides", default="ddp,tuned,fsdp2,auto", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--workers", type=int, default=1, help="of each loader")
    parser.add_argument("--block", type=int, default=10, help="steps of one turn")
    parser.add_argument("--window", type=int, default=20, help="steps that a loss is averaged over")
    parser.add_argument("--steps", type=int, default=10**6, help="of each side, at most")
    given = collect.parsed(parser, arguments)
    given.sides = given.sides.split(",")
    unknown = [side for side in given.sides if side not in SIDES]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no side: there are {', '.join(SIDES)}")
    if (given.task, given.size) not in TASKS:
        known = ", ".join(map(" ".join, TASKS))
        raise InputError(f"{given.task} of size {given.size!r} is not there: there are {known}")
    return given


if __name__ == "__main__":
    collect.run(race, parsed)
