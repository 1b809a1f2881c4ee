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
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backbeat import layouts
from backbeat.layouts.layout_prediction import COMPUTE
from validation.layouts.rows import READERS, Row, rows

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- errors -->", "<!-- end of errors -->"
"""Where the tables stand in the pages."""


def predicted(row: Row, factor: float = 1.0, family: str = "events", *, band: bool = False) -> layouts.LayoutPrediction:
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
        contention=row.contention,
        band=band,
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
    members = Counter(row.group for row in every)
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


@dataclass(frozen=True)
class Judged:
    """Errors of one row."""

    row: Row
    events: float
    closed: float
    calibrated: float | None
    memory: float | None
    step_s: float
    inside: bool
    """Whether it was measured in the range that is given for it."""


def judged(every: list[Row], half: str, factors: dict[str, tuple[Row, float]], show: bool) -> list[Judged]:
    found = []
    for row in (one for one in every if one.half == half):
        one = predicted(row, band=True)
        assert one.band_s is not None
        inside = one.band_s[0] <= row.measured_s <= one.band_s[1]
        calibrated = memory = None
        if row.group in factors and factors[row.group][0].identity != row.identity:
            calibrated = predicted(row, factors[row.group][1]).step_s / row.measured_s - 1
        if row.measured_bytes is not None:
            memory = (one.memory.total - one.memory.reserve) / row.measured_bytes - 1
        closed = predicted(row, family="closed-form").step_s / row.measured_s - 1
        found.append(Judged(row, one.step_s / row.measured_s - 1, closed, calibrated, memory, one.step_s, inside))
        if show:
            parts = " ".join(
                f"{name} {value / one.step_s:.0%}"
                for name, value in one.breakdown.parts.items()
                if value > 0.02 * one.step_s
            )
            others = " ".join(f"{error:+7.1%}" if error is not None else "      -" for error in (calibrated, memory))
            print(f"{row.group:28} {row.layout.label[:44]:44} {found[-1].events:+7.1%} {others} {parts}")
    return found


def errors(found: list[Judged]) -> dict[str, Any]:
    """By protocol."""
    places: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in found:
        places[one.row.place].append((one.row.measured_s, one.step_s))
    ranked = [value for value in map(rank_correlation, places.values()) if value is not None]
    columns = {name: [getattr(one, name) for one in found] for name in ("events", "closed", "calibrated", "memory")}
    known = {name: [error for error in column if error is not None] for name, column in columns.items()}
    return {
        "zero-shot": summary(known["events"]),
        "zero-shot, closed form": summary(known["closed"]),
        "calibrated": summary(known["calibrated"]) if known["calibrated"] else None,
        "memory": summary(known["memory"]) if known["memory"] else None,
        "inside the range": sum(one.inside for one in found),
        "rank correlation": round(statistics.median(ranked), 2) if ranked else None,
    }


def parallelism(row: Row) -> str:
    layout = row.layout
    if layout.ep > 1:
        return "experts"
    if layout.cp > 1:
        return "context"
    names = [name for name, size in (("tensor", layout.tp), ("pipeline", layout.pp)) if size > 1]
    return " and ".join(names) or "data alone"


PROTOCOLS = ("zero-shot", "zero-shot, closed form", "calibrated", "memory")
BRIEF = ("zero-shot", "calibrated")


def markdown(title: str, found: dict[str, dict[str, Any]], protocols: tuple[str, ...] = PROTOCOLS) -> str:
    """A table of medians, 90th percentiles and biases; with fewer than all protocols, without rank correlations."""
    ranked = protocols == PROTOCOLS
    lines = [f"| {title} | rows | {' | '.join(protocols)} | inside |{' ranks |' * ranked}"]
    lines.append("|---|" + "---|" * (len(protocols) + 2 + ranked))
    for name, result in found.items():
        cells = [
            f"{one['median']:.1%}, {one['p90']:.1%}, {one['bias']:+.1%}" if (one := result[each]) else ""
            for each in protocols
        ]
        cells.append(str(result["inside the range"]))
        if ranked:
            cells.append("" if result["rank correlation"] is None else f"{result['rank correlation']:.2f}")
        lines.append(f"| {name} | {result['zero-shot']['rows']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--reported", action="store_true")
    parser.add_argument("--rows", action="store_true", help="Print every row.")
    parser.add_argument("--contention", action="store_true", help="Count it; of the development half alone.")
    parser.add_argument("--table", choices=list(READERS))
    asked = parser.parse_args()
    half = "reported" if asked.reported and not asked.contention else "development"
    by_table, by_kind, factors = {}, defaultdict(list), {}
    for table in [asked.table] if asked.table else list(READERS):
        every = [replace(row, contention=asked.contention or None) for row in rows(asked.truth, table)]
        fits = calibrations(every)
        factors.update({name: round(factor, 3) for name, (_, factor) in fits.items()})
        found = judged(every, half, fits, asked.rows)
        by_table[table] = errors(found)
        for one in found:
            by_kind[parallelism(one.row)].append(one)
    kinds = {name: errors(found) for name, found in sorted(by_kind.items())}
    text = f"{markdown('table', by_table)}\n\n{markdown('parallelism', kinds)}"
    print(text)
    if half == "reported" and not asked.table:
        answer = {"half": half, "tables": by_table, "parallelism": kinds, "compute factors": factors}
        (HERE / "errors.json").write_text(json.dumps(answer, indent=1) + "\n")
        brief = markdown("parallelism", kinds, BRIEF)
        for page, shown in ((HERE / "README.md", text), (HERE.parents[1] / "docs/explanation/results.md", brief)):
            before, _, rest = page.read_text("utf-8").partition(BEGIN)
            page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
