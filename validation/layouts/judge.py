"""How far layouts are predicted from published measurements, by table and protocol.

    python validation/layouts/judge.py --truth TRUTH [--reported] [--rows]

`TRUTH` holds the tables. Some of them state no licence, so they are read from where they are kept, and only errors are
written. Without `--reported` the half that `split.json` sets aside is not read, and nothing is written.

Zero-shot: public specifications alone. Calibrated: computation is multiplied by what one layout of the same model and
system says (of the development half, the row whose predicted step is computation for the largest share), and the other
rows are predicted; that one is left out. Errors are predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from backbeat import layouts
from backbeat.layouts.layout_prediction import COMPUTE
from validation.layouts.rows import READERS, Row, rows

HERE = Path(__file__).resolve().parent


def predicted(row: Row, factor: float = 1.0, family: str = "events") -> layouts.LayoutPrediction:
    return layouts.predict(
        row.model,
        row.cluster,
        row.layout,
        accelerator=row.accelerator,
        global_batch=row.global_batch,
        sequence=row.sequence,
        precision=row.precision,
        framework=row.framework,
        compute_factor=factor,
        family=family,  # type: ignore[arg-type]
        band=False,
    )


def fitted(row: Row) -> float:
    """The compute factor with which this row comes out as measured."""
    low, high = 0.2, 5.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(row, middle, "closed-form").step_s < row.measured_s else (low, middle)
    # The two families differ a little: once more, from events.
    return middle * row.measured_s / predicted(row, middle).step_s


def computing(row: Row) -> float:
    """The share of the predicted step that is computation."""
    found = predicted(row)
    return sum(found.breakdown.parts[name] for name in COMPUTE) / found.step_s


def calibrations(every: list[Row]) -> dict[str, tuple[Row, float]]:
    """For each model and system with several rows, the one that is fitted to."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in every:
        if row.half == "development":
            groups[row.group].append(row)
    members = defaultdict(int)
    for row in every:
        members[row.group] += 1
    found = {}
    for name, own in groups.items():
        if members[name] > 1:
            chosen = max(own, key=lambda row: (computing(row), row.identity))
            found[name] = (chosen, fitted(chosen))
    return found


def summary(errors: list[float]) -> dict[str, float]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "rows": len(errors),
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "worst": sizes[-1],
        "bias": statistics.median(errors),
    }


def rank_correlation(pairs: list[tuple[float, float]]) -> float | None:
    """Spearman's."""
    if len(pairs) < 3:
        return None

    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda place: values[place])
        found = [0.0] * len(values)
        for rank, place in enumerate(order):
            found[place] = float(rank)
        return found

    one, two = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    return statistics.correlation(one, two)


def judge(truth: Path, table: str, half: str, show: bool) -> dict[str, Any]:
    every = rows(truth, table)
    factors = calibrations(every)
    own = [row for row in every if row.half == half]
    zero, calibrated, memory = [], [], []
    places: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in own:
        found = predicted(row)
        zero.append(found.step_s / row.measured_s - 1)
        places[row.place].append((row.measured_s, found.step_s))
        text = ""
        if row.group in factors and factors[row.group][0].identity != row.identity:
            calibrated.append(predicted(row, factors[row.group][1]).step_s / row.measured_s - 1)
            text = f"{calibrated[-1]:+7.1%}"
        if row.measured_bytes is not None:
            memory.append((found.memory.total - found.memory.reserve) / row.measured_bytes - 1)
            text += f" memory {memory[-1]:+6.1%}"
        if show:
            parts = " ".join(
                f"{name} {value / found.step_s:.0%}"
                for name, value in found.breakdown.parts.items()
                if value > 0.02 * found.step_s
            )
            print(f"{row.group:28} {row.layout.label[:44]:44} {zero[-1]:+7.1%} {text:8} {parts}")
    ranked = [value for value in map(rank_correlation, places.values()) if value is not None]
    return {
        "zero-shot": summary(zero),
        "calibrated": summary(calibrated) if calibrated else None,
        "memory": summary(memory) if memory else None,
        "rank correlation": statistics.median(ranked) if ranked else None,
        "factors": {name: round(factor, 3) for name, (_, factor) in factors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--reported", action="store_true")
    parser.add_argument("--rows", action="store_true", help="Print every row.")
    parser.add_argument("--table", choices=list(READERS))
    asked = parser.parse_args()
    half = "reported" if asked.reported else "development"
    tables = [asked.table] if asked.table else list(READERS)
    found = {table: judge(asked.truth, table, half, asked.rows) for table in tables}
    for table, result in found.items():
        print(table, half)
        for protocol in ("zero-shot", "calibrated", "memory"):
            one = result[protocol]
            if one is not None:
                print(f"  {protocol:11}", " ".join(f"{key} {value:.1%}" if key != "rows" else f"{value} rows"
                                                   for key, value in one.items()))  # fmt: skip
        print("  rank correlation", result["rank correlation"], result["factors"])
    if asked.reported and not asked.table:
        (HERE / "errors.json").write_text(json.dumps({"half": half, "tables": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
