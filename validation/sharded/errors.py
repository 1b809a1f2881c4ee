"""How far predictions of sharded plans are off: every measured case of a folder, predicted from its own calibration.

    python validation/sharded/errors.py FOLDER

FOLDER holds what `measure.py` writes. Nothing is measured here, so that a changed model is judged on the same
measurements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backbeat.model import Network, Plan, Profile
from backbeat.simulate.predict import predict

SCHEMA = "backbeat.validation.sharded/1"
REPEATS_WITHIN = 0.02
"""Cases whose two series differ by more say more about the instrument than about the prediction."""
Record = dict[str, Any]


def records(folder: Path) -> list[Record]:
    """One for each lab."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [one for one in found if isinstance(one, dict) and one.get("schema") == SCHEMA]


def rows(folder: Path, record: Record) -> list[dict[str, Any]]:
    """Every case of a lab beside its prediction."""
    networks = [msgspec.convert(session["network"], Network) for session in record["sessions"]]
    found = []
    for case in record["cases"]:
        profile = Profile.load(folder / "profiles" / f"{case['model']}.json.gz").replayed(record["dilation"])
        first, second = (float(np.median(series)) for series in case["series_s"])
        measured = float(np.median([*case["series_s"][0], *case["series_s"][1]]))
        predicted = predict(profile, networks[case["session"]], msgspec.convert(case["plan"], Plan))
        found.append(
            {
                "lab": record["lab"],
                "model": case["model"],
                "setting": case["setting"],
                "units": len(case["plan"]["sharding"]["units"]),
                "single_s": predicted.single_s,
                "measured_s": measured,
                "predicted_s": predicted.iteration_s,
                "error": predicted.iteration_s / measured - 1,
                "repeat": abs(first - second) / measured,
            }
        )
    return found


def spread(found: list[dict[str, Any]]) -> str:
    """Median, 95th percentile and worst of the absolute errors."""
    errors = np.array([abs(row["error"]) for row in found])
    if not len(errors):
        return "no cases"
    worst = max(found, key=lambda row: abs(row["error"]))
    return (
        f"{len(errors)} cases: median {np.median(errors):.1%}, p95 {np.quantile(errors, 0.95):.1%}, worst "
        f"{errors.max():.1%} ({worst['lab']}, {worst['model']}, {worst['setting']})"
    )


def show(folder: Path) -> None:
    found = [row for record in records(folder) for row in rows(folder, record)]
    if not found:
        sys.exit(f"no measured cases in {folder}: run measure.py, or name another folder")
    print(f"{'lab':22} {'model':26} {'setting':12} {'units':>5} {'measured':>10} {'predicted':>10} {'error':>7} repeat")
    for row in found:
        print(
            f"{row['lab']:22} {row['model']:26} {row['setting']:12} {row['units']:5} {row['measured_s'] * 1e3:7.1f} ms "
            f"{row['predicted_s'] * 1e3:7.1f} ms {row['error']:+7.1%} {row['repeat']:6.1%}"
        )
    steady = [row for row in found if row["repeat"] <= REPEATS_WITHIN]
    print(f"all: {spread(found)}")
    print(f"repeating within {REPEATS_WITHIN:.0%}: {spread(steady)}")
    for setting in dict.fromkeys(row["setting"] for row in steady):
        print(f"  {setting}: {spread([row for row in steady if row['setting'] == setting])}")
    for lab, model in dict.fromkeys((row["lab"], row["model"]) for row in found):
        times = {row["setting"]: row["measured_s"] for row in found if (row["lab"], row["model"]) == (lab, model)}
        if {"fsdp", "sharded"} <= set(times):
            print(f"planned against default, {lab}, {model}: {times['fsdp'] / times['sharded']:.3f}x")


if __name__ == "__main__":
    show(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
