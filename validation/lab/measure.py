"""Measure a matrix of models, plans, nodes and bandwidths in the lab.

    python validation/lab/measure.py FOLDER --backend nccl --nodes 4,8 --bandwidth 10gbit,25gbit --limit 9min
    python validation/lab/measure.py FOLDER --backend gloo --nodes 2 --bandwidth 200mbit --dilation 10 \
        --models googlenet-b64-bf16-h200 --strategy wfbp,ddp,optimal

FOLDER gets one record for each setting, written after every model: calibrations, replayed compute, plans and every
iteration. The same command goes on where the last one stopped. `python validation/judge.py lab` then says how far
predictions are off, of the files that `validation/cases/lab/table.json` names.
Needs root; with --backend nccl a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.errors import InputError
from backbeat.lab import experiment
from backbeat.lab.jobs import turns_s
from backbeat.lab.plans import PlanChoice, parse_plans, shorthand
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting
from backbeat.model import Profile
from validation import collect
from validation.collect import Record

PLANS = "wfbp,single,ddp,horovod,mg-wfbp,adaptive,optimal,random:8,random:32,asc-wfbp/2,best/2"
# From 21 to 438 MB of gradients, from 161 to 604 of them; larger ones differ little from plan to plan here.
MODELS = (
    "googlenet-b64-bf16-h200,densenet121-b64-bf16-h200,densenet201-b32-bf16-h200,efficientnet-b0-b128-bf16-h200,"
    "inception-v3-b64-bf16-h200,resnet50-b64-bf16-h200,resnet101-b64-bf16-h200,resnet152-b64-bf16-h200,"
    "convnext-tiny-b64-bf16-h200,bert-base-b64-bf16-h200"
)
THREADS = 2
"""Threads of NCCL that poll all the time, for each node and communicator."""


def opened(path: Path, setting: Setting) -> Record:
    """The record of a setting as far as it is measured."""
    record = collect.opened(
        path, schema="backbeat.validation/1", setting=setting.name, backend=setting.backend, nodes=setting.nodes,
        bandwidth_bits=setting.rate_bits, dilation=setting.dilation, sessions=[], models=[], alone=[], cases=[],
    )  # fmt: skip
    if record["dilation"] != setting.dilation:
        raise InputError(
            f"{path} has dilation {record['dilation']:g}, this run {setting.dilation:g}: choose another folder"
        )
    return record


def affordable(choices: Sequence[PlanChoice], setting: Setting) -> list[PlanChoice]:
    """Plans that this machine has the cores for: NCCL's threads poll, and where they starve times explode."""
    widest = max(1, (os.cpu_count() or 1) // (THREADS * setting.nodes))
    return [choice for choice in choices if setting.backend != "nccl" or choice.widest("nccl") <= widest]


def missing(record: Record, models: Iterable[str], choices: Sequence[PlanChoice]) -> dict[str, list[PlanChoice]]:
    """The plans of each model that have not been measured."""
    done = {(case["model"], case["plan"]) for case in record["cases"]}
    left = {model: [choice for choice in choices if (model, choice.name) not in done] for model in models}
    return {model: some for model, some in left.items() if some}


def compute_of(name: str, profile: Profile) -> dict[str, Any]:
    """What of a profile is replayed; the profile of that name may be measured again one day."""
    return {
        "name": name, "forward_s": profile.forward_s, "backward_s": profile.backward_s, "update_s": profile.update_s,
        "bytes": [gradient.bytes for gradient in profile.gradients],
        "ready_s": [gradient.ready_s for gradient in profile.gradients],
    }  # fmt: skip


def measure(
    session: Session,
    setting: Setting,
    path: Path,
    profiles: dict[str, Profile],
    choices: Sequence[PlanChoice],
    given: argparse.Namespace,
) -> None:
    """Calibrate, then measure what is missing, model by model, while there is time."""
    record, largest = opened(path, setting), max(profile.total_bytes for profile in profiles.values())
    network = collect.calibrated(session, setting, record, choices, given.budget, largest)
    for model, some in missing(record, profiles, choices).items():
        profile = profiles[model]
        made = experiment.planned(some, setting.slowest(profile), network)
        if time.monotonic() + turns_s([prediction.iteration_s for *_, prediction in made], given.seconds) > given.end:
            return
        results = collect.replayed(session, setting, record, model, profile, made, given.seconds)
        record["models"] = [one for one in record["models"] if one["name"] != model] + [compute_of(model, profile)]
        record["cases"] += [
            case | {"plan": one.choice.name, "communicators": one.plan.communicators, "buckets": shorthand(one.plan)}
            for one, case in results
        ]
        collect.save(path, record)


def finished(setting: Setting, profiles: dict[str, Profile], given: argparse.Namespace) -> bool:
    choices, path = affordable(parse_plans(given.strategy.split(",")), setting), given.folder / f"{setting.name}.json"
    return collect.finish(
        setting, max(one.widest(setting.backend) for one in choices), given,
        left=lambda: missing(opened(path, setting), profiles, choices),
        measure=lambda session: measure(session, setting, path, profiles, choices, given),
    )  # fmt: skip


def measure_all(given: argparse.Namespace) -> bool:
    profiles = {name: Profile.load(name) for name in given.models.split(",")}
    found = [finished(one, profiles, given) for one in collect.settings(given, dilation=given.dilation)]
    return all(found)


def parsed() -> argparse.Namespace:
    parser = collect.options(
        __doc__, backend="nccl", nodes="4,8", bandwidth="10gbit,25gbit", seconds="1s", budget="25s", limit="30min"
    )
    parser.add_argument("--models", default=MODELS, help="profiles, comma-separated (default: ten of the zoo)")
    parser.add_argument("--strategy", default=PLANS, help="plans, comma-separated (default: %(default)s)")
    parser.add_argument("--dilation", type=float, default=1.0, help="compute takes this many times as long")
    return collect.parsed(parser)


if __name__ == "__main__":
    collect.run(measure_all, parsed)
