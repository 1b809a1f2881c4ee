"""Fit how bandwidth between nodes falls, on every published sweep but one, and judge it by that one.

    python validation/published/fabric/fit.py [--judge h100_cluster_bandwidth.csv]

Prints the table `FALL` of `backbeat/model/topology.py` and writes `fit.json`. The sweep that judges has no stated
licence, so its figures are read from where they are kept (`--judge`) and only errors are written.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np

from backbeat.model.topology import FALL, FabricKind, Load

HERE = Path(__file__).resolve().parent
METRICS: dict[str, Load] = {"p95": "quiet", "mean": "typical", "p5": "busy"}


def observations(sources: list[dict[str, Any]], kind: str, load: str) -> list[list[tuple[int, float]]]:
    """(nodes, share), by source."""
    found = (
        [(row["nodes"], row["share"]) for row in source.get("rows", []) if row["load"] == load]
        for source in sources
        if source["kind"] == kind
    )
    return [rows for rows in found if rows]


def fitted(by_source: list[list[tuple[int, float]]]) -> float:
    """The fall that fits the logarithms of the shares best; sources count alike, however many rows they have."""
    candidates = np.concatenate([[0.0], np.geomspace(1e-4, 10, 4001)])
    loss = np.zeros_like(candidates)
    for rows in by_source:
        for nodes, share in rows:
            loss += (np.log(share) + np.log1p(candidates * np.log2(nodes))) ** 2 / len(rows)
    return float(candidates[np.argmin(loss)])


def fit(sources: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Falls rise with the load: one with no observation takes the calmer load's."""
    table: dict[str, dict[str, float]] = {}
    for kind in get_args(FabricKind):
        least, row = 0.0, {}
        for load in get_args(Load):
            by_source = observations(sources, kind, load)
            least = max(least, round(fitted(by_source), 3)) if by_source else least
            row[load] = least
        table[kind] = row
    return table


def left_in(sources: list[dict[str, Any]], table: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """How far each source's shares are from the fit that saw them."""
    rows = []
    for source in sources:
        errors = [
            (1 / (1 + table[source["kind"]][row["load"]] * np.log2(row["nodes"]))) / row["share"] - 1
            for row in source.get("rows", [])
        ]
        if errors:
            rows.append({"source": source["name"], "rows": len(errors), "median": round(float(np.median(errors)), 3)})
    return rows


def judged(path: Path, table: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The cluster left out: its typical and busy bandwidth over its quiet one, at the same nodes and the same size.

    Latency is the same in all three and cancels as far as it can; the message is too small (256 MB) for more.
    """
    table_rows = list(csv.DictReader(path.open()))
    values = {
        (row["collective"], METRICS[row["metric"].split("_")[0]]): {
            int(name.removeprefix("nodes_")): float(text) for name, text in row.items() if name.startswith("nodes_")
        }
        for row in table_rows
    }
    cloud, rows = table["cloud"], []
    for collective in sorted({name for name, _ in values}):
        for nodes, quiet in values[collective, "quiet"].items():
            if nodes < 2:
                continue
            share = {load: (1 + cloud["quiet"] * np.log2(nodes)) / (1 + cloud[load] * np.log2(nodes)) for load in cloud}
            seen = {load: values[collective, load][nodes] / quiet for load in get_args(Load)}
            rows.append(
                {
                    "collective": collective,
                    "nodes": nodes,
                    "typical_error": round(float(share["typical"] / seen["typical"] - 1), 2),
                    "busy_error": round(float(share["busy"] / seen["busy"] - 1), 2),
                    "typical_in_band": bool(share["busy"] <= seen["typical"] <= 1),
                }
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, help="h100_cluster_bandwidth.csv: the sweep that is left out")
    given = parser.parse_args()
    document = json.loads((HERE / "sweeps.json").read_text())
    kept = [source for source in document["sources"] if source["name"] != document["left_out"]]
    table = fit(kept)
    result: dict[str, Any] = {"fall": table, "sources": left_in(kept, table)}
    if given.judge is not None:
        result["left_out"] = judged(given.judge, table)
    else:
        result["left_out"] = json.loads((HERE / "fit.json").read_text())["left_out"]
    (HERE / "fit.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    where = "backbeat/model/topology.py"
    print(f"as in {where}" if table == FALL else f"{where} differs: copy `fall` there")
