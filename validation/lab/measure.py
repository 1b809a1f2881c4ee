"""Measure a matrix of models, plans, nodes and bandwidths in the lab.

    python validation/lab/measure.py FOLDER --backend nccl --nodes 4,8 --bandwidth 10gbit,25gbit --time-limit 9min
    python validation/lab/measure.py FOLDER --backend gloo --nodes 2 --bandwidth 200mbit --dilation 10 \
        --models googlenet-b64-bf16-h200 --strategy wfbp,ddp,optimal

FOLDER gets one record for each setting, written after every model: calibrations, replayed compute, plans and every
iteration. The same command goes on where the last one stopped. `python validation/judge.py lab` then says how far
predictions are off, of the files that `validation/cases/lab/table.json` names.
Needs root; with --backend nccl a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.experiment import MeasuredPlan
from backbeat.lab.jobs import turns_s
from backbeat.lab.lab_rank import change
from backbeat.lab.plans import PlanChoice, parse_plans, shorthand
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model import Profile, files
from backbeat.units import format_seconds, parse_duration, parse_rate, parse_workers

SCHEMA = "backbeat.validation/1"
Record = dict[str, Any]

PLANS = "wfbp,single,ddp,horovod,mg-wfbp,adaptive,optimal,random:8,random:32,asc-wfbp/2,best/2"
# From 21 to 438 MB of gradients, from 161 to 604 of them; larger ones differ little from plan to plan here.
MODELS = (
    "googlenet-b64-bf16-h200,densenet121-b64-bf16-h200,densenet201-b32-bf16-h200,efficientnet-b0-b128-bf16-h200,"
    "inception-v3-b64-bf16-h200,resnet50-b64-bf16-h200,resnet101-b64-bf16-h200,resnet152-b64-bf16-h200,"
    "convnext-tiny-b64-bf16-h200,bert-base-b64-bf16-h200"
)
START_S = 30.0
"""Nodes take about this long to start; with less time left than this and the calibration none are."""
THREADS = 2
"""Threads of NCCL that poll all the time, for each node and communicator."""


def opened(path: Path, setting: Setting) -> Record:
    """The record of a setting as far as it is measured."""
    record = {
        "schema": SCHEMA,
        "setting": setting.name,
        "backend": setting.backend,
        "nodes": setting.nodes,
        "bandwidth_bits": setting.rate_bits,
        "dilation": setting.dilation,
    }
    if not path.exists():
        return {**record, "sessions": [], "models": [], "alone": [], "cases": []}
    found: Record = json.loads(path.read_text())
    if found["dilation"] != setting.dilation:
        raise InputError(
            f"{path} has dilation {found['dilation']:g}, this run {setting.dilation:g}: choose another folder"
        )
    return found


def write(path: Path, record: Record) -> None:
    """One line for each session, model and case."""
    texts = {
        name: "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
        if isinstance(value, list)
        else json.dumps(value)
        for name, value in record.items()
    }
    files.write(path, ("{\n" + ",\n".join(f' "{name}": {text}' for name, text in texts.items()) + "\n}\n").encode())


def affordable(choices: Sequence[PlanChoice], setting: Setting) -> list[PlanChoice]:
    """Plans that this machine has the cores for: NCCL's threads poll, and where they starve times explode."""
    widest = max(1, (os.cpu_count() or 1) // (THREADS * setting.nodes))
    return [choice for choice in choices if setting.backend != "nccl" or choice.widest("nccl") <= widest]


def missing(record: Record, models: Sequence[str], choices: Sequence[PlanChoice]) -> dict[str, list[PlanChoice]]:
    """The plans of each model that have not been measured."""
    done = {(case["model"], case["plan"]) for case in record["cases"]}
    left = {model: [choice for choice in choices if (model, choice.name) not in done] for model in models}
    return {model: some for model, some in left.items() if some}


def compute_of(name: str, profile: Profile) -> dict[str, Any]:
    """What of a profile is replayed; the profile of that name may be measured again one day."""
    return {
        "name": name,
        "forward_s": profile.forward_s,
        "backward_s": profile.backward_s,
        "update_s": profile.update_s,
        "bytes": [gradient.bytes for gradient in profile.gradients],
        "ready_s": [gradient.ready_s for gradient in profile.gradients],
    }


def case_of(result: MeasuredPlan, model: str, session: int) -> dict[str, Any]:
    return {
        "session": session,
        "model": model,
        "plan": result.choice.name,
        "communicators": result.plan.communicators,
        "buckets": shorthand(result.plan),
        "series_s": [[round(sample, 7) for sample in series] for series in result.series],
    }


def measure(
    session: Session,
    setting: Setting,
    record: Record,
    path: Path,
    profiles: dict[str, Profile],
    choices: Sequence[PlanChoice],
    given: argparse.Namespace,
    end: float,
) -> None:
    """Calibrate, then measure what is missing, model by model, while there is time."""
    calibrated = experiment.calibrate_lab(
        session,
        setting,
        choices,
        budget_s=parse_duration(given.budget),
        largest_bytes=max(profile.total_bytes for profile in profiles.values()),
    )
    record["sessions"].append(
        {
            **session.ask("describe", 60)[0],
            "command": shlex.join(["python", *sys.argv]),
            "network": msgspec.to_builtins(calibrated.network),
            "timings": calibrated.timings,
        }
    )
    number, seconds_each = len(record["sessions"]) - 1, parse_duration(given.seconds)
    for model, some in missing(record, list(profiles), choices).items():
        profile = profiles[model]
        made = experiment.planned(some, setting.slowest(profile), calibrated.network)
        expected_s = turns_s([prediction.iteration_s for *_, prediction in made], seconds_each)
        if time.monotonic() + expected_s > end:
            return
        before = session.ask("health", 60)
        results, alone_s = experiment.measure_plans(session, profile, setting, made, seconds_each)
        record["models"] = [one for one in record["models"] if one["name"] != model] + [compute_of(model, profile)]
        record["alone"].append(
            {
                "session": number,
                "model": model,
                "expected_s": setting.compute(profile).single_s,
                "measured_s": alone_s,
                "disturbed": change(before, session.ask("health", 60)),
            }
        )
        record["cases"] += [case_of(result, model, number) for result in results]
        write(path, record)
        worst = max(results, key=lambda one: abs(one.error))
        left = format_seconds(max(0.0, end - time.monotonic()))
        print(f"{setting.name}: {model}: worst {worst.choice.name} {worst.error:+.1%}, {left} left", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=MODELS, help="profiles, comma-separated (default: ten of the zoo)")
    parser.add_argument("--strategy", default=PLANS, help="plans, comma-separated (default: %(default)s)")
    parser.add_argument("--nodes", default="4,8")
    parser.add_argument("--bandwidth", default="10gbit,25gbit")
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"))
    parser.add_argument("--dilation", type=float, default=1.0, help="compute takes this many times as long")
    parser.add_argument("--seconds", default="1s", help="to measure each plan for")
    parser.add_argument("--budget", default="25s", help="to calibrate each setting for")
    parser.add_argument("--time-limit", default="30min", help="stop in time")
    given = parser.parse_args()
    check_requirements(given.backend)
    end = time.monotonic() + parse_duration(given.time_limit)
    profiles = {name: Profile.load(name) for name in given.models.split(",")}
    given.folder.mkdir(parents=True, exist_ok=True)
    left = []
    for nodes in parse_workers(given.nodes):
        for rate in given.bandwidth.split(","):
            setting = Setting(nodes=nodes, rate_bits=parse_rate(rate), backend=given.backend, dilation=given.dilation)
            choices = affordable(parse_plans(given.strategy.split(",")), setting)
            path = given.folder / f"{setting.name}.json"
            record = opened(path, setting)
            in_time = time.monotonic() + START_S + parse_duration(given.budget) < end
            if in_time and missing(record, list(profiles), choices):
                try:
                    with experiment.open_lab(setting, max(one.widest(setting.backend) for one in choices)) as session:
                        measure(session, setting, record, path, profiles, choices, given, end)
                except MeasurementError as error:
                    print(f"{setting.name}: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
            todo = missing(opened(path, setting), list(profiles), choices)
            left += [f"{setting.name}: {model} ({len(some)} plans)" for model, some in todo.items()]
    if left:
        sys.exit("\n".join(["still to measure, run the same command again:", *left]))


if __name__ == "__main__":
    main()
