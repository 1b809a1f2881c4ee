"""What rows of BERT-Large in a budget say about the host, which is the limit there. Measures nothing.

    python validation/memory/host_rows.py

A row's time is put together from other rows of the same run: a step of the wrapper with top-k buckets, and for each
block that is not kept what torch's own checkpointing adds for one of the layers; beside it, with what the profile says
that recomputing costs. No figure is fitted.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from backbeat.model import Profile

HERE = Path(__file__).parent
LAYERS = 24
"""What `checkpoint every block` of the runs recomputes: the layers of BERT-Large."""


def budgets(run: str) -> None:
    rows = json.loads((HERE / run / "bert_large.json").read_text())["rows"]
    profile = Profile.load(HERE / run / "bert_large.profile.json")
    wrapped = statistics.mean(row["host_ms"] for name, row in rows.items() if name.startswith("top-k buckets, updates"))
    layer = (rows["checkpoint every block (torch)"]["host_ms"] - rows["plain"]["host_ms"]) / LAYERS
    said = None if profile.host_recompute_s is None else profile.host_recompute_s * 1e3 / len(profile.blocks)
    print(f"{run}: wrapped {wrapped:.1f} ms; a block {layer:.2f} ms more by torch's checkpointing, ", end="")
    print("not in the profile" if said is None else f"{said:.2f} by the profile")
    for name, row in rows.items():
        if "actions" not in row:
            continue
        changed = sum(count for what, count in row["actions"].items() if what != "keep")
        parts = [(wrapped + changed * each, how) for each, how in ((layer, "torch"), (said, "profile")) if each]
        print(f"  {name:42} {changed:3} blocks {row['ms']:7.1f} ms", end="")
        print("".join(f"  {how} {total:6.1f} ({total / row['ms'] - 1:+.0%})" for total, how in parts))


def main() -> None:
    for run in ("cuda-graphs", "exact-selection"):
        budgets(run)


if __name__ == "__main__":
    main()
