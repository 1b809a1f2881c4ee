"""How far predictions of real training are off, and `auto` against the best of stock and tuned DDP.

    python validation/training/errors.py FOLDER…

Each FOLDER holds what `compare.py` writes. Of a model at a bandwidth that several hold, the last one counts. Nothing is
measured: every case is predicted from the profile and network that `auto` itself measured, so that a changed model is
judged on the same measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from backbeat.errors import BackbeatError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.reduction import REDUCTIONS
from backbeat.simulate.predict import predict
from backbeat.units import format_bytes

SCHEMA = "backbeat.validation.training/1"
EQUAL = 0.01
KINDS = ("buckets", "units", "memory")
HOST_PACED = 0.9
"""Where the host takes this share of a step to issue it, it may set the step's pace."""
Row = dict[str, Any]


def records(folder: Path) -> list[dict[str, Any]]:
    """One for each lab."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [one for one in found if isinstance(one, dict) and one.get("schema") == SCHEMA]


def measured_s(turns: list[float]) -> float:
    return median(turns)


def repeat(turns: list[float]) -> float:
    """How far the even turns' median is from the odd ones', as a share.

    >>> repeat([1.0, 1.1, 1.0, 1.1])
    0.0952
    """
    if len(turns) < 2:
        return 0.0
    return round(abs(median(turns[::2]) - median(turns[1::2])) / median(turns), 4)


def kind_of(plan: dict[str, Any]) -> str:
    """What a plan is judged with: buckets, units or memory."""
    memory = plan.get("memory") or {}
    if any(segment["action"] != "keep" for segment in memory.get("segments", ())):
        return "memory"
    return "units" if plan.get("sharding") is not None else "buckets"


def rows(folder: Path, record: dict[str, Any]) -> Iterator[Row]:
    """Every side of a lab that was measured, beside its prediction."""
    for case in record["cases"]:
        if "error" in case:
            continue
        file = folder / "profiles" / f"{case['profile']}.json.gz"
        profile = Profile.load(file) if file.exists() else None
        network = msgspec.convert(case["network"], Network)
        for side in case["sides"]:
            if not side["turns_s"]:
                continue
            found = _predicted(side, profile, network)
            side |= found
            yield {
                "lab": record["lab"],
                "model": case["model"],
                "side": side["side"],
                "runs": runs(side),
                "turns_s": side["turns_s"],
                "measured_s": measured_s(side["turns_s"]),
                "repeat": repeat(side["turns_s"]),
                "host_paced": side.get("host_s", 0.0) > HOST_PACED * measured_s(side["turns_s"]),
                **found,
            }


def runs(side: dict[str, Any]) -> str:
    """What equal plans have in common, whichever strategy made them; torch's own DDP runs by itself."""
    plan = side.get("plan")
    if plan is None:
        return str(side["side"])
    parts = {name: plan.get(name) for name in ("buckets", "communicators", "sharding", "memory")}
    return json.dumps([plan["strategy"] == "ddp", parts], sort_keys=True)


def case_of(row: Row) -> tuple[str, str]:
    return row["lab"], row["model"]


