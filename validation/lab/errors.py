"""How far predictions are off: every measured case of a folder, predicted from its calibration and its profile.

    python validation/lab/errors.py [FOLDER]

FOLDER holds the records that `measure.py` writes (default: this one). Prints the errors by setting, session, model and
strategy, over all cases and over those that repeat, and writes summary.csv, speedups.csv and scatter.svg into the
folder. Nothing is measured, so that a changed model is judged on the same measurements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from backbeat.model import Gradient, Network, Plan, Profile
from backbeat.planners import Draft
from backbeat.simulate.predict import predict

SCHEMA = "backbeat.validation/1"
REPEATS_WITHIN = 0.02
"""Cases whose two series differ by more say more about the instrument than about the prediction."""
BAND = 0.05
Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """The records in a folder, one for each setting; other files are left alone."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    records = [one for one in found if isinstance(one, dict) and one.get("schema") == SCHEMA]
    if not any(record["cases"] for record in records):
        sys.exit(f"no measured cases in {folder}: run measure.py, or name another folder")
    return records


def calibration(record: Record, session: int) -> Network:
    """The network as calibrated in one of the record's sessions."""
    return msgspec.convert(record["sessions"][session]["network"], Network)


def profiles(record: Record) -> dict[str, Profile]:
    """The compute that was replayed, by the name of its model."""
    return {model["name"]: _profile(model).replayed(record["dilation"]) for model in record["models"]}


def _profile(model: dict[str, Any]) -> Profile:
    rows = zip(model["bytes"], model["ready_s"], strict=True)
    return Profile(
        name=model["name"],
        model=model["name"],
        batch_size=1,
        precision="",
        device="",
        forward_s=model["forward_s"],
        backward_s=model["backward_s"],
        update_s=model["update_s"],
        gradients=tuple(
            Gradient(name=str(index), bytes=size, ready_s=ready) for index, (size, ready) in enumerate(rows)
        ),
    )


def plan_of(record: Record, case: dict[str, Any], profile: Profile) -> Plan:
    draft = Draft.of_launches(case["buckets"], case["communicators"])
    return draft.named(profile, case["plan"], record["nodes"])


def cases(record: Record, network: Network | None = None) -> pd.DataFrame:
    """One row for each case, predicted from its own session's calibration or from another network."""
    known = profiles(record)
    networks = [network or calibration(record, session) for session in range(len(record["sessions"]))]
    rows = []
    for case in record["cases"]:
        profile = known[case["model"]]
        plan = plan_of(record, case, profile)
        measured_s = np.median([sample for series in case["series_s"] for sample in series])
        first, second = (np.median(series) for series in case["series_s"])
        predicted_s = predict(profile, networks[case["session"]], plan, broadcast_buffers=False).iteration_s
        rows.append(
            {
                "setting": record["setting"],
                "session": f"{record['setting']} session {case['session'] + 1}",
                "model": case["model"],
                "plan": case["plan"],
                "strategy": case["plan"].partition("/")[0].partition(":")[0],
                "communicators": case["communicators"],
                "buckets": len(case["buckets"]),
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "error": predicted_s / measured_s - 1,
                "repeat": abs(first - second) / measured_s,
            }
        )
    return pd.DataFrame(rows)


def from_fewer_nodes(records: list[Record]) -> pd.DataFrame:
    """Cases predicted from the last calibration of the fewest nodes with the same backend and bandwidth."""
    found = [pd.DataFrame()]
    for record in records:
        alike = [one for one in records if all(one[key] == record[key] for key in ("backend", "bandwidth_bits"))]
        base = min(alike, key=lambda one: one["nodes"])
        if base["nodes"] < record["nodes"]:
            found.append(cases(record, calibration(base, -1).at(workers=record["nodes"])))
    return pd.concat(found)


def errors(found: pd.DataFrame) -> pd.Series:
    """The absolute errors of the cases that repeat and of all, as shares; bias is the median of the signed ones."""
    row = {}
    for prefix, chosen in (("repeating ", found[found["repeat"] <= REPEATS_WITHIN]), ("", found)):
        size = chosen["error"].abs()
        row |= {
            f"{prefix}cases": len(chosen),
            f"{prefix}median": size.median(),
            f"{prefix}p95": size.quantile(0.95),
            f"{prefix}worst": size.max(),
            f"{prefix}bias": chosen["error"].median(),
        }
    repeat = found["repeat"]
    row |= {"repeat median": repeat.median(), "repeat p95": repeat.quantile(0.95), "repeat worst": repeat.max()}
    return pd.Series(row)


