"""Fit how a collective's bandwidth falls with the number of nodes, by kind of fabric and load, on published sweeps.

    python validation/published/fabric/fit.py        # prints `FALL` of backbeat/model/topology.py

The source that is left out judges the fit: README.md has how far off it is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np

from backbeat.model.topology import FabricKind, Load

SWEEPS = Path(__file__).with_name("sweeps.json")


def fitted(sources: list[dict[str, Any]], kind: str, load: str) -> float | None:
    """The fall that fits the logarithms of the shares best; sources count alike, however many rows they have."""
    candidates = np.concatenate([[0.0], np.geomspace(1e-4, 10, 4001)])
    loss = np.zeros_like(candidates)
    for source in sources:
        rows = [row for row in source.get("rows", ()) if source["kind"] == kind and row["load"] == load]
        for row in rows:
            loss += (np.log(row["share"]) + np.log1p(candidates * np.log2(row["nodes"]))) ** 2 / len(rows)
    return float(candidates[np.argmin(loss)]) if loss.any() else None


def fit() -> dict[str, dict[str, float]]:
    """Falls rise with the load: one with no observation takes the calmer load's."""
    document = json.loads(SWEEPS.read_text())
    kept = [source for source in document["sources"] if source["name"] != document["left_out"]]
    table: dict[str, dict[str, float]] = {}
    for kind in get_args(FabricKind):
        least, table[kind] = 0.0, {}
        for load in get_args(Load):
            found = fitted(kept, kind, load)
            least = max(least, round(found, 3)) if found is not None else least
            table[kind][load] = least
    return table


if __name__ == "__main__":
    print(json.dumps(fit(), indent=1))
