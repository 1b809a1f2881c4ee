"""How far `best` is from the lower bound, and what each strategy costs beside it, over the zoo.

    python validation/planners/gap.py

Every bundled bf16 profile, every bundled network, 8 to 512 workers. Under the model: nothing here is a measurement of a
cluster. Writes gap.json beside this file.
"""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path

import backbeat as bb
from backbeat.model.files import bundled

STRATEGIES = ("wfbp", "single", "ddp", "horovod", "mg-wfbp", "asc-wfbp", "adaptive", "optimal", "best", "decoupled")
WORKERS = (8, 64, 512)


def main() -> None:
    gaps: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    over_best: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for model in (name for name in bundled(bb.Profile) if "-bf16-" in name):
        profile = bb.Profile.load(model)
        for name in bundled(bb.Network):
            for workers in WORKERS:
                network = bb.Network.load(name).at(workers=workers)
                results = {strategy: bb.predict(profile, network, strategy) for strategy in STRATEGIES}
                for strategy, result in results.items():
                    gaps[strategy].append(result.gap)
                    over_best[strategy].append(result.iteration_s / results["best"].iteration_s - 1)
    rows = {
        strategy: {
            "cases": len(gaps[strategy]),
            "gap_mean": round(statistics.mean(gaps[strategy]), 5),
            "gap_worst": round(max(gaps[strategy]), 5),
            "over_best_mean": round(statistics.mean(over_best[strategy]), 5),
            "over_best_worst": round(max(over_best[strategy]), 5),
        }
        for strategy in STRATEGIES
    }
    data = {
        "command": "python validation/planners/gap.py",
        "date": datetime.date.today().isoformat(),
        "what": "predicted iteration over the strategy's own bound, and over `best`; shares, not per cent",
        "strategies": rows,
    }
    Path(__file__).with_name("gap.json").write_text(json.dumps(data, indent=1) + "\n")
    for strategy, row in rows.items():
        print(
            f"{strategy:<10} over bound {row['gap_mean']:7.2%} mean {row['gap_worst']:7.2%} worst; "
            f"over best {row['over_best_mean']:7.2%} mean {row['over_best_worst']:7.2%} worst"
        )


if __name__ == "__main__":
    main()
