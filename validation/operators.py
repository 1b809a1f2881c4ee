"""Operators of one training step, recorded once and timed again in each run.

An analytic profile runs the model on tensors without data, which takes seconds. What it asks of the operator model is
kept here instead, in its order: each operator's work, what the host does for parameters, the update; and after how much
of that each gradient is ready. A table says what to record by `models(table, rows)` of its module in `tables/`:

    python validation/operators.py TABLE [--truth FOLDER]     # writes operators.json.gz; needs torch
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from backbeat.cost.operator_curves import HostTimes
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Convolution, Product, Traffic, Work, family_of
from backbeat.errors import MissingPartError
from backbeat.model import ComputeShares, Profile
from backbeat.model.accelerator import operator_model

KINDS: dict[str, type[Work]] = {one.__name__: one for one in (Product, Attention, Convolution, Traffic)}
ITERATIONS = 3
"""As many as it takes a host that is ahead to stay so."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is recorded: a factory of model, batch and loss, as `backbeat profile` takes it, and its settings."""

    name: str
    factory: Any
    batch_size: int
    precision: str = "bf16"
    optimizer: str | None = None
    compiled: bool = False


class Tape(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration. An event is the number of an operator's works, doubled, one more in backward; below zero, as many
    parameters that the host handles."""

    profile: dict[str, Any]
    """All of it that does not depend on times."""
    compiled: bool
    works: list[list[list[Any]]]
    events: list[int]
    forward: int
    """Events of forward; those of backward follow."""
    update: tuple[str, int, float]
    """How it is split into kernels, of how many tensors, and the bytes moved."""
    ready: dict[str, int]
    """After so many events of backward."""
    begun: dict[str, list[tuple[int, int]]]
    """Events of forward that are booked on a gradient."""


class _Recorded:
    """What one iteration asks of the operator model and of the host. Its clock counts events."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.works: dict[tuple[Work, ...], int] = {}
        self.update: tuple[str, int, float] = ("", 0, 0.0)
        self.names: list[str] = []
        self.begun: list[tuple[Any, list[tuple[int, float]]]] = []

    # As a host's times: parameters count, nothing else does.
    parameter_s, view_s = 1.0, 0.0

    def step_s(self, kernels: str, tensors: int) -> float:
        self.update = (kernels, tensors, 0.0)
        return 0.0

    def seconds(self, work: Work) -> float:
        """Nothing but the update asks."""
        self.update = (*self.update[:2], work.bytes)
        return 1.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        from backbeat.measure.model import analytic, observation
        from backbeat.measure.model.chain import in_backward

        told = self

        class Clock(analytic.VirtualClock):
            def submit(self, host_s: float, device_s: float) -> None:
                if host_s or device_s:
                    told.events.append(-round(host_s))
                    self.now_s += 1

        class Estimator(analytic.Estimator):
            def submit(self, works: tuple[Work, ...]) -> None:
                place = told.works.setdefault(works, len(told.works))
                told.events.append(2 * place + in_backward())
                self.clock.now_s += 1

        class Model(OperatorModel):
            def __init__(self) -> None:
                known = operator_model("h200", "bf16")
                super().__init__(known.accelerator, known.parts)
                self.host, self.seconds = told, told.seconds  # type: ignore[assignment]

        def first_iteration(training: Any) -> Any:
            gradients = first(training)
            told.names = list(gradients.names)
            return gradients

        def forward_shares(recorded: Any, clock: Any) -> Any:
            told.begun = list(recorded)
            return shares(told.begun, clock)

        first, shares = observation.first_iteration, observation.forward_shares
        # Neither blocks nor arithmetic are kept.
        with (
            mock.patch.object(observation, "_chain", return_value=observation.MeasuredChain()),
            mock.patch.object(observation, "count_flops", return_value=(None, None)),
            mock.patch.object(analytic, "Estimator", Estimator),
            mock.patch.object(analytic, "VirtualClock", Clock),
            mock.patch.object(analytic, "operator_model", return_value=Model()),
            mock.patch.object(observation, "first_iteration", first_iteration),
            mock.patch.object(observation, "forward_shares", forward_shares),
        ):
            yield


def record(recipe: Recipe) -> Tape:
    """Run the model without data."""
    from backbeat.measure.model import analytic
    from backbeat.measure.model.factory import inspect_factory

    told = _Recorded()
    with told.recording():
        made = analytic.analytic_profile(
            inspect_factory(recipe.factory, f"validation.operators:{recipe.name}"),
            gpu="h200", batch_size=recipe.batch_size, precision=recipe.precision, optimizer=recipe.optimizer,
            compiled=recipe.compiled,
        )  # fmt: skip
    counts = [round(seconds) for seconds in (made.forward_s, made.backward_s, made.update_s)]
    begun: dict[str, list[tuple[int, int]]] = {}
    for marks, begins in told.begun[-1:]:
        edges = [marks.forward_begin, *(mark for _, mark in begins[1:]), marks.forward_end]
        for (index, _), edge in zip(begins, pairwise(edges), strict=True):
            first, last = (round(mark - marks.forward_begin) for mark in edge)
            begun.setdefault(told.names[index], []).append((first, last))
    plain = msgspec.to_builtins(made)
    kept = {key: plain[key] for key in KEPT if key in plain}
    kept["gradients"] = [{"name": one.name, "bytes": one.bytes} for one in made.gradients]
    events = told.events[-sum(counts) :]
    used = sorted({event // 2 for event in events if event >= 0})
    listed = list(told.works)
    place = {old: new for new, old in enumerate(used)}
    return Tape(
        profile=kept,
        compiled=recipe.compiled,
        works=[[[type(work).__name__, *asdict(work).values()] for work in listed[old]] for old in used],
        events=[event if event < 0 else 2 * place[event // 2] + event % 2 for event in events[: sum(counts[:2])]],
        forward=counts[0],
        update=told.update,
        ready={one.name: round(one.ready_s) for one in made.gradients},
        begun=begun,
    )


KEPT = (
    "model", "batch_size", "precision", "gradient_dtype", "buffer_bytes", "memory", "sequence_length", "accumulation",
)  # fmt: skip
"""Fields of a profile that do not depend on times."""


class Timed(NamedTuple):
    """One iteration on a device, from its beginning: when each event ends, and what the host took."""

    ends_s: list[float]
    update_s: float
    host_s: float
    families: dict[str, float]


def timed(tape: Tape, model: OperatorModel) -> Timed:
    """What the device does, event by event: nothing before the host has submitted it."""
    host = model.host
    works = [[KINDS[kind](*_tupled(fields)) for kind, *fields in listed] for listed in tape.works]
    seconds = [[model.sustained_s(work) for work in listed] for listed in works]
    submitted = [_host_s(listed, host, tape.compiled) for listed in works]
    families = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    for event in tape.events:
        for work, each_s in zip(works[event // 2], seconds[event // 2], strict=True) if event >= 0 else ():
            family = family_of(work)
            families["matmul" if family == "convolution" else family] += each_s
    kernels, tensors, moved = tape.update
    updating_s = model.seconds(Traffic(f"update/{kernels}", moved))
    device_s = host_s = 0.0
    for _ in range(ITERATIONS):
        begin_s, began_s, ends = device_s, host_s, []
        for event in tape.events:
            if event < 0:
                host_s -= event * host.parameter_s
            else:
                host_s += submitted[event // 2][event % 2]
                for each_s in seconds[event // 2]:
                    if each_s > 0:
                        device_s = max(device_s, host_s) + each_s
            ends.append(device_s - begin_s)
        host_s += host.step_s(kernels, tensors)
        done_s = device_s
        device_s = max(device_s, host_s) + updating_s
    return Timed(ends, device_s - done_s, host_s - began_s, families)


def _host_s(works: list[Work], host: HostTimes, compiled: bool) -> tuple[float, float]:
    """To submit one operator in forward and in backward."""
    if compiled:
        return (host.compiled_s * len(works),) * 2
    if not works:
        return host.view_s, host.view_s
    family = family_of(works[0])
    return host.forward_s.get(family, 0.0), host.backward_s.get(family, 0.0)


def _tupled(fields: list[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in fields]


def profile_of(tape: Tape, name: str, model: OperatorModel) -> Profile:
    """The profile of a step whose operators take as long as the model says."""
    found = timed(tape, model)
    at = [0.0, *found.ends_s]
    forward_s, total_s = at[tape.forward], at[-1]
    ready = {one: at[tape.forward + count] - forward_s for one, count in tape.ready.items()}
    begun = {one: sum(at[last] - at[first] for first, last in spans) for one, spans in tape.begun.items()}
    shares = {family: each / sum(found.families.values()) for family, each in found.families.items()}
    gradients = [
        {**one, "ready_s": ready[one["name"]], "forward_s": begun.get(one["name"], 0.0) if begun else None}
        for one in tape.profile["gradients"]
    ]
    times = {
        "forward_s": forward_s, "backward_s": total_s - forward_s, "update_s": found.update_s,
        "gradients": sorted(gradients, key=lambda one: one["ready_s"]),
        "host_s": found.host_s if model.host.view_s else None,
    }  # fmt: skip
    told = {"name": name, "device": f"{model.accelerator.name} (analytic)", **tape.profile, **times}
    return msgspec.structs.replace(msgspec.convert(told, Profile), compute_shares=ComputeShares(**shares))


@cache
def tapes(path: Path) -> dict[str, Tape]:
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=dict[str, Tape])


@lru_cache(maxsize=256)
def recorded_profile(path: Path, name: str, model: OperatorModel) -> Profile:
    """One of a table's recorded models on the model's accelerator."""
    return profile_of(tapes(path)[name], name, model)


def write(path: Path, recipes: list[Recipe], processes: int) -> None:
    """What is recorded already stays."""
    found = dict(tapes(path)) if path.exists() else {}
    missing = [one for one in recipes if one.name not in found]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (recipe, tape) in enumerate(zip(missing, pool.imap(_attempted, missing), strict=True), start=1):
            if isinstance(tape, str):
                print(f"{recipe.name}: not recorded: {tape}", flush=True)
            else:
                found[recipe.name] = tape
            if done % 20 == 0 or done == len(missing):
                path.write_bytes(gzip.compress(msgspec.json.encode(found), mtime=0))
                print(f"{done} of {len(missing)}", flush=True)


def _attempted(recipe: Recipe) -> Tape | str:
    """Or why it cannot be built here."""
    try:
        return record(recipe)
    except MissingPartError as error:
        return str(error)


def main() -> None:
    from validation import cases

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    table = cases.table(asked.table)
    recipes = table.adapter.models(table, table.rows_of(asked.truth))
    write(table.folder / "operators.json.gz", recipes, asked.processes)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
