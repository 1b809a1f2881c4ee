"""A model really trained on shaped links within a memory budget, with each of LaySA's two halves, both and neither.

    python validation/memory/four_nodes.py FOLDER --backend nccl --nodes 4 --bandwidth 1gbit,10gbit \
        --train backbeat.zoo.models:resnet50 --memory 2.5GB --precision bf16
    python validation/memory/four_nodes.py FOLDER --nodes 2 --bandwidth 200mbit \
        --train examples.my_model:small_cnn --memory 60MB --profiled 4,16

Five rows for each bandwidth:

    ddp      stock DDP at the batch of `dense`
    dense    `best`, everything kept, the largest batch that fits the budget
    memory   `best` with a memory plan, at the batch predicted to be fastest
    compressed   top-k, everything kept, the largest batch that fits
    both     top-k with a memory plan, at the batch predicted to be fastest

Batches are those of `growth.growth`, or given with `--batches`. `memory` and `both` take the
fastest batch among those that need a memory plan, whether or not keeping everything at a smaller one is predicted to
be faster still. Nodes are built and calibrated once for each bandwidth; the model is profiled at two batch sizes, once
for all of them. Every row is a training of its own, so that the peak is its own. The budget is planned for, not
enforced: measured peaks say whether it was kept.

Writes FOLDER/<nodes>.json after every row, the profiles and the plans. A row that fails keeps its error, and the nodes
are built again for the next; a row that would pass `--limit` is left out. Needs root; with --backend nccl a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.errors import BackbeatError, InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.jobs import ROUNDS, per_round
from backbeat.lab.plans import PlanChoice
from backbeat.lab.setting import Setting
from backbeat.model import MemoryPlan, Network, Plan, Prediction, Profile
from backbeat.model.batches import at_batch, join
from backbeat.planners.planned import planned as make_plan
from backbeat.steps.predict import predict
from backbeat.units import format_bytes, parse_bytes, parse_duration
from validation import collect
from validation.collect import Record
from validation.memory.growth import GrownBatch, growth

UNTIMED = 5
"""Steps of a row that are not timed: three to warm up, and one before each of the two series."""
BUILD_S = 5.0
"""A guess of what building and wrapping a model takes, for the time limit."""
COMMUNICATORS = 2
"""What `best` may use; compressed plans and stock DDP take one."""


class Way(NamedTuple):
    """How to train in one row."""

    title: str
    strategy: str
    keep: bool
    """Everything is kept; otherwise there is a memory plan."""


WAYS = {
    "ddp": Way("stock DDP", "ddp", True),
    "dense": Way("dense, everything kept", "best", True),
    "memory": Way("dense, memory plan", "best", False),
    "compressed": Way("top-k, everything kept", "compressed", True),
    "both": Way("top-k, memory plan", "compressed", False),
}


class Planned(NamedTuple):
    """A row before it is trained."""

    batch_size: int
    plan: Plan
    prediction: Prediction


class Planner:
    """The plan of each row, from the profiles and the calibration alone."""

    def __init__(self, profiles: Sequence[Profile], network: Network, given: argparse.Namespace) -> None:
        self._one, self._network, self._given = join(*profiles), network, given
        self._growths: dict[str, list[GrownBatch]] = {}

    def planned(self, key: str) -> Planned:
        way, batches = WAYS[key], self._given.batches
        if key == "ddp":
            # Gradients and buckets of stock DDP are not the wrapper's: no peak is predicted.
            return self._at(self.planned("dense").batch_size, way, MemoryPlan())
        if batches is not None:
            return self._at(batches[key], way, MemoryPlan() if way.keep else None)
        points = [point for point in self._points(way.strategy) if point.kept == way.keep]
        if not points:
            some = "everything kept" if way.keep else "a memory plan, beyond what fits without"
            raise InputError(f"no batch fits {format_bytes(self._given.memory)} with {some}")
        found = max(points, key=lambda one: one.batch_size if way.keep else one.prediction.samples_per_s)
        return Planned(found.batch_size, found.plan, found.prediction)

    def _at(self, batch_size: int, way: Way, memory: MemoryPlan | None) -> Planned:
        """A batch that is given; `memory` None: planned for the budget."""
        there = at_batch(self._one, batch_size)
        made = self._make(there, way.strategy, self._given.memory if memory is None else None)
        if memory is not None:
            made = msgspec.structs.replace(made, memory=memory)
        return Planned(batch_size, made, predict(there, self._network, made))

    def _points(self, strategy: str) -> list[GrownBatch]:
        if strategy not in self._growths:
            budget = self._given.memory
            make = lambda there: self._make(there, strategy, budget)  # noqa: E731
            self._growths[strategy] = growth(self._one, self._network, budget, make)
        return self._growths[strategy]

    def _make(self, profile: Profile, strategy: str, memory_bytes: int | None) -> Plan:
        density = self._given.density if strategy == "compressed" else None
        return make_plan(profile, self._network, strategy, memory_bytes=memory_bytes, density=density)


def measure_all(given: argparse.Namespace) -> bool:
    """All bandwidths; whether every row was trained."""
    profiles: list[Profile] = []
    fine = True
    for setting in collect.settings(given):
        path, record = given.folder / f"{setting.name}.json", record_of(setting, given)
        try:
            with experiment.Nodes(setting, COMMUNICATORS) as nodes:
                measure(nodes, setting, path, record, profiles, given)
        except BackbeatError as error:
            record["error"] = str(error)
            collect.save(path, record)
            collect.tell(f"{setting.name}:", error)
        fine = fine and all("samples_per_s" in record["rows"].get(key, {}) for key in given.rows)
    return fine


def record_of(setting: Setting, given: argparse.Namespace) -> Record:
    return {
        "model": given.train, "precision": given.precision, "nodes": setting.nodes, "backend": setting.backend,
        "bandwidth_bits": setting.rate_bits, "memory_bytes": given.memory, "density": given.density, "rows": {},
    }  # fmt: skip


def measure(
    nodes: experiment.Nodes, setting: Setting, path: Path, record: Record, profiles: list[Profile],
    given: argparse.Namespace,
) -> None:  # fmt: skip
    """One bandwidth from start to end; the first adds the profiles."""
    record |= nodes.do(collect.described)
    for batch in given.profiled if not profiles else ():
        options = (given.train, batch, given.profile_seconds, given.precision)
        profile = nodes.do(lambda session, options=options: experiment.profile_training(session, *options))
        if not profile.blocks:
            raise InputError(f"{given.train}: its profile has no blocks, and memory cannot be planned without")
        profile.save(given.folder / f"{profile.name}.profile.json")
        profiles.append(profile)
    choices = [PlanChoice(name=WAYS[key].strategy, strategy=WAYS[key].strategy) for key in given.rows]
    largest = profiles[0].total_bytes
    network = nodes.do(
        lambda session: (
            experiment.calibrate_lab(session, setting, choices, budget_s=given.budget, largest_bytes=largest).network
        )
    )
    record["profiles"] = [profile.name for profile in profiles]
    record["network"] = {"schema": network.schema, **msgspec.to_builtins(network)}
    planner = Planner(profiles, network, given)
    for key in given.rows:
        row: dict[str, Any] = {"what": WAYS[key].title}
        try:
            planned = planner.planned(key)
            planned.plan.save(given.folder / f"{setting.name}-{key}.plan.json")
            row |= trained(nodes, setting, key, planned, given)
        except (InputError, MeasurementError) as error:
            row |= {"error": str(error), "logs": "\n".join(getattr(error, "__notes__", []))}
        record["rows"][key] = row
        collect.save(path, record)
        collect.tell(f"{setting.name}: {key}: {row.get('error') or line_of(row)}")


def trained(
    nodes: experiment.Nodes, setting: Setting, key: str, planned: Planned, given: argparse.Namespace
) -> dict[str, Any]:
    batch_size, plan, prediction = planned
    steps = ROUNDS * per_round(prediction.iteration_s, given.seconds)
    if time.monotonic() + (steps + UNTIMED) * prediction.iteration_s + BUILD_S > given.end:
        raise MeasurementError("the time limit would pass")
    made = (PlanChoice(name=key, strategy=WAYS[key].strategy), plan, prediction)
    (measured,), (losses,) = nodes.do(
        lambda session: experiment.train(session, given.train, batch_size, [made], given.seconds, given.precision)
    )
    return {
        "batch_size": batch_size,
        "predicted_s": prediction.iteration_s,
        "predicted_peak_bytes": None if key == "ddp" else prediction.peak_bytes,
        "single_s": prediction.single_s,
        "communicators": plan.communicators,
        "buckets": len(plan.buckets),
        "compressed_buckets": sum(bucket.compression is not None for bucket in plan.buckets),
        "blocks": mixture(plan.memory),
        "residuals": plan.memory.residuals if plan.memory else "device",
        "samples_per_s": setting.nodes * batch_size / measured.measured_s,
        "iteration_s": measured.measured_s,
        "repeat": measured.repeat,
        "peak_bytes": measured.peak_bytes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": len(losses),
        "timed_steps": len(measured.samples),
        "series_s": measured.series,
    }


def mixture(memory: MemoryPlan | None) -> str | dict[str, int]:
    """How many blocks are treated how."""
    counts: dict[str, int] = {}
    for segment in memory.segments if memory else ():
        what = f"{segment.action}, input on the host" if segment.input == "offload" else segment.action
        counts[what] = counts.get(what, 0) + len(segment.blocks)
    return counts or "all kept"


def line_of(row: dict[str, Any]) -> str:
    peak = format_bytes(row["peak_bytes"]) if row["peak_bytes"] is not None else "not measured"
    error = row["predicted_s"] / row["iteration_s"] - 1
    return f"batch {row['batch_size']}, {row['samples_per_s']:.4g} samples/s ({error:+.1%}), peak {peak}"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = collect.options(__doc__, nodes="4", bandwidth="1gbit", seconds="2s", budget="5s", limit="1h")
    parser.add_argument("--train", default="backbeat.zoo.models:resnet50", metavar="PACKAGE.MODULE:FACTORY")
    parser.add_argument("--memory", default="2.5GB", help="what an iteration may take on each node")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--rows", default="dense,memory,compressed,both,ddp", help="which, and in which order")
    parser.add_argument("--batches", help="of dense,memory,compressed,both, like 32,96,32,96: no search")
    parser.add_argument("--profiled", help="batch sizes to profile; default 16,64, or the least and most of --batches")
    parser.add_argument("--profile-seconds", type=parse_duration, default="1s", help="for a profile's iterations")
    given = collect.parsed(parser, arguments)
    given.memory, given.rows = parse_bytes(given.memory), given.rows.split(",")
    unknown = [key for key in given.rows if key not in WAYS]
    if unknown:
        raise InputError(f"--rows has {unknown[0]!r}: there are {', '.join(WAYS)}")
    batches = None if given.batches is None else _sizes(given.batches, "--batches", 4)
    given.batches = None if batches is None else dict(zip(list(WAYS)[1:], batches, strict=True))
    profiled = _sizes(given.profiled, "--profiled", 2) if given.profiled else batches or [16, 64]
    given.profiled = sorted({min(profiled), max(profiled)})
    return given


def _sizes(text: str, option: str, count: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(parts) != count:
        example = ",".join(["32", "96", "32", "96"][:count])
        raise InputError(f"{option} is {text!r}: write {count} batch sizes like {example}")
    return [int(part) for part in parts]


if __name__ == "__main__":
    collect.run(measure_all, parsed)
