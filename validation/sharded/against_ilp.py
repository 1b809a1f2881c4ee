"""Units by the objective of PyTorch's removed `fsdp_ilp.py`, beside `sharded`, both predicted by backbeat.

    python validation/sharded/against_ilp.py [-o FILE]

That programme (pytorch pull request 138635, removed since) marks modules as units, never several in one, and leaves the
rest to the root. All units reshard. Collectives are affine. It minimises what it calls exposed time,

    sum over units of  max(0, gather of the next - own forward) + max(0, gather of the one before + scatter of the next
    - own backward)  +  gather and scatter of the root and of the first unit,

while the peak, taken as the largest sum of shards, one unit whole and its activations, and twice the largest unit,
stays in a budget. Here the same objective is minimised exactly over the repeated blocks, by a programme over pairs of
neighbouring units; costs are lines through the network's own times. Memory is left free on both sides.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backbeat.api import plan, predict
from backbeat.model import Network, Profile
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.shard_problem import ShardChoice, ShardProblem
from backbeat.planners.unit_programme import Atoms

MODELS = (
    "bert-base-b64-bf16-adamw-h200",
    "bert-large-b64-bf16-adamw-h200",
    "gpt2-b8-bf16-adamw-h200",
    "gpt2-medium-b8-bf16-adamw-h200",
    "vit-b-b64-bf16-adamw-h200",
    "llama-1b-b4-bf16-adamw-h200",
    "llama-8b-b1-bf16-adamw-h200",
)
NETWORKS = (("25gbe", 8), ("ib400", 16), ("nvlink-ib400", 64), ("aws-p5", 64))


def chosen(atoms: Atoms, gather: np.ndarray, scatter: np.ndarray, root: tuple[float, float]) -> list[int]:
    """The atoms that are units. `gather` and `scatter` are of each as a unit; `root` is the root's gather and scatter
    for every element that it holds."""
    count = len(atoms.elements)
    left = atoms.elements * sum(root)

    def around(before: int, one: int, after: int) -> float:
        """What is exposed beside a unit; -1 is before the first, `count` behind the last."""
        ahead = gather[after] if after < count else 0.0
        back = (gather[before] if before >= 0 else 0.0) + (scatter[after] if after < count else 0.0)
        return max(0.0, ahead - atoms.forward_s[one]) + max(0.0, back - atoms.backward_s[one])

    # best[j][k]: units up to j, and k the next; what j exposes is counted, and what is left to the root between them.
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for one in range(count):
        for after in range(one + 1, count + 1):
            skipped = float(left[one + 1 : after].sum())
            first = float(left[:one].sum()) + gather[one] + scatter[one] + around(-1, one, after)
            found = [(first + skipped, [one])]
            for before in range(one):
                known, units = best[before, one]
                found.append((known + around(before, one, after) + skipped, [*units, one]))
            best[one, after] = min(found)
    nothing = (float(left.sum()), [])
    return min(nothing, *(best[one, count] for one in range(count)))[1]


def compare(profile: Profile, network: Network) -> dict[str, Any]:
    problem = ShardProblem(profile, network, StrategyOptions())
    base = ShardChoice(ends=tuple(range(1, len(problem.stock) + 1)), shard=network.workers)
    problem.names = problem.stock
    atoms, cost = problem.atoms(base), problem.cost(network.workers)
    sizes = atoms.elements * cost.param_bytes, atoms.elements * cost.reduce_bytes
    gather, scatter = cost.gather.time(sizes[0]), cost.scatter.time(sizes[1])
    root = (cost.gather.link_s_per_byte * cost.param_bytes, cost.scatter.link_s_per_byte * cost.reduce_bytes)
    units = chosen(atoms, gather, scatter, root)
    stock = plan(profile, network, "fsdp")
    sharding = stock.sharding
    assert sharding is not None
    mine = msgspec.structs.replace(sharding, units=tuple(sharding.units[index] for index in units))
    made = msgspec.structs.replace(stock, sharding=mine, predicted=None)
    planned = plan(profile, network, "sharded")
    times = {name: predict(profile, network, one).iteration_s
             for name, one in (("fsdp", stock), ("ilp", made), ("sharded", planned))}  # fmt: skip
    return {
        "profile": profile.name,
        "network": network.name,
        "workers": network.workers,
        "blocks": len(sharding.units),
        "ilp_units": len(units),
        "sharded_units": len(planned.sharding.units) if planned.sharding else 0,
        **{f"{name}_s": seconds for name, seconds in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    rows = []
    print(f"{'profile':32} {'network':14} blocks  ILP ours  FSDP ms   ILP ms  ours ms")
    arguments = parser.parse_args()
    for name, (network, workers) in product(MODELS, NETWORKS):
        row = compare(Profile.load(name), Network.load(network).at(workers=workers))
        rows.append(row)
        print(
            f"{name:32} {network:14} {row['blocks']:6} {row['ilp_units']:4} {row['sharded_units']:4} "
            f"{row['fsdp_s'] * 1e3:8.1f} {row['ilp_s'] * 1e3:8.1f} {row['sharded_s'] * 1e3:8.1f}",
            flush=True,
        )
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    gains = np.array([row["ilp_s"] / row["sharded_s"] - 1 for row in rows])
    print(f"the ILP's units take longer than ours by {np.median(gains):.1%} in the median, {gains.max():.1%} at most, "
          f"{gains.min():.1%} at least")  # fmt: skip


if __name__ == "__main__":
    main()
