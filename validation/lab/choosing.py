"""Three predictors on the same measured cases: closed form, plain recursion, full model. What each errs and costs.

    python validation/lab/choosing.py [FOLDER]

FOLDER holds the records that `measure.py` writes (default: this one). Only cases that repeat within 2 % are judged, and
their number is printed. Writes choosing.json into the folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from errors import REPEATS_WITHIN, Record, calibration, cases, errors, load, plan_of, profiles

import backbeat as bb
from backbeat.model import Network, Plan, Profile

Predictor = Callable[[Profile, Network, Plan], float]


def closed_form(profile: Profile, network: Network, plan: Plan) -> float:
    """Compute, or all messages in a row from the first gradient on, whichever is longer: no simulation."""
    alpha, beta = network.cost.isolated.line
    messages = float(profile.ready[0]) + alpha * len(plan.buckets) + beta * profile.total_bytes
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


def judge(records: list[Record]) -> dict[str, Any]:
    rows = []
    for record in records:
        known = profiles(record)
        for case, seen in zip(record["cases"], cases(record).itertuples(), strict=True):
            if seen.repeat > REPEATS_WITHIN:
                continue
            profile, network = known[case["model"]], calibration(record, case["session"])
            plan = plan_of(record, case, profile)
            for name, predictor in PREDICTORS.items():
                predictor(profile, network, plan)
                begun = time.perf_counter()
                predicted_s = predictor(profile, network, plan)
                spent_s = time.perf_counter() - begun
                error = predicted_s / seen.measured_s - 1
                rows.append({"predictor": name, "error": error, "repeat": seen.repeat, "milliseconds": spent_s * 1e3})
    found = pd.DataFrame(rows).groupby("predictor")
    kept = ["median", "p95", "worst", "bias"]
    all_cases = [case for record in records for case in record["cases"]]
    return {
        "command": "python validation/lab/choosing.py",
        "cases": len(all_cases),
        "judged": len(rows) // len(PREDICTORS),
        "lab_seconds_of_iterations": round(sum(sum(map(sum, case["series_s"])) for case in all_cases), 1),
        "predictors": {
            name: {
                **errors(found.get_group(name))[kept].round(4).to_dict(),
                "milliseconds": round(found.get_group(name)["milliseconds"].median(), 3),
            }
            for name in PREDICTORS
        },
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    result = judge(load(folder))
    (folder / "choosing.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
