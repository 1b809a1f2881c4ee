"""How far `best` is from the lower bound, and what each strategy costs beside it.

    python validation/planners/gap.py [--lab]

Every bundled bf16 profile, every bundled network, 8 to 512 workers. With `--lab` only six models on the networks that
were calibrated in the lab, whose curves, back-to-back times and concurrency are measured, at 4 and 8 workers: there the
bound is compared with a plain one that counts the least latency and the least link time per byte, and both with the
fastest of all plans of the same models cut into seven gradients. Under the model: nothing here is a measurement of a
cluster. Writes gap.json or gap-lab.json beside this file.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import msgspec
import numpy as np

import backbeat as bb
from backbeat.cost.bound import communication_bound
from backbeat.model.files import bundled
from backbeat.planners.draft import Draft

STRATEGIES = ("wfbp", "single", "ddp", "horovod", "mg-wfbp", "asc-wfbp", "adaptive", "optimal", "best")
WORKERS = (8, 64, 512)
LAB = ("lab", "simultaneous")
LAB_MODELS = tuple(
    f"{name}-bf16-h200"
    for name in (
        "resnet50-b64",
        "vgg16-b64",
        "densenet121-b64",
        "efficientnet-b0-b64",
        "bert-base-b64",
        "gpt2-medium-b8",
    )
)
LAB_WORKERS = (4, 8)
FEW = 7
"""Gradients of a problem small enough to try every plan on two communicators."""


def lab_networks() -> Iterator[tuple[str, bb.Network]]:
    """Every calibration on record, once."""
    seen = set()
    for path in (path for folder in LAB for path in sorted((Path(__file__).parents[1] / folder).glob("*.json"))):
        record = json.loads(path.read_text())
        for number, session in enumerate(record.get("sessions", ()) if isinstance(record, dict) else ()):
            network = msgspec.convert(session["network"], bb.Network)
            key = msgspec.json.encode((network.all_reduce, network.concurrency))
            if key not in seen:
                seen.add(key)
                yield f"{path.parent.name}/{path.stem} session {number + 1}", network


def plain_bound(profile: bb.Profile, network: bb.Network, communicators: int) -> float:
    """The end of communication by the least latency and the least link time per byte of any message."""
    cost, sizes = network.cost, profile.sizes
    latency, per_byte = cost.cheapest(float(sizes.min()), float(sizes.sum()))
    remaining = np.cumsum(sizes[::-1])[::-1]
    return float((profile.ready + latency + per_byte / cost.best_efficiency(communicators) * remaining).max())


def cut(profile: bb.Profile) -> bb.Profile:
    """The model with neighbouring gradients joined, so that every plan can be tried."""
    gradients = []
    for part in np.array_split(np.arange(len(profile.gradients)), FEW):
        members = [profile.gradients[index] for index in part]
        size = sum(member.bytes for member in members)
        gradients.append(msgspec.structs.replace(members[-1], bytes=size, forward_s=None, activation_bytes=None))
    return msgspec.structs.replace(
        profile, gradients=tuple(gradients), blocks=(), memory=None, iteration_s=(), buffer_bytes=0
    )


def every_end(profile: bb.Profile, network: bb.Network) -> Iterator[float]:
    count = len(profile.gradients)
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            for others in product((0, 1), repeat=cuts):
                yield Draft([*inner, count], 2, [0, *others]).end_s(profile, network.cost)


def lab() -> None:
    rows: dict[str, list[float]] = {
        name: [] for name in ("best, plain bound", "best", "optimal, plain bound", "optimal")
    }
    few: dict[str, list[float]] = {"fastest, plain bound": [], "fastest": [], "best over fastest": []}
    worst: list[tuple[float, str]] = []
    for name, calibrated in lab_networks():
        for workers, model in product(LAB_WORKERS, LAB_MODELS):
            network, profile = calibrated.at(workers=workers), bb.Profile.load(model)
            for strategy in ("best", "optimal"):
                result = bb.predict(profile, network, strategy)
                lower = result.bound_s - _iteration(
                    profile, communication_bound(profile.ready, profile.sizes, network.cost, result.communicators)
                )
                plain = lower + _iteration(profile, plain_bound(profile, network, result.communicators))
                rows[strategy].append(result.gap)
                rows[f"{strategy}, plain bound"].append(result.iteration_s / plain - 1)
                worst.append((result.gap, f"{strategy}, {model}, {name}, {workers} workers"))
            small = cut(profile)
            fastest = _iteration(small, min(every_end(small, network)))
            few["fastest"].append(
                fastest / _iteration(small, communication_bound(small.ready, small.sizes, network.cost, 2)) - 1
            )
            few["fastest, plain bound"].append(fastest / _iteration(small, plain_bound(small, network, 2)) - 1)
            made = bb.plan(small, network, "best", communicators=2)
            few["best over fastest"].append(bb.predict(small, network, made).iteration_s / fastest - 1)
    found = {
        name: {"cases": len(values), "mean": round(statistics.mean(values), 5), "worst": round(max(values), 5)}
        for name, values in (*rows.items(), *((f"seven gradients: {name}", values) for name, values in few.items()))
    }
    data = {
        "command": "python validation/planners/gap.py --lab",
        "date": datetime.date.today().isoformat(),
        "what": "predicted iteration over the bound; shares, not per cent",
        "rows": found,
        "largest": [[round(gap, 5), case] for gap, case in sorted(worst, reverse=True)[:5]],
    }
    Path(__file__).with_name("gap-lab.json").write_text(json.dumps(data, indent=1) + "\n")
    for name, row in found.items():
        print(f"{name:<40} {row['cases']:4} cases {row['mean']:7.2%} mean {row['worst']:7.2%} worst")


def _iteration(profile: bb.Profile, end: float) -> float:
    return profile.forward_s + max(end, profile.backward_s) + profile.update_s


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
    lab() if "--lab" in sys.argv else main()
