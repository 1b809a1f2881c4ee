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
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.errors import InputError
from backbeat.lab.jobs import turns_s
from backbeat.lab.plans import PlanChoice
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting
from backbeat.model import Gradient, Network, Plan, Profile, Sharding, ShardUnit
from backbeat.model.files import encode, write
from backbeat.planners.planned import planned as make
from backbeat.steps.predict import predict
from backbeat.units import parse_rate
from validation import collect
from validation.collect import Record

# From 21 to 498 MB of fp32 gradients; batches large enough that compute can hide a part of them.
MODELS = (
    "efficientnet-b0-b128-bf16-h200,convnext-tiny-b128-bf16-h200,resnet50-b128-bf16-h200,resnet152-b256-bf16-h200,"
    "vit-b-b128-bf16-h200,gpt2-b16-bf16-h200"
)
LARGEST_BYTES = 80_000_000
"""Larger units are extrapolated, at the slope of those of 64 and 128 MiB."""
QUEUEING = 1.5
"""An iteration takes this many times as long as predicted, with its queueing before."""
PLANNED = PlanChoice(name="fsdp", strategy="fsdp")
Change = Callable[[Sharding], Sharding]


def _units(**fields: object) -> Change:
    def changed(sharding: Sharding) -> Sharding:
        return msgspec.structs.replace(
            sharding, units=tuple(msgspec.structs.replace(unit, **fields) for unit in sharding.units)
        )

    return changed


def _pairs(sharding: Sharding) -> Sharding:
    pairs = [sharding.units[start : start + 2] for start in range(0, len(sharding.units), 2)]
    joined = [
        ShardUnit(modules=sum((unit.modules for unit in pair), ()), reshard=pair[0].reshard, prefetch=pair[0].prefetch)
        for pair in pairs
    ]
    return msgspec.structs.replace(sharding, units=tuple(joined))


SETTINGS: dict[str, Change] = {
    "fsdp": lambda sharding: sharding,
    "zero2": _units(reshard=False),
    "pairs": _pairs,
    "bf16-reduce": lambda sharding: msgspec.structs.replace(sharding, reduce_dtype="bf16"),
    "prefetch2": _units(prefetch=2),
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
    """4:16gbit is four nodes of one rank; 2x2:5gbit:25gbit two nodes of two ranks, 5 Gbit/s across and 25 inside."""
    count, rate, *inside = text.split(":")
    nodes, _, ranks = count.partition("x")
    if not nodes.isdigit() or (ranks and not ranks.isdigit()):
        raise InputError(f"{text!r} is no lab: write 4:16gbit or 2x2:5gbit:25gbit")
    return Setting(
        nodes=int(nodes), rate_bits=parse_rate(rate), backend=backend, ranks_per_node=int(ranks or 1),
        inside_bits=parse_rate(inside[0]) if inside else None, dilation=dilation,
    )  # fmt: skip


def settings_for(setting: Setting) -> list[str]:
    """What a lab measures."""
    return [*SETTINGS, "sharded"] if setting.ranks_per_node == 1 else ["fsdp", "zero2", "hsdp", "sharded"]


def plan_for(name: str, profile: Profile, network: Network, setting: Setting) -> Plan:
    if name in SETTINGS:
        plain = make(profile, network, "fsdp")
        assert plain.sharding is not None
        return msgspec.structs.replace(plain, strategy=name, sharding=SETTINGS[name](plain.sharding), predicted=None)
    strategy = f"hsdp:{setting.ranks_per_node}" if name == "hsdp" else name
    return msgspec.structs.replace(make(profile, network, strategy), predicted=None)


def opened(path: Path, setting: Setting) -> Record:
    return collect.opened(
        path, schema="backbeat.validation.sharded/1", lab=setting.name, backend=setting.backend, nodes=setting.nodes,
        ranks_per_node=setting.ranks_per_node, bandwidth_bits=setting.rate_bits, inside_bits=setting.inside_bits,
        dilation=setting.dilation, sessions=[], alone=[], cases=[],
    )  # fmt: skip


def left(record: Record, models: Iterable[str], setting: Setting) -> dict[str, list[str]]:
    """The settings of each model that have not been measured."""
    done = {(case["model"], case["setting"]) for case in record["cases"]}
    found = {model: [name for name in settings_for(setting) if (model, name) not in done] for model in models}
    return {model: names for model, names in found.items() if names}


def measure(
    session: Session, setting: Setting, path: Path, profiles: dict[str, Profile], given: argparse.Namespace
) -> None:
    """Calibrate, then measure what is left, model by model, while there is time."""
    record = opened(path, setting)
    largest = min(LARGEST_BYTES, max(profile.total_bytes for profile in profiles.values()))
    network = collect.calibrated(session, setting, record, [PLANNED], given.budget, largest)
    for model, names in left(record, profiles, setting).items():
        profile = setting.compute(profiles[model])
        plans = {name: plan_for(name, profile, network, setting) for name in names}
        made = [
            (PlanChoice(name=name, strategy="fsdp"), plan, predict(profile, network, plan))
            for name, plan in plans.items()
        ]
        expected_s = QUEUEING * turns_s([prediction.iteration_s for *_, prediction in made], given.seconds)
        if time.monotonic() + expected_s > given.end:
            collect.tell(f"{setting.name}: no time for {model}, which takes {expected_s:.0f} s")
            continue
        results = collect.replayed(session, setting, record, model, profiles[model], made, given.seconds)
        write(given.folder / "profiles" / f"{model}.json.gz", encode(profiles[model]))
        record["cases"] += [
            case | {"setting": result.choice.name, "plan": msgspec.to_builtins(result.plan)} for result, case in results
        ]
        collect.save(path, record)


def finished(setting: Setting, profiles: dict[str, Profile], given: argparse.Namespace) -> bool:
    path = given.folder / f"{setting.name}.json"
    return collect.finish(
        setting, 1, given, left=lambda: left(opened(path, setting), profiles, setting),
        measure=lambda session: measure(session, setting, path, profiles, given),
    )  # fmt: skip


def measure_all(given: argparse.Namespace) -> bool:
    profiles = {name: tiny() if name == "tiny" else Profile.load(name) for name in given.models.split(",")}
    (given.folder / "profiles").mkdir(exist_ok=True)
    labs = [setting_of(text, given.backend, given.dilation) for text in given.labs.split(",")]
    found = [finished(setting, profiles, given) for setting in labs]
    return all(found)


def parsed() -> argparse.Namespace:
    parser = collect.options(__doc__, backend="nccl", seconds="1s", budget="16s", limit="30min")
    parser.add_argument("--labs", default="4:16gbit,8:10gbit,4:5gbit", help="comma-separated (default: %(default)s)")
    parser.add_argument("--models", default=MODELS, help="profiles, comma-separated; tiny for a trial")
    parser.add_argument("--dilation", type=float, default=1.0, help="compute takes this many times as long")
    return collect.parsed(parser)


if __name__ == "__main__":
    collect.run(measure_all, parsed)
