"""What the lab's collectors share: options, one record for each setting, and what a session says of itself."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import BackbeatError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.experiment import MeasuredPlan, Planned
from backbeat.lab.lab_rank import change
from backbeat.lab.plans import PlanChoice
from backbeat.lab.session import Session
from backbeat.lab.setting import BACKENDS, Setting, check_requirements
from backbeat.model import Network, Profile
from backbeat.model.files import write
from backbeat.units import parse_duration, parse_rate, parse_workers

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
START_S = 30.0
"""Nodes take about this long to start."""
_DURATIONS = {
    "seconds": "to measure each case for",
    "budget": "to calibrate each setting for",
    "limit": "begin nothing that would pass it",
}


def options(doc: str | None, **defaults: str) -> argparse.ArgumentParser:
    """Folder, backend, and those of `defaults`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets a file for each setting")
    parser.add_argument("--backend", default=defaults.get("backend", "gloo"), choices=BACKENDS)
    for name in ("nodes", "bandwidth"):
        if name in defaults:
            parser.add_argument(f"--{name}", default=defaults[name], help="one or several (default: %(default)s)")
    for name, words in _DURATIONS.items():
        if name in defaults:
            parser.add_argument(f"--{name}", default=defaults[name], help=f"{words} (default: %(default)s)")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """With durations in seconds; `end` is when the limit is reached."""
    given = parser.parse_args(arguments)
    for name in _DURATIONS.keys() & vars(given):
        setattr(given, name, parse_duration(getattr(given, name)))
    given.end = time.monotonic() + given.limit
    return given


def settings(given: argparse.Namespace, **more: Any) -> Iterator[Setting]:
    for nodes in parse_workers(given.nodes):
        for rate in given.bandwidth.split(","):
            yield Setting(nodes=nodes, rate_bits=parse_rate(rate), backend=given.backend, **more)


def run(collect: Callable[[argparse.Namespace], bool], given: Callable[[], argparse.Namespace]) -> None:
    """A collector from its options to its exit code: 0 where all was measured."""
    try:
        options = given()
        check_requirements(options.backend)
        options.folder.mkdir(parents=True, exist_ok=True)
        # The nodes import collectors, too.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        sys.exit(0 if collect(options) else 1)
    except BackbeatError as error:
        tell(error)
        sys.exit(error.exit_code)


def tell(*words: object) -> None:
    """With what an error's notes say."""
    print(*words, file=sys.stderr, flush=True)
    for note in getattr(words[-1], "__notes__", ()):
        print(note, file=sys.stderr, flush=True)


def opened(path: Path, **head: Any) -> Record:
    """The record of a setting as far as it is measured."""
    found: Record = json.loads(path.read_text()) if path.exists() else head
    return found


def save(path: Path, record: Record) -> None:
    """One line for each row."""
    texts = {
        name: "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
        if isinstance(value, list)
        else json.dumps(value)
        for name, value in record.items()
    }
    write(path, ("{\n" + ",\n".join(f' "{name}": {text}' for name, text in texts.items()) + "\n}\n").encode())


def described(session: Session) -> Record:
    """Machine, date, versions, and the command."""
    return {**session.ask("describe", 60)[0], "command": shlex.join(["python", *sys.argv])}


def calibrated(
    session: Session, setting: Setting, record: Record, choices: Sequence[PlanChoice], budget_s: float, largest: int
) -> Network:
    """The lab's own network; the record gets a session."""
    network, timings = experiment.calibrate_lab(session, setting, choices, budget_s=budget_s, largest_bytes=largest)
    told = {"network": msgspec.to_builtins(network), "timings": timings}
    record["sessions"].append({**described(session), **told})
    return network


def finish(
    setting: Setting, communicators: int, given: argparse.Namespace, *, left: Callable[[], dict[str, Any]],
    measure: Callable[[Session], None],
) -> bool:  # fmt: skip
    """Measure what is left of a setting, by model, if there is time for its nodes; whether nothing is left then."""
    if left() and time.monotonic() + START_S + given.budget < given.end:
        try:
            with experiment.open_lab(setting, communicators) as session:
                measure(session)
        except MeasurementError as error:
            tell(f"{setting.name}:", error)
    todo = left()
    for model, some in todo.items():
        tell(f"{setting.name}: {len(some)} of {model} are still to measure: run the same command again")
    return not todo


def replayed(
    session: Session,
    setting: Setting,
    record: Record,
    model: str,
    profile: Profile,
    made: Sequence[Planned],
    seconds: float,
) -> list[tuple[MeasuredPlan, Record]]:
    """Plans of one profile by turns, each with the beginning of its row. The record gets its compute alone."""
    before = session.ask("health", 60)
    results, alone_s = experiment.measure_plans(session, profile, setting, made, seconds)
    case = {"session": len(record["sessions"]) - 1, "model": model}
    expected_s, disturbed = setting.compute(profile).single_s, change(before, session.ask("health", 60))
    record["alone"].append({**case, "expected_s": expected_s, "measured_s": alone_s, "disturbed": disturbed})
    series = [[[round(sample, 7) for sample in one] for one in result.series] for result in results]
    errors = ", ".join(f"{result.choice.name} {result.error:+.1%}" for result in results)
    tell(f"{setting.name}: {model}: {errors}")
    return [(result, {**case, "series_s": each}) for result, each in zip(results, series, strict=True)]
