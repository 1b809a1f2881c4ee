"""Three predictors on the same measured cases: closed form, plain recursion, full model. What each errs and costs.

    python validation/lab/choosing.py [FOLDER]

FOLDER holds the files of `backbeat validate` (default: this one). Only cases that repeat within 2 % are judged, and
their number is printed. Writes choosing.json into the folder.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import backbeat as bb
from backbeat.lab.plans import from_shorthand
from backbeat.lab.records import Record, load
from backbeat.lab.setting import scaled
from backbeat.lab.statistics import REPEATS_WITHIN, errors
from backbeat.model import Network, Plan, Profile

Predictor = Callable[[Profile, Network, Plan], float]


def closed_form(profile: Profile, network: Network, plan: Plan) -> float:
    """Compute, or all messages in a row from the first gradient on, whichever is longer: no simulation."""
    alpha, beta = network.cost.isolated.line
    messages = float(profile.ready[0]) + alpha * len(plan.groups) + beta * profile.total_bytes
    return profile.forward_s + max(profile.backward_s, messages) + profile.update_s


def plain_recursion(profile: Profile, network: Network, plan: Plan) -> float:
    """The event model without what several or back-to-back messages were measured to do."""
    plain = msgspec.structs.replace(network, concurrency=())
    return bb.predict(profile, plain, plan, broadcast_buffers=False).iteration_s


def full_model(profile: Profile, network: Network, plan: Plan) -> float:
    return bb.predict(profile, network, plan, broadcast_buffers=False).iteration_s


PREDICTORS: dict[str, Predictor] = {
    "closed form": closed_form,
    "plain recursion": plain_recursion,
    "full model": full_model,
}


def judge(records: list[Record]) -> dict[str, object]:
    found: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    spent: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    cases, measured_s = 0, 0.0
    for record in records:
        for case in record.cases:
            cases += 1
            measured_s += sum(case.samples)
            if case.repeat > REPEATS_WITHIN:
                continue
            profile = scaled(record.models[case.model].profile(case.model), record.dilation)
            network = record.calibration(case.session)
            plan = from_shorthand(case.groups, profile, case.plan, case.channels, record.nodes)
            for name, predictor in PREDICTORS.items():
                predictor(profile, network, plan)
                begun = time.perf_counter()
                predicted = predictor(profile, network, plan)
                spent[name].append(time.perf_counter() - begun)
                found[name].append(predicted / case.measured_s - 1)
    rows = {}
    for name in PREDICTORS:
        wrong = errors(found[name])
        if wrong is not None:
            rows[name] = {
                "median": round(wrong.median, 4),
                "p95": round(wrong.p95, 4),
                "worst": round(wrong.worst, 4),
                "bias": round(wrong.bias, 4),
                "milliseconds": round(statistics.median(spent[name]) * 1e3, 3),
            }
    return {
        "command": "python validation/lab/choosing.py",
        "cases": cases,
        "judged": len(found["full model"]),
        "lab_seconds_of_iterations": round(measured_s, 1),
        "predictors": rows,
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    result = judge(load(folder))
    (folder / "choosing.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
