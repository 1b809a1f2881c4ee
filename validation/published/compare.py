"""Run backbeat's cost model and planners on the published figures, and say how close they come.

    python validation/published/compare.py

Prints the tables and writes results.json beside this file. README.md beside it explains them.
"""

from __future__ import annotations

from typing import Any

from validation.published import laws, training
from validation.published.figures import HERE, provenance, save, table


def compare() -> dict[str, Any]:
    """Every comparison, as data."""
    return {
        "line_rates": laws.line_rates(),
        "scaling_laws": laws.scaling_laws(),
        "pair_model": laws.pair_model(),
        "contention_formula": laws.contention_formula(),
        "contention_raw": laws.contention_raw(),
        "asc_wfbp": [
            row for spread in training.ALL_SPREADS for row in training.asc_table(training.ten_gigabit(32), spread)
        ],
        "asc_wfbp_fitted": [training.asc_fit(spread) for spread in training.SPREADS],
        "mg_wfbp_k80": [row for spread in training.SPREADS for row in training.k80_table(spread)],
    }


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Nested figures as columns of their own."""
    columns: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            columns.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            columns[key] = value
    return columns


TITLES = {
    "line_rates": "Bandwidth that each published slope implies",
    "scaling_laws": "Published (a, b), predicted from another number of workers (ratio: ours / paper)",
    "pair_model": "Two equal all-reduces at once: ASC-WFBP's pair model against the engine",
    "contention_formula": "k at once: the contention study's formula against the engine, e(k) fitted at 100 MiB",
    "contention_raw": "k at once: the study's raw series, 100 MiB on 8 nodes",
    "asc_wfbp": "ASC-WFBP's table, nothing fitted: 10 GbE at line rate; profiles assumed, or scaled from an H200",
    "asc_wfbp_fitted": "ASC-WFBP's table: (a, b, e(2)) fitted to it",
    "mg_wfbp_k80": "MG-WFBP's first efficiencies; T(1) from merge-all at N = 2",
}


def main() -> None:
    results = compare()
    for name, rows in results.items():
        print(f"{TITLES[name]}\n{table([flat(row) for row in rows])}\n")
    save(HERE / "results.json", {"made": provenance("python validation/published/compare.py"), **results})


if __name__ == "__main__":
    main()
