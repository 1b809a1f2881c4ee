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

Batches are those of `backbeat.planners.max_batch.growth`, or given with `--batches`. `memory` and `both` take the
fastest batch among those that need a memory plan, whether or not keeping everything at a smaller one is predicted to
be faster still. Nodes are built and calibrated once for each bandwidth; the model is profiled at two batch sizes, once
for all of them. Every row is a training of its own, so that the peak is its own. The budget is planned for, not
enforced: measured peaks say whether it was kept.

Writes FOLDER/<nodes>.json after every row, the profiles and the plans. A row that fails keeps its error, and the nodes
are built again for the next; a row that would pass `--time-limit` is left out. Needs root; with --backend nccl a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from backbeat.api import plan as make_plan
from backbeat.errors import BackbeatError, InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.jobs import ROUNDS, per_round
from backbeat.lab.plans import PlanChoice
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model import MemoryPlan, Network, Plan, Prediction, Profile
from backbeat.model.batches import at_batch, join
from backbeat.model.files import write
from backbeat.planners.max_batch import GrownBatch, growth
from backbeat.steps.predict import predict
from backbeat.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_duration, parse_rate

T = TypeVar("T")
PRECISIONS = ("fp32", "tf32", "bf16")
PROFILED = (16, 64)
UNTIMED = 5
"""Steps of a row that are not timed: three to warm up, and one before each of the two series."""
BUILD_S = 5.0
"""A guess of what building and wrapping a model takes, for the time limit."""
COMMUNICATORS = 2
"""What `best` may use; compressed plans and stock DDP take one."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train in one row."""

    title: str
    strategy: str
    keep: bool
    """Everything is kept; otherwise there is a memory plan."""


WAYS = {
    "ddp": Way(title="stock DDP", strategy="ddp", keep=True),
    "dense": Way(title="dense, everything kept", strategy="best", keep=True),
    "memory": Way(title="dense, memory plan", strategy="best", keep=False),
    "compressed": Way(title="top-k, everything kept", strategy="compressed", keep=True),
    "both": Way(title="top-k, memory plan", strategy="compressed", keep=False),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A row before it is trained."""

    batch_size: int
    plan: Plan
    prediction: Prediction
    remark: str | None = None


class Planner:
    """The plan of each row, from the profiles and the calibration alone."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        network: Network,
        budget: int,
        density: float,
        batches: dict[str, int] | None,
    ) -> None:
        self._one = join(*profiles)
        self._network = network
        self._budget = budget
        self._density = density
        self._batches = batches
        self.growths: dict[str, list[GrownBatch]] = {}

    @functools.cache  # noqa: B019 - lives as long as the script
    def planned(self, key: str) -> Planned:
        way = WAYS[key]
        if key == "ddp":
            # Gradients and buckets of stock DDP are not the wrapper's: no peak is predicted.
            return self._at(self.planned("dense").batch_size, way, MemoryPlan())
        if self._batches is not None:
            return self._at(self._batches[key], way, MemoryPlan() if way.keep else None)
        return self._kept_whole(way) if way.keep else self._fastest(way)

    def _at(self, batch_size: int, way: Way, memory: MemoryPlan | None) -> Planned:
        """A batch that is given; `memory` None: planned for the budget."""
        there = at_batch(self._one, batch_size)
        made = self._make(there, way.strategy, self._budget if memory is None else None)
        if memory is not None:
            made = msgspec.structs.replace(made, memory=memory)
        return Planned(batch_size=batch_size, plan=made, prediction=predict(there, self._network, made))

    def _kept_whole(self, way: Way) -> Planned:
        kept = [point for point in self._points(way.strategy) if point.kept]
        if not kept:
            raise InputError(f"not even one sample fits {format_bytes(self._budget)} with everything kept")
        return _of(max(kept, key=lambda point: point.batch_size))

    def _fastest(self, way: Way) -> Planned:
        points = self._points(way.strategy)
        larger = [point for point in points if not point.kept]
        if not larger:
            raise InputError("no larger batch was found to fit with a memory plan than without")
        found = max(larger, key=_speed)
        fastest = max(points, key=_speed)
        if fastest.kept:
            return _of(found, f"batch {fastest.batch_size} with everything kept is predicted to be faster")
        return _of(found)

    def _points(self, strategy: str) -> list[GrownBatch]:
        if strategy not in self.growths:
            self.growths[strategy] = growth(
                self._one,
                self._network,
                self._budget,
                lambda there: self._make(there, strategy, self._budget),
            )
        return self.growths[strategy]

    def _make(self, profile: Profile, strategy: str, memory_bytes: int | None) -> Plan:
        density = self._density if strategy == "compressed" else None
        return make_plan(profile, self._network, strategy, memory_bytes=memory_bytes, density=density)


