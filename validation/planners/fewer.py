"""Plans in as few buckets as the same time takes, against the buckets of the earliest finishes, measured in the lab.

    python validation/planners/fewer.py FILE --backend nccl --nodes 4 --bandwidth 25gbit --models resnet50-b64-bf16-h200
    python validation/planners/fewer.py FILE --backend nccl --nodes 4 --bandwidth 25gbit \
        --train backbeat.zoo.models:resnet50 --batch-size 32
    python validation/planners/fewer.py --count

The two are predicted to take the same time: what differs is what no prediction knows, the host's time for each bucket
and what a slower link does to a plan without slack. Profiles are replayed, or a model is really trained; plans
take turns in one run. FILE is a list of rows and is added to. Needs root; with --backend nccl a GPU. `--count` only
plans: every bundled bf16 profile on every bundled network, 8 to 512 workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backbeat.api import plan as make_plan
from backbeat.lab import experiment
from backbeat.lab.experiment import CalibratedLab, MeasuredPlan
from backbeat.lab.plans import PlanChoice
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.files import bundled, write
from backbeat.planners.draft import Draft
from backbeat.planners.optimal import best_ends
from backbeat.steps.predict import predict
from backbeat.units import format_rate, format_seconds, parse_duration, parse_rate

WORKERS = (8, 64, 512)
Made = list[tuple[PlanChoice, Plan, Prediction]]


def both_ways(profile: Profile, network: Network) -> Made:
    """Stock DDP's buckets, and `optimal` in few buckets and in many."""
    plans = {
        "ddp": make_plan(profile, network, "ddp"),
        "optimal, few": make_plan(profile, network, "optimal"),
        "optimal, many": Draft(best_ends(profile, network.cost)).named(profile, "optimal", network.workers),
    }
    return [
        (PlanChoice(name=name, strategy=plan.strategy), plan, predict(profile, network, plan, broadcast_buffers=False))
        for name, plan in plans.items()
    ]


def calibrated(session: Session, setting: Setting, profile: Profile, budget_s: float) -> CalibratedLab:
    choices = [PlanChoice(name=name, strategy=name) for name in ("ddp", "optimal")]
    return experiment.calibrate_lab(session, setting, choices, budget_s=budget_s, largest_bytes=profile.total_bytes)


def rows_of(results: list[MeasuredPlan], facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for result in results:
        row = facts | {
            "plan": result.choice.name,
            "buckets": len(result.plan.buckets),
            "measured_s": result.measured_s,
            "predicted_s": result.prediction.iteration_s,
            "repeat": result.repeat,
            "series_s": result.series,
        }
        print(
            f"{row['model']:32} {row['link']:>9} {row['plan']:16} {row['buckets']:4d} buckets  measured "
            f"{format_seconds(row['measured_s'])}  predicted {format_seconds(row['predicted_s'])} "
            f"({result.error:+.1%}), repeats within {result.repeat:.1%}",
            flush=True,
        )
        rows.append(row)
    return rows


def count() -> None:
    """How many buckets there are either way."""
    few: list[int] = []
    many: list[int] = []
    longer = 0.0
    for profile in (Profile.load(name) for name in bundled(Profile) if "-bf16-" in name):
        for network in (Network.load(name).at(workers=workers) for name in bundled(Network) for workers in WORKERS):
            made = {choice.name: (plan, prediction) for choice, plan, prediction in both_ways(profile, network)}
            (plan, ours), (early, theirs) = made["optimal, few"], made["optimal, many"]
            few.append(len(plan.buckets))
            many.append(len(early.buckets))
            longer = max(longer, ours.iteration_s / theirs.iteration_s - 1)
    print(
        f"optimal: {len(few)} cases, buckets in the median {statistics.median(many):.0f} -> "
        f"{statistics.median(few):.0f}, on average {statistics.mean(many):.1f} -> {statistics.mean(few):.1f}, at most "
        f"{max(many)} -> {max(few)}"
    )
    print(f"predicted iterations at most {longer:.1e} longer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--count", action="store_true", help="measure nothing")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--bandwidth", default="200mbit")
    parser.add_argument("--models", default="", help="profiles to replay, comma-separated")
    parser.add_argument("--train", help="a model to train really, PACKAGE.MODULE:FACTORY")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--dilation", type=float, default=1.0)
    parser.add_argument("--seconds", default="1s")
    parser.add_argument("--budget", default="8s")
    options = parser.parse_args()
    if options.count:
        count()
        return
    if options.file is None:
        parser.error("FILE is missing: where the rows go")
    setting = Setting(
        nodes=options.nodes,
        rate_bits=parse_rate(options.bandwidth),
        backend=options.backend,
        dilation=options.dilation,
    )
    check_requirements(setting.backend)
    seconds, budget = parse_duration(options.seconds), parse_duration(options.budget)
    try:
        found: list[dict[str, Any]] = json.loads(options.file.read_text()) if options.file.exists() else []
    except ValueError as error:
        parser.error(f"{options.file} holds no rows ({error}): give another file")
    with experiment.open_lab(setting, 1) as session:
        facts = session.ask("describe", 60)[0] | {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "nodes": setting.nodes,
            "backend": setting.backend,
            "link": format_rate(setting.rate_bits),
            "dilation": setting.dilation,
        }
        for name in [one for one in options.models.split(",") if one]:
            profile = Profile.load(name)
            network = calibrated(session, setting, profile, budget).network
            made = both_ways(setting.slowest(profile), network)
            results, _ = experiment.measure_plans(session, profile, setting, made, seconds)
            found += rows_of(results, facts | {"model": name, "how": "replayed"})
            write(options.file, json.dumps(found, indent=1).encode() + b"\n")
        if options.train is not None:
            profile = experiment.profile_training(session, options.train, options.batch_size, seconds)
            network = calibrated(session, setting, profile, budget).network
            made = both_ways(profile, network)
            results, _ = experiment.train(session, options.train, options.batch_size, made, seconds)
            found += rows_of(results, facts | {"model": options.train, "how": "trained"})
            write(options.file, json.dumps(found, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