def summary(found: pd.DataFrame, moved: pd.DataFrame) -> pd.DataFrame:
    """Errors by what cases have in common; `moved` are those predicted from a calibration of fewer nodes."""
    one, several = found[found["communicators"] == 1], found[found["communicators"] > 1]
    far = moved[moved["communicators"] == 1] if len(moved) else moved
    parts = {
        "all": (found.assign(all="all"), "all"),
        "communicators": (
            found.assign(communicators=np.where(found["communicators"] == 1, "one", "several")),
            "communicators",
        ),
        "setting, one communicator": (one, "setting"),
        "session, one communicator": (one, "session"),
        "model, one communicator": (one, "model"),
        "strategy, one communicator": (one, "strategy"),
        "session and strategy, several communicators": (several, ["session", "strategy"]),
        "setting, one communicator, calibrated on fewer nodes": (far, "setting"),
    }
    rows = {
        (title, name if isinstance(name, str) else " ".join(name)): errors(members)
        for title, (chosen, key) in parts.items()
        if len(chosen)
        for name, members in chosen.groupby(key)
    }
    table = pd.DataFrame(rows).T.rename_axis(["by", "name"])
    return table.astype({"repeating cases": int, "cases": int})


def speedups(found: pd.DataFrame, over: str = "ddp") -> pd.DataFrame:
    """Measured time of one plan over that of each other, by session and model."""
    times = found.pivot(index=["session", "model"], columns="plan", values="measured_s")
    if over not in times:
        return times.iloc[:0]
    return times.rdiv(times[over], axis=0).dropna(subset=[over])


def scatter(found: pd.DataFrame, path: Path) -> None:
    """Filled dots repeat, hollow ones do not; the dashed lines are ± 5 %."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "backbeat"})
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    times = found[["measured_s", "predicted_s"]].to_numpy()
    ends = np.array([times.min(), times.max()])
    axes.loglog(ends, ends, color="0.3", linewidth=1)
    for share in (1 + BAND, 1 / (1 + BAND)):
        axes.loglog(ends, ends * share, color="0.6", linewidth=1, linestyle="--")
    # Told apart by people who cannot tell red from green.
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#8b4513")
    for index, (setting, members) in enumerate(found.groupby("setting")):
        colour = colours[index % len(colours)]
        style = {"marker": "o", "linestyle": "none", "markersize": 4, "color": colour, "alpha": 0.7}
        steady = members["repeat"] <= REPEATS_WITHIN
        axes.plot("measured_s", "predicted_s", data=members[steady], label=f"{setting} ({len(members)})", **style)
        axes.plot("measured_s", "predicted_s", data=members[~steady], label="_", fillstyle="none", **style)
    axes.set(
        title=f"One iteration, {len(found)} cases: predicted against measured",
        xlabel="measured (s)",
        ylabel="predicted (s)",
        aspect="equal",
    )
    axes.grid(color="0.9")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    records = load(folder)
    found = pd.concat([cases(record) for record in records])
    table = summary(found, from_fewer_nodes(records))
    table.round(6).to_csv(folder / "summary.csv")
    speedups(found).round(4).to_csv(folder / "speedups.csv")
    scatter(found, folder / "scatter.svg")
    share = "{:.1%}".format
    for title, rows in table.drop(columns=["bias", "repeat median", "repeat worst"]).groupby("by", sort=False):
        shown = rows.droplevel("by").rename_axis(None).rename(columns=lambda name: name.replace("repeating ", "rep. "))
        print(f"by {title}\n{shown.to_string(float_format=share, na_rep='')}\n")
    worst = found.sort_values("error", key=abs, ascending=False).head(12).drop(columns=["setting", "strategy"])
    print("largest errors\n" + worst.to_string(index=False, formatters={"error": share, "repeat": share}))


if __name__ == "__main__":
    main()