def once(found: list[Row]) -> list[Row]:
    """Equal plans of one lab and model as one row, with the turns of all: `auto` may take what another side is."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        alike.setdefault((*case_of(row), row["runs"]), []).append(row)
    return [
        {**same[0], "measured_s": measured_s([turn for row in same for turn in row["turns_s"]])}
        for same in alike.values()
    ]


def predict_side(profile: Profile, network: Network, plan: Plan) -> Prediction:
    """`ddp` and `tuned` are torch's own DDP, which adds nothing to a step that backbeat's wrapper does."""
    return predict(profile, network, plan, reduction=REDUCTIONS["torch-ddp"] if plan.strategy == "ddp" else None)


def _predicted(side: dict[str, Any], profile: Profile | None, network: Network) -> Row:
    """Anew from the plan; as it was where the side had a profile of its own, or none was kept."""
    if "plan" not in side:
        return {"kind": "", "predicted_s": None, "bound_s": None}
    kind = kind_of(side["plan"])
    if kind == "memory" or profile is None or "options" in side:
        return {"kind": kind, "predicted_s": side.get("predicted_s"), "bound_s": side.get("bound_s")}
    try:
        found = predict_side(profile, network, msgspec.convert(side["plan"], Plan))
    except BackbeatError:
        return {"kind": kind, "predicted_s": None, "bound_s": None}
    return {"kind": kind, "predicted_s": found.iteration_s, "bound_s": found.bound_s}


def line_of(lab: str, case: dict[str, Any]) -> list[str]:
    """One model in words, a line a side."""
    if "error" in case:
        return [f"{lab} {case['model']}: {case['error']}"]
    lines = [f"{lab} {case['model']} batch {case['batch_size']} {case['precision']}, took {case['took_s']:.0f} s"]
    for side in case["sides"]:
        if not side["turns_s"]:
            lines.append(f"  {side['side']:20} {side.get('error', 'not measured')}")
            continue
        found_s = measured_s(side["turns_s"])
        text = f"  {side['side']:20} {found_s * 1e3:8.1f} ms, repeats within {repeat(side['turns_s']):.1%}"
        if side.get("predicted_s"):
            text += f", predicted {side['predicted_s'] * 1e3:.1f} ms ({side['predicted_s'] / found_s - 1:+.1%})"
            text += f", bound {side['bound_s'] * 1e3:.1f} ms"
        if side.get("peak_bytes") and side.get("predicted_peak_bytes"):
            peak, predicted = side["peak_bytes"], side["predicted_peak_bytes"]
            text += f", peak {format_bytes(peak)}, predicted {format_bytes(predicted)} ({predicted / peak - 1:+.1%})"
        if "host_s" in side:
            text += f"; the host issues it in {side['host_s'] * 1e3:.1f} ms"
        if "words" in side:
            text += f"; in {side['search_s']:.0f} s: {side['words']}"
        if "cap_mb" in side:
            text += f"; {side['cap_mb']} MiB"
        lines.append(text)
    if "removed" in case:
        old = case["removed"]
        ratio = old["ddp"]["measured_s"] / old["decoupled"]["measured_s"]
        lines.append(
            f"  decoupled buckets of the removed runtime {old['decoupled']['measured_s'] * 1e3:.1f} ms, repeats within "
            f"{old['decoupled']['repeat']:.1%}, {ratio:.2f} times as fast as stock DDP in the same job "
            f"({old['ddp']['measured_s'] * 1e3:.1f} ms, repeats within {old['ddp']['repeat']:.1%})"
        )
    return lines


def spread(found: list[Row]) -> str:
    """Median, 95th percentile and worst of the absolute errors."""
    off = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in found if row["predicted_s"]]
    if not off:
        return "no cases"
    return f"{len(off)} cases: median {np.median(off):.1%}, p95 {np.quantile(off, 0.95):.1%}, worst {max(off):.1%}"


def against_best(found: list[Row]) -> list[Row]:
    """`auto` of each lab and model beside the faster of stock and tuned DDP.

    It keeps up where it is no slower than that by more than 1 % or what either repeats within.
    """
    answers = []
    for case in dict.fromkeys(map(case_of, found)):
        sides = {row["side"]: row for row in found if case_of(row) == case}
        rivals = [sides[name] for name in ("ddp", "tuned") if name in sides]
        if "auto" not in sides or not rivals:
            continue
        auto, best = sides["auto"], min(rivals, key=lambda row: row["measured_s"])
        room = max(EQUAL, auto["repeat"], best["repeat"])
        ratio = best["measured_s"] / auto["measured_s"]
        answers.append(
            {
                "lab": case[0],
                "model": case[1],
                "best": best["side"],
                "times_as_fast": ratio,
                "room": room,
                "keeps_up": ratio >= 1 / (1 + room),
            }
        )
    return answers


def show(*folders: Path) -> None:
    newest: dict[tuple[str, str], list[Row]] = {}
    for folder in folders:
        for record in records(folder):
            measured = list(rows(folder, record))
            for model in dict.fromkeys(row["model"] for row in measured):
                newest[record["lab"], model] = [row for row in measured if row["model"] == model]
            for case in record["cases"]:
                print("\n".join(line_of(record["lab"], case)))
    found = [row for case in newest.values() for row in case]
    if not found:
        sys.exit(f"no measured cases in {', '.join(map(str, folders))}: run compare.py, or name another folder")
    for kind in KINDS:
        own = [row for row in once(found) if row["kind"] == kind]
        print(f"{kind}: {spread(own)}")
        ahead = [row for row in own if not row["host_paced"]]
        if len(ahead) < len(own):
            print(f"  the host issuing a step in less than {HOST_PACED:.0%} of it: {spread(ahead)}")
    for side in dict.fromkeys(row["side"] for row in found):
        print(f"  {side}: {spread([row for row in found if row['side'] == side])}")
    for one in against_best(found):
        words = "keeps up" if one["keeps_up"] else "is slower"
        print(
            f"{one['lab']} {one['model']}: auto {words}, {one['times_as_fast']:.3f} times as fast as {one['best']}, "
            f"the faster of stock and tuned DDP (repeats within {one['room']:.1%})"
        )


if __name__ == "__main__":
    show(*(map(Path, sys.argv[1:]) if len(sys.argv) > 1 else [Path(__file__).parent]))
