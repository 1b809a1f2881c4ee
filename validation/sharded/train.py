"""Real training under FSDP2: the peak of device memory, and the step, beside what is predicted.

    python validation/sharded/train.py FOLDER --limit 6min
    python validation/sharded/train.py FOLDER --backend gloo --lab 2:100mbit --train examples.my_model:small_cnn=4 \
        --precision fp32 --limit 1min

Three transformer models train on nodes that share a GPU, for each strategy in turn and alone, so that the peak is its
own. Profiles are taken on the nodes themselves before. FOLDER/train.json gets every case as it is measured: the peak
that torch allocated (`torch.cuda.max_memory_allocated`, the most of any rank), predicted peak, steps and losses. Needs
root; with --backend nccl a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from measure import setting_of

from backbeat.errors import BackbeatError
from backbeat.lab import experiment
from backbeat.lab.jobs import turns_s
from backbeat.lab.plans import build_plan, parse_plans
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model.files import encode, write
from backbeat.planners import STRATEGIES
from backbeat.steps.predict import predict
from backbeat.units import format_bytes, parse_duration

MODELS = "backbeat.zoo.models:gpt2=4,backbeat.zoo.models:bert_base=16,backbeat.zoo.models:vit_b=32"
PROFILE_S = 3.0
UNTIMED = 6
"""Steps of a case that are not timed, and building the model, in steps."""


def measure(session: Session, setting: Setting, given: argparse.Namespace, end: float, record: dict[str, Any]) -> None:
    """Every model under every strategy, while there is time."""
    wanted = parse_plans([name for name in given.strategy.split(",") if name.partition(":")[0] in STRATEGIES])
    calibrated = experiment.calibrate_lab(
        session, setting, wanted, budget_s=parse_duration(given.budget), largest_bytes=80_000_000
    )
    record |= {
        **session.ask("describe", 60)[0],
        "command": shlex.join(["python", *sys.argv]),
        "network": msgspec.to_builtins(calibrated.network),
    }
    seconds_each = parse_duration(given.seconds)
    for text in given.train.split(","):
        spec, _, batch = text.partition("=")
        if time.monotonic() + 10 * PROFILE_S > end:
            print(f"no time for {spec}", file=sys.stderr)
            continue
        profile = experiment.profile_training(session, spec, int(batch), PROFILE_S, given.precision)
        write(given.folder / f"{profile.name}.json", encode(profile))
        for choice in wanted:
            plan = build_plan(choice, profile, calibrated.network)
            prediction = predict(profile, calibrated.network, plan)
            expected_s = turns_s([prediction.iteration_s], seconds_each) + UNTIMED * prediction.iteration_s
            if time.monotonic() + expected_s > end:
                print(f"no time for {spec} under {choice.name}", file=sys.stderr)
                continue
            case: dict[str, Any] = {
                "model": spec,
                "batch_size": int(batch),
                "profile": profile.name,
                "strategy": choice.name,
                "plan": msgspec.to_builtins(plan),
                "predicted_s": prediction.iteration_s,
                "predicted_peak_bytes": prediction.peak_bytes,
            }
            (result,), (losses,) = experiment.train(
                session, spec, int(batch), [(choice, plan, prediction)], seconds_each, given.precision
            )
            case |= {"peak_bytes": result.peak_bytes, "series_s": result.series, "losses": losses}
            record["cases"].append(case)
            write(given.folder / "train.json", (json.dumps(record, indent=1) + "\n").encode())
            print(_line(case, result.measured_s))


def _line(case: dict[str, Any], measured_s: float) -> str:
    peak, predicted = case["peak_bytes"], case["predicted_peak_bytes"]
    memory = "no peak on a CPU"
    if peak and predicted:
        memory = f"peak {format_bytes(peak)}, predicted {format_bytes(predicted)} ({predicted / peak - 1:+.1%})"
    step = f"step {measured_s * 1e3:.1f} ms, predicted {case['predicted_s'] * 1e3:.1f} ms"
    error = case["predicted_s"] / measured_s - 1
    return f"{case['profile']:28} {case['strategy']:8} {memory}; {step} ({error:+.1%}); loss {case['losses'][-1]:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lab", default="4:16gbit", help="as in measure.py (default: %(default)s)")
    parser.add_argument("--train", default=MODELS, help="PACKAGE.MODULE:FACTORY=BATCH, comma-separated")
    parser.add_argument("--strategy", default="fsdp,zero2,sharded", help="comma-separated (default: %(default)s)")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"))
    parser.add_argument("--seconds", default="2s", help="to train each case for")
    parser.add_argument("--budget", default="12s", help="to calibrate for")
    parser.add_argument("--limit", default="10min", help="stop in time")
    given = parser.parse_args()
    check_requirements(given.backend)
    end = time.monotonic() + parse_duration(given.limit)
    setting = setting_of(given.lab, given.backend, 1.0)
    given.folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"lab": setting.name, "precision": given.precision, "cases": []}
    try:
        with experiment.open_lab(setting, 1) as session:
            measure(session, setting, given, end, record)
    except BackbeatError as error:
        print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
