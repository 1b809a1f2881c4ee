"""Sets half of every published table aside, from the rows' identities alone, before a result is read.

    python validation/layouts/split.py --truth TRUTH

The sha256 of a row's identity, as a number: even is development, odd is reported. Writes split.json.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = {
    "vtrain_multi_a100": ("iteration time (ms)",),
    "megatron_papers": ("value",),
    "simumax_b200": (
        "real_iteration_ms", "simumax_ms", "simumax_err_pct", "real_peak_alloc_gib", "simumax_alloc_gib",
    ),
    "nvidia_megatron_bridge": ("tok_s_gpu", "model_tflops_gpu"),
    "nanotron_3b_dp": ("tok_s_gpu", "iteration_s", "mem_gb"),
}  # fmt: skip
"""The columns of each table that are no part of a row's identity."""


def identities(truth: Path, table: str) -> list[str]:
    """One line a row: table, then the columns that say what was run. A row that stands twice gets a number."""
    found: list[str] = []
    with (truth / f"{table}.csv").open() as file:
        for row in csv.DictReader(file):
            name = f"{table}/" + "/".join(value for key, value in row.items() if key not in RESULTS[table])
            found.append(name if name not in found else f"{name}#{sum(one.startswith(name) for one in found)}")
    return found


def half(identity: str) -> str:
    return "development" if int(hashlib.sha256(identity.encode()).hexdigest(), 16) % 2 == 0 else "reported"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True)
    truth = parser.parse_args().truth
    # The nanotron rows have halves already: validation/published/split.json.
    tables = [table for table in RESULTS if table != "nanotron_3b_dp"]
    rows = {name: half(name) for table in tables for name in identities(truth, table)}
    answer = {
        "rule": "sha256 of the identity, as a number: even is development, odd is reported",
        "made": "2026-11-16, from the identity columns alone, before a result was read",
        "rows": rows,
    }
    (HERE / "split.json").write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
