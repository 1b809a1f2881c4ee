"""Bundled clusters, quiet, against published sweeps over message sizes.

    python validation/published/fabric/presets.py

The presets' latencies and efficiencies are read off such sweeps, these among them: this says how well one formula
follows them all, not how well it predicts. Writes `presets.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from backbeat.cost.collectives import bus_bandwidth
from backbeat.model import Network

HERE = Path(__file__).resolve().parent


def errors(preset: str, workers: int, published: list[tuple[int, float]]) -> list[float]:
    """Bus bandwidth of the quiet preset over the published, less one, by size."""
    curve = Network.load(preset).at(workers=workers, load="quiet").all_reduce.curve
    ours = [bus_bandwidth("all_reduce", workers, size, float(curve.time([size])[0])) / 8e9 for size, _ in published]
    return [round(one / seen - 1, 2) for one, (_, seen) in zip(ours, published, strict=True)]


if __name__ == "__main__":
    rows = []
    for sweep in json.loads((HERE / "sizes.json").read_text())["sweeps"]:
        found = errors(sweep["preset"], sweep["workers"], sweep["gb_s"])
        sizes = [f"{size >> 20} MiB" for size, _ in sweep["gb_s"]]
        rows.append(
            {"preset": sweep["preset"], "workers": sweep["workers"], "error": dict(zip(sizes, found, strict=True))}
        )
        print(sweep["preset"], sweep["workers"], rows[-1]["error"])
    every = [abs(error) for row in rows for error in row["error"].values()]
    print(f"median {median(every):.2f}, largest {max(every):.2f} of {len(every)}")
    (HERE / "presets.json").write_text(json.dumps({"rows": rows, "median": median(every)}, indent=1) + "\n")
