"""How long a prediction takes: one schedule of 161 gradients at 8 and 2048 workers, and a sweep of 10,000 points.

python benchmarks/predict.py
"""

from __future__ import annotations

import time

import numpy as np

from backbeat import plan, predict
from backbeat.model import Network
from benchmarks.harness import affine, machine, random_profile, seconds

STRATEGIES = ("wfbp", "single", "ddp", "mg-wfbp", "optimal")
WORKERS = (8, 2048)
SCHEDULES = (*((strategy, None) for strategy in STRATEGIES), ("horovod", None), ("asc-wfbp", None), ("wfbp", 2))
"""Strategy and communicators; None is the strategy's own number."""


def one_schedule() -> None:
    profile = random_profile(161)
    base = Network.load("10gbe")
    medians: dict[tuple[str, int], float] = {}
    print("predict() of one ready-made schedule, 161 gradients, stragglers and timeline included")
    for workers in WORKERS:
        network = base.at(workers=workers)
        for strategy, communicators in SCHEDULES:
            made = plan(profile, network, strategy, communicators=communicators)
            median, least = seconds(lambda: predict(profile, network, made), repeats=200)  # noqa: B023
            name = f"{strategy} on {made.communicators}"
            medians[name, workers] = median
            print(
                f"  N = {workers:>4}  {name:<13} {len(made.buckets):>3} buckets  "
                f"median {median * 1e3:.3f} ms  least {least * 1e3:.3f} ms"
            )
    print(f"  slowest median: {max(medians.values()) * 1e3:.3f} ms (wanted: at most 1 ms)")
    same = [name for name, workers in medians if workers == WORKERS[0]]
    ratios = [medians[name, WORKERS[1]] / medians[name, WORKERS[0]] for name in same]
    print(f"  time at N = 2048 over time at N = 8, same strategy: {min(ratios):.2f} to {max(ratios):.2f}")


def sweep() -> None:
    """Each point is a network of its own: moved to N workers, planned for and predicted."""
    profile = random_profile(161)
    workers = [4 * 2**step for step in range(10)]
    slopes = np.geomspace(1e-11, 1e-8, 200).tolist()
    start = time.perf_counter()
    points = 0
    for slope in slopes:
        base = affine(6e-4, slope)
        for count in workers:
            network = base.at(workers=count)
            for strategy in STRATEGIES:
                predict(profile, network, strategy)
                points += 1
    taken = time.perf_counter() - start
    print(f"sweep of {points} (N, strategy, bandwidth) points, each planned and predicted: {taken:.1f} s")


if __name__ == "__main__":
    print(machine())
    one_schedule()
    sweep()