def _speed(point: GrownBatch) -> float:
    return point.prediction.samples_per_s


def _of(point: GrownBatch, remark: str | None = None) -> Planned:
    return Planned(batch_size=point.batch_size, plan=point.plan, prediction=point.prediction, remark=remark)


class Table:
    """The rows of one bandwidth, written after each."""

    def __init__(self, folder: Path, setting: Setting, given: argparse.Namespace) -> None:
        self.path = folder / f"{setting.name}.json"
        self.name = setting.name
        self.document: dict[str, Any] = {
            "command": [Path(sys.executable).name, *sys.argv],
            "model": given.train,
            "precision": given.precision,
            "nodes": setting.nodes,
            "backend": setting.backend,
            "bandwidth_bits": setting.rate_bits,
            "memory_bytes": given.memory,
            "density": given.density,
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "took_s": {},
            "rows": {},
        }

    def timed(self, what: str, call: Callable[[], T]) -> T:
        begun = time.monotonic()
        say(f"{self.name}: {what}")
        try:
            return call()
        finally:
            self.document["took_s"][what] = round(time.monotonic() - begun, 1)
            self.save()

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.document["rows"][key] = {"what": WAYS[key].title, **row}
        self.save()
        say(f"{self.name}: {_line(key, row)}")

    def save(self) -> None:
        write(self.path, json.dumps(self.document, indent=1).encode() + b"\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(given: argparse.Namespace) -> bool:
    """All bandwidths; whether every row was trained."""
    ends = time.monotonic() + given.time_limit
    profiles = [Profile.load(path) for path in given.profiles]
    fine = True
    for rate in given.bandwidth:
        setting = Setting(nodes=given.nodes, rate_bits=rate, backend=given.backend)
        check_requirements(setting.backend)
        table = Table(given.folder, setting, given)
        try:
            with experiment.Nodes(setting, COMMUNICATORS) as nodes:
                profiles = _setting(nodes, setting, table, profiles, given, ends)
        except BackbeatError as error:
            table.document["error"] = str(error)
            table.save()
            say(f"{setting.name}: {error}")
        print(_summary(table.document), flush=True)
        fine = fine and all("samples_per_s" in table.document["rows"].get(key, {}) for key in given.rows)
    return fine


def _setting(
    nodes: experiment.Nodes,
    setting: Setting,
    table: Table,
    profiles: list[Profile],
    given: argparse.Namespace,
    ends: float,
) -> list[Profile]:
    """One bandwidth from start to end; the profiles, for the next."""
    table.document.update(table.timed("start", lambda: nodes.do(lambda session: session.ask("describe", 60)[0])))
    for batch_size in () if profiles else given.profiled:
        measure = functools.partial(
            experiment.profile_training,
            spec=given.train,
            batch_size=batch_size,
            seconds=given.profile_seconds,
            precision=given.precision,
        )
        profile = table.timed(f"profile of batch {batch_size}", functools.partial(nodes.do, measure))
        if not profile.blocks:
            raise InputError(f"{given.train}: its profile has no blocks, and memory cannot be planned without")
        profile.save(given.folder / f"{profile.name}.profile.json")
        say(f"{setting.name}: {len(profile.blocks)} blocks, {format_seconds(profile.single_s)} alone")
        profiles = [*profiles, profile]
    choices = [PlanChoice(name=WAYS[key].strategy, strategy=WAYS[key].strategy) for key in given.rows]
    calibrated = table.timed(
        "calibration",
        lambda: nodes.do(
            lambda session: experiment.calibrate_lab(
                session, setting, choices, budget_s=given.budget, largest_bytes=profiles[0].total_bytes
            )
        ),
    )
    network = calibrated.network
    table.document["profiles"] = [profile.name for profile in profiles]
    table.document["network"] = {"schema": network.schema, **msgspec.to_builtins(network)}
    planner = Planner(profiles, network, given.memory, given.density, given.batches)
    plans = table.timed("planning", lambda: {key: _attempt(planner, key) for key in given.rows})
    table.document["growth"] = {
        strategy: [
            {
                "batch_size": point.batch_size,
                "everything_kept": point.kept,
                "peak_bytes": point.prediction.peak_bytes,
                "iteration_s": point.prediction.iteration_s,
                "samples_per_s": point.prediction.samples_per_s,
            }
            for point in points
        ]
        for strategy, points in planner.growths.items()
    }
    table.save()
    for key, planned in plans.items():
        if isinstance(planned, str):
            table.add(key, {"error": planned})
            continue
        planned.plan.save(given.folder / f"{setting.name}-{key}.plan.json")
        table.add(key, _row(nodes, setting, key, planned, given, ends))
    return profiles


def _attempt(planner: Planner, key: str) -> Planned | str:
    try:
        return planner.planned(key)
    except InputError as error:
        return str(error)


def _row(
    nodes: experiment.Nodes, setting: Setting, key: str, planned: Planned, given: argparse.Namespace, ends: float
) -> dict[str, Any]:
    prediction = planned.prediction
    row: dict[str, Any] = {
        "batch_size": planned.batch_size,
        "predicted_s": prediction.iteration_s,
        "predicted_samples_per_s": prediction.samples_per_s,
        "predicted_peak_bytes": None if key == "ddp" else prediction.peak_bytes,
        "single_s": prediction.single_s,
        "communicators": planned.plan.communicators,
        "buckets": len(planned.plan.buckets),
        "compressed_buckets": sum(bucket.compression is not None for bucket in planned.plan.buckets),
        **_mixture(planned.plan.memory),
        "notes": [
            *([planned.remark] if planned.remark else []),
            *planned.plan.notes,
            *(note for note in prediction.notes if not note.startswith(f"network {setting.name}:")),
        ],
    }
    steps = ROUNDS * per_round(prediction.iteration_s, given.seconds)
    expected = (steps + UNTIMED) * prediction.iteration_s + BUILD_S
    left = ends - time.monotonic()
    if expected > left:
        return {**row, "skipped": f"about {expected:.0f} s, and the time limit leaves {max(left, 0):.0f}"}
    choice = PlanChoice(name=key, strategy=WAYS[key].strategy)
    begun = time.monotonic()
    try:
        (measured,), (losses,) = nodes.do(
            lambda session: experiment.train(
                session,
                given.train,
                planned.batch_size,
                [(choice, planned.plan, prediction)],
                given.seconds,
                given.precision,
            )
        )
    except MeasurementError as error:
        logs = "\n".join(getattr(error, "__notes__", []))
        return {**row, "error": str(error), "logs": logs, "took_s": round(time.monotonic() - begun, 1)}
    return {
        **row,
        "samples_per_s": setting.nodes * planned.batch_size / measured.measured_s,
        "iteration_s": measured.measured_s,
        "spread_s": measured.spread_s,
        "repeat": measured.repeat,
        "error_of_prediction": measured.error,
        "peak_bytes": measured.peak_bytes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": len(losses),
        "timed_steps": len(measured.samples),
        "series_s": measured.series,
        "took_s": round(time.monotonic() - begun, 1),
    }


def _mixture(memory: MemoryPlan | None) -> dict[str, Any]:
    """How many blocks are treated how."""
    if memory is None or not memory.segments:
        return {"blocks": "all kept", "residuals": memory.residuals if memory else "device"}
    counts: dict[str, int] = {}
    for segment in memory.segments:
        what = f"{segment.action}, input on the host" if segment.input == "offload" else segment.action
        counts[what] = counts.get(what, 0) + len(segment.blocks)
    return {"blocks": counts, "residuals": memory.residuals}


def _line(key: str, row: dict[str, Any]) -> str:
    if "samples_per_s" not in row:
        return f"{key:7} {row.get('error') or row.get('skipped')}"
    peak, wanted = row["peak_bytes"], row["predicted_peak_bytes"]
    return (
        f"{key:7} batch {row['batch_size']:4} {row['samples_per_s']:9.1f} samples/s, "
        f"{format_seconds(row['iteration_s'])} (predicted {format_seconds(row['predicted_s'])}), "
        f"peak {format_bytes(peak) if peak is not None else 'not measured'} "
        f"(predicted {format_bytes(wanted) if wanted is not None else 'no'}), "
        f"loss {row['last_loss']:.4f} after {row['steps']} steps"
    )


def _summary(document: dict[str, Any]) -> str:
    rows = document["rows"]
    speeds = {key: row["samples_per_s"] for key, row in rows.items() if "samples_per_s" in row}
    lines = [
        f"{document['model']} {document['precision']} on {document['nodes']} {document['backend']} nodes, "
        f"{format_rate(document['bandwidth_bits'])}, {format_bytes(document['memory_bytes'])} a node",
        *(_line(key, rows[key]) for key in WAYS if key in rows),
    ]
    ratios = [
        f"{(speeds['both'] / speeds[other] - 1) * 100:+.0f} % over {other}"
        for other in ("dense", "memory", "compressed")
        if "both" in speeds and other in speeds
    ]
    return "\n".join([*lines, *([f"both: {', '.join(ratios)}"] if ratios else [])])


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", default="backbeat.zoo.models:resnet50", metavar="PACKAGE.MODULE:FACTORY")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--bandwidth", default="1gbit", help="one or several, like 1gbit,10gbit")
    parser.add_argument("--memory", default="2.5GB", help="what an iteration may take on each node")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--rows", default="dense,memory,compressed,both,ddp", help="which, and in which order")
    parser.add_argument("--batches", help="of dense,memory,compressed,both, like 32,96,32,96: no search")
    parser.add_argument("--profiled", help="batch sizes to profile; default 16,64, or the least and most of --batches")
    parser.add_argument("--profiles", default="", help="profiles of an earlier run instead, like one.json,two.json")
    parser.add_argument("--profile-seconds", default="1s", help="for the timed iterations of a profile")
    parser.add_argument("--seconds", default="2s", help="of timed steps in each row, six steps at least")
    parser.add_argument("--budget", default="5s", help="for calibration")
    parser.add_argument("--time-limit", default="1h")
    given = parser.parse_args(arguments)
    given.bandwidth = [parse_rate(text) for text in given.bandwidth.split(",")]
    given.memory = parse_bytes(given.memory)
    for name in ("profile_seconds", "seconds", "budget", "time_limit"):
        setattr(given, name, parse_duration(getattr(given, name)))
    given.rows = given.rows.split(",")
    unknown = [key for key in given.rows if key not in WAYS]
    if unknown:
        raise InputError(f"--rows has {unknown[0]!r}: there are {', '.join(WAYS)}")
    batches = None if given.batches is None else _sizes(given.batches, "--batches", 4)
    given.batches = None if batches is None else dict(zip(list(WAYS)[1:], batches, strict=True))
    if given.profiled is not None:
        given.profiled = sorted(set(_sizes(given.profiled, "--profiled")))
    else:
        given.profiled = sorted({min(batches), max(batches)}) if batches else list(PROFILED)
    given.profiles = given.profiles.split(",") if given.profiles else []
    if len(given.profiles) > 2 or len(given.profiled) > 2:
        raise InputError("two profiles at most: times of other batches lie on the line through them")
    return given


def _sizes(text: str, option: str, count: int | None = None) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts) or (count and len(parts) != count):
        example = "32,96,32,96" if count else "16,64"
        raise InputError(f"{option} is {text!r}: write {count or 'some'} batch sizes like {example}")
    return [int(part) for part in parts]


def main() -> None:
    try:
        given = parsed()
        given.folder.mkdir(parents=True, exist_ok=True)
        fine = run(given)
    except BackbeatError as error:
        say(f"four_nodes: {error}")
        sys.exit(error.exit_code)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
