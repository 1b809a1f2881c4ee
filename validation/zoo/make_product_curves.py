"""Curves of matrix products, of thousands that others timed on a GPU.

    python validation/zoo/make_product_curves.py --truth TRUTH [GPU …]

Reads the rows of table gemm_bf16 that the judge does not ask (it asks one in twelve), of GPUs whose rows are for
development. Writes backbeat/zoo/operators/GPU.json. Of a GPU that we measured ourselves (H200) all rows are set aside.

For each number of columns and each depth, a line through corners, by rows: what is least off, in logarithms, with a
little stiffness for corners that few rows support.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backbeat.cost.operator_curves import FOLDER
from validation import cases
from validation.tables.gemm_bf16 import gpu_of, is_judged

Floats = NDArray[np.float64]
ROWS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
STIFF, TURNS, LEAST_OFF = 0.03, 6, 0.02
"""Of the corners; how often rows far off are weighed less; what is not far off."""


def line(rows: Floats, logs: Floats, corners: Floats) -> Floats:
    """Through corners, as near to the median as repeated weighing brings least squares."""
    at = np.log(corners)
    shares = np.stack([np.interp(np.log(rows), at, one) for one in np.eye(len(at))], axis=1)
    steps = np.diff(at)
    bends = np.zeros((len(at) - 2, len(at)))
    for index, (before, behind) in enumerate(itertools.pairwise(steps)):
        bends[index, index : index + 3] = 1 / before, -1 / before - 1 / behind, 1 / behind
    stiffness = STIFF * bends.T @ bends + 1e-9 * np.eye(len(at))
    weights = np.ones(len(rows))
    found = np.zeros(len(at))
    for _ in range(TURNS):
        found = np.linalg.solve(shares.T @ (weights[:, None] * shares) + stiffness, shares.T @ (weights * logs))
        weights = 1 / np.maximum(np.abs(shares @ found - logs), LEAST_OFF)
        weights /= weights.mean()
    return found


def curves(timed: dict[tuple[float, float], list[tuple[float, float]]]) -> dict[str, Any]:
    columns, depths = (sorted({place[axis] for place in timed}) for axis in (0, 1))
    most = max(rows for each in timed.values() for rows, _ in each)
    corners = np.array([rows for rows in ROWS if rows <= most], dtype=float)
    logs = np.full((len(corners), len(columns), len(depths)), np.nan)
    for (n, k), each in timed.items():
        rows, seconds = np.array(sorted(each)).T
        logs[:, columns.index(n), depths.index(k)] = line(rows, np.log(seconds), corners)
    for column, depth in np.argwhere(np.isnan(logs[0])):
        # Too large to be timed: as much longer than with fewer columns as with less depth.
        known = logs[:, column, depth - 1] + logs[:, column - 1, depth] - logs[:, column - 1, depth - 1]
        logs[:, column, depth] = known
    us = [float(f"{value:.3g}") for value in 1e6 * np.exp(logs.ravel())]
    return {"axes": [corners.tolist(), columns, depths], "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", metavar="GPU")
    parser.add_argument("--truth", type=Path, required=True)
    given = parser.parse_args()
    table = cases.table("gemm_bf16")
    allowed = json.loads((table.folder / "split.json").read_text())["development"]
    for file in table.rows:
        gpu = gpu_of(file)
        if gpu not in (given.gpus or allowed) or gpu not in allowed:
            continue
        timed: dict[tuple[float, float], list[tuple[float, float]]] = defaultdict(list)
        with gzip.open(given.truth / file, "rt") as lines:
            for row in csv.DictReader(lines):
                if not is_judged(row):
                    timed[float(row["n"]), float(row["k"])].append((float(row["m"]), float(row["latency_ms"]) / 1e3))
        found = json.dumps(curves(timed), separators=(",", ":"))
        source = {
            "command": f"python validation/zoo/make_product_curves.py --truth TRUTH {gpu}",
            "data": f"{table.source}, {file}; short bursts", "licence": "Apache-2.0",
        }  # fmt: skip
        products = f'{{\n  "bf16/nt": {found}\n }}'
        text = f'{{\n "accelerator": "{gpu}",\n "source": {json.dumps(source)},\n "products": {products}\n}}\n'
        (FOLDER / f"{gpu}.json").write_text(text)


if __name__ == "__main__":
    main()
