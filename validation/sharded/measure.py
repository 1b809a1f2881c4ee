"""FSDP2 measured beside its prediction: models, settings and links in the lab, on real parameters with spun compute.

    python validation/sharded/measure.py FOLDER --limit 6min
    python validation/sharded/measure.py FOLDER --labs 2x2:5gbit:25gbit --limit 2min
    python validation/sharded/measure.py FOLDER --backend gloo --labs 2:100mbit --models tiny --limit 1min

A lab is nodes:bandwidth, or nodesxranks:bandwidth:inside for nodes of several ranks with a faster link inside. For each
lab: nodes are built, the network is calibrated, then every model runs under all settings, which take turns. FOLDER gets
a record for each lab, written after every model, and the profiles; the same command goes on where the last one stopped.
`python validation/judge.py sharded --rows` sets predicted beside measured, of the files that
`validation/cases/sharded/table.json` names. Needs root; with --backend nccl a GPU.

    fsdp        torch's defaults: a unit a block, resharded after forward, bf16 gathered and fp32 reduced
    zero2       not resharded after forward
    pairs       two blocks a unit
    bf16-reduce gradients reduced in bf16
    prefetch2   two all-gathers issued ahead in forward
    sharded     what the planner chooses
    hsdp        sharded inside a node, replicated across (labs of several ranks a node)
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from backbeat.api import plan as make
from backbeat.errors import BackbeatError, InputError
from backbeat.lab import experiment
from backbeat.lab.jobs import turns_s
from backbeat.lab.lab_rank import change
from backbeat.lab.plans import PlanChoice
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model import Gradient, Network, Plan, Profile, Sharding, ShardUnit
from backbeat.model.files import encode, write
from backbeat.planners import STRATEGIES
from backbeat.steps.predict import predict
from backbeat.units import format_seconds, parse_duration, parse_rate

SCHEMA = "backbeat.validation.sharded/1"
Record = dict[str, Any]

LABS = "4:16gbit,8:10gbit,4:5gbit"
# From 21 to 498 MB of fp32 gradients; batches large enough that compute can hide a part of them.
MODELS = (
    "efficientnet-b0-b128-bf16-h200,convnext-tiny-b128-bf16-h200,resnet50-b128-bf16-h200,resnet152-b256-bf16-h200,"
    "vit-b-b128-bf16-h200,gpt2-b16-bf16-h200"
)
ATTEMPTS = 2
START_S = 25.0
"""Nodes take about this long to start."""
LARGEST_BYTES = 80_000_000
"""Larger units are extrapolated, at the slope of those of 64 and 128 MiB."""
LEAST_S = 25.0
"""Left to each lab for its measurements, whatever those before it would like to measure."""
QUEUEING = 1.5
"""An iteration takes this many times as long as predicted, with its queueing before."""

Change = Callable[[Sharding], Sharding]


def _units(change_unit: Callable[[ShardUnit], ShardUnit]) -> Change:
    def changed(sharding: Sharding) -> Sharding:
        return msgspec.structs.replace(sharding, units=tuple(change_unit(unit) for unit in sharding.units))

    return changed


def _pairs(sharding: Sharding) -> Sharding:
    pairs = [sharding.units[start : start + 2] for start in range(0, len(sharding.units), 2)]
    joined = tuple(
        msgspec.structs.replace(pair[0], modules=tuple(name for unit in pair for name in unit.modules))
        for pair in pairs
    )
    return msgspec.structs.replace(sharding, units=joined)


SETTINGS: dict[str, Change] = {
    "fsdp": lambda sharding: sharding,
    "zero2": _units(lambda unit: msgspec.structs.replace(unit, reshard=False)),
    "pairs": _pairs,
    "bf16-reduce": lambda sharding: msgspec.structs.replace(sharding, reduce_dtype="bf16"),
    "prefetch2": _units(lambda unit: msgspec.structs.replace(unit, prefetch=2)),
}


def tiny() -> Profile:
    """For a trial without a GPU."""
    return Profile(
        name="tiny", model="tiny", batch_size=1, precision="bf16", device="cpu", forward_s=0.02, backward_s=0.04,
        update_s=0.001,
        gradients=tuple(
            Gradient(name=f"layers.{3 - k}.weight", bytes=100_000, ready_s=0.01 * (k + 1), forward_s=0.005)
            for k in range(4)
        ),
    )  # fmt: skip


def setting_of(text: str, backend: str, dilation: float) -> Setting:
    """
    4:16gbit is four nodes of one rank; 2x2:5gbit:25gbit two nodes of two ranks, 5 Gbit/s across and 25 inside.
    """
    count, rate, *inside = text.split(":")
    nodes, _, ranks = count.partition("x")
    if not nodes.isdigit() or (ranks and not ranks.isdigit()):
        raise InputError(f"{text!r} is no lab: write 4:16gbit or 2x2:5gbit:25gbit")
    return Setting(
        nodes=int(nodes),
        rate_bits=parse_rate(rate),
        backend=backend,
        ranks_per_node=int(ranks or 1),
        inside_bits=parse_rate(inside[0]) if inside else None,
        dilation=dilation,
    )


def settings_for(setting: Setting) -> list[str]:
    """What a lab measures."""
    planned = [name for name in ("sharded",) if name in STRATEGIES]
    return [*SETTINGS, *planned] if setting.ranks_per_node == 1 else ["fsdp", "zero2", "hsdp", *planned]


def plan_for(name: str, profile: Profile, network: Network, setting: Setting) -> Plan:
    if name in SETTINGS:
        plain = make(profile, network, "fsdp")
        assert plain.sharding is not None
        return msgspec.structs.replace(plain, strategy=name, sharding=SETTINGS[name](plain.sharding), predicted=None)
    strategy = f"hsdp:{setting.ranks_per_node}" if name == "hsdp" else name
    return msgspec.structs.replace(make(profile, network, strategy), predicted=None)


def opened(path: Path, setting: Setting) -> Record:
    if path.exists():
        found: Record = json.loads(path.read_text())
        return found
    return {
        "schema": SCHEMA,
        "lab": setting.name,
        "backend": setting.backend,
        "nodes": setting.nodes,
        "ranks_per_node": setting.ranks_per_node,
        "bandwidth_bits": setting.rate_bits,
        "inside_bits": setting.inside_bits,
        "dilation": setting.dilation,
        "sessions": [],
        "alone": [],
        "cases": [],
    }


def save(path: Path, record: Record) -> None:
    """One line for each session and case."""
    texts = {
        name: "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
        if isinstance(value, list)
        else json.dumps(value)
        for name, value in record.items()
    }
    write(path, ("{\n" + ",\n".join(f' "{name}": {text}' for name, text in texts.items()) + "\n}\n").encode())


def left(record: Record, models: list[str], setting: Setting) -> dict[str, list[str]]:
    """The settings of each model that have not been measured."""
    done = {(case["model"], case["setting"]) for case in record["cases"]}
    found = {model: [name for name in settings_for(setting) if (model, name) not in done] for model in models}
    return {model: names for model, names in found.items() if names}


def measure(
    session: Session,
    setting: Setting,
    path: Path,
    profiles: dict[str, Profile],
    given: argparse.Namespace,
    end: float,
    tried: set[str],
) -> None:
    """Calibrate, then measure what is left, model by model, while there is time; models go to `tried` as they begin."""
    record = opened(path, setting)
    calibrated = experiment.calibrate_lab(
        session,
        setting,
        [PlanChoice(name="fsdp", strategy="fsdp")],
        budget_s=parse_duration(given.budget),
        largest_bytes=min(LARGEST_BYTES, max(profile.total_bytes for profile in profiles.values())),
    )
    record["sessions"].append(
        {
            **session.ask("describe", 60)[0],
            "command": shlex.join(["python", *sys.argv]),
            "network": msgspec.to_builtins(calibrated.network),
            "timings": calibrated.timings,
        }
    )
    seconds_each = parse_duration(given.seconds)
    for model, names in left(record, [one for one in profiles if one not in tried], setting).items():
        profile = setting.compute(profiles[model])
        plans = [(name, plan_for(name, profile, calibrated.network, setting)) for name in names]
        made = [
            (PlanChoice(name=name, strategy="fsdp"), plan, predict(profile, calibrated.network, plan))
            for name, plan in plans
        ]
        expected_s = QUEUEING * turns_s([prediction.iteration_s for *_, prediction in made], seconds_each)
        if time.monotonic() + expected_s > end:
            print(f"{setting.name}: no time for {model}, which takes {format_seconds(expected_s)}", file=sys.stderr)
            continue
        tried.add(model)
        before = session.ask("health", 60)
        results, alone_s = experiment.measure_plans(session, profiles[model], setting, made, seconds_each)
        write(given.folder / "profiles" / f"{model}.json.gz", encode(profiles[model]))
        record["alone"].append(
            {
                "session": len(record["sessions"]) - 1,
                "model": model,
                "expected_s": profile.single_s,
                "measured_s": alone_s,
                "disturbed": change(before, session.ask("health", 60)),
            }
        )
        record["cases"] += [
            {
                "session": len(record["sessions"]) - 1,
                "model": model,
                "setting": result.choice.name,
                "plan": msgspec.to_builtins(result.plan),
                "series_s": [[round(sample, 7) for sample in series] for series in result.series],
            }
            for result in results
        ]
        save(path, record)
        errors = ", ".join(f"{result.choice.name} {result.error:+.1%}" for result in results)
        print(f"{setting.name}: {model}: {errors}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labs", default=LABS, help="comma-separated (default: %(default)s)")
    parser.add_argument("--models", default=MODELS, help="profiles, comma-separated; tiny for a trial")
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"))
    parser.add_argument("--dilation", type=float, default=1.0, help="compute takes this many times as long")
    parser.add_argument("--seconds", default="1s", help="to measure each case for")
    parser.add_argument("--budget", default="16s", help="to calibrate each lab for")
    parser.add_argument("--limit", default="30min", help="stop in time")
    given = parser.parse_args()
    check_requirements(given.backend)
    begun, limit_s = time.monotonic(), parse_duration(given.limit)
    profiles = {name: tiny() if name == "tiny" else Profile.load(name) for name in given.models.split(",")}
    (given.folder / "profiles").mkdir(parents=True, exist_ok=True)
    labs = [setting_of(text, given.backend, given.dilation) for text in given.labs.split(",")]
    paths = {setting.name: given.folder / f"{setting.name}.json" for setting in labs}
    todo = [one for one in labs if left(opened(paths[one.name], one), list(profiles), one)]
    each_s = START_S + parse_duration(given.budget) + LEAST_S
    for index, setting in enumerate(todo):
        end = begun + limit_s - (len(todo) - index - 1) * each_s
        tried: set[str] = set()
        for _ in range(ATTEMPTS):
            if time.monotonic() + each_s - LEAST_S > end:
                print(f"{setting.name}: no time", file=sys.stderr)
                break
            try:
                with experiment.open_lab(setting, 1) as session:
                    measure(session, setting, paths[setting.name], profiles, given, end, tried)
                break
            except BackbeatError as error:
                # The nodes are gone; the models behind the one that failed are tried on new ones.
                print(f"{setting.name}: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
