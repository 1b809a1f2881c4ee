"""What a step takes as a graph of operations, built and run; against the recursion of one communicator, and
pipelines against their middle simulated once.

    python -m benchmarks.engine

Both sides take turns in one run. `ops` are those of the graph; `built` is the share of its time that building takes.
A band is three runs of one graph, and three whole simulations on the other side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from backbeat import plan
from backbeat.cost import LinkCost
from backbeat.engine import Graph, SharedLink, run
from backbeat.model import Network, Profile
from backbeat.model.profile import device_alone
from backbeat.model.slowdown import slowdown_of
from backbeat.steps.bucket_graph import BucketStep, bucket_graph
from backbeat.steps.model_chain import ShardedChain, chain_of
from backbeat.steps.pipeline import run_pipeline
from backbeat.steps.schedule import Schedule, one_by_one
from backbeat.steps.stage_graph import StageTimes, stage_graph
from backbeat.steps.unit_graph import ShardedCost, UnitSteps
from benchmarks.harness import machine

REPEATS = 20


def compared(name: str, simulate: Callable[[], object] | None, build: Callable[[], Graph], runs: int = 1) -> None:
    def engine() -> None:
        graph = build()
        for _ in range(runs):
            run(graph)

    def simulator() -> None:
        for _ in range(runs):
            if simulate is not None:
                simulate()

    sides = (simulator, engine, build)
    taken: list[list[float]] = [[], [], []]
    for _ in range(REPEATS):
        for side, times in zip(sides, taken, strict=True):
            start = time.perf_counter()
            side()
            times.append(time.perf_counter() - start)
    old, new, built = (min(times) for times in taken)
    graph = build()
    other = "" if simulate is None else f"simulator {old * 1e3:8.3f} ms  ratio {new / old:5.2f}"
    print(f"  {name:<44} {len(graph):>6} ops  engine {new * 1e3:8.3f} ms  built {built / new:4.0%}  {other}")


def buckets(name: str, cluster: str, gpus: int, ways: tuple[tuple[str, int | None], ...]) -> None:
    profile = Profile.load(name)
    network = Network.load(cluster).at(workers=gpus)
    cost = network.cost
    for way, communicators in ways:
        made = plan(profile, network, way, communicators=communicators)
        schedule, _ = Schedule.of_plan(profile, made)
        for slowdown in (1.0, 1.2):

            def build(schedule: Schedule = schedule, slowdown: float = slowdown) -> Graph:
                step = BucketStep(
                    schedule=schedule,
                    times=cost.times(schedule.sizes),
                    link=SharedLink.of(cost),
                    forward_s=profile.forward_s,
                    backward_s=profile.backward_s,
                    update_s=profile.update_s,
                    slowdowns={"network": slowdown},
                )
                return bucket_graph(step).graph

            word = f"{way} of {profile.model} on {made.communicators}" + (", contended" if slowdown > 1 else "")
            recursion = slowdown == 1 and made.communicators == 1
            simulate = partial(_recursion, schedule, cost) if recursion else None
            compared(word, simulate, build)
            if way == "ddp":
                compared(f"  band of {word}", simulate, build, runs=3)


def _recursion(schedule: Schedule, cost: LinkCost) -> None:
    one_by_one(schedule.ready, cost.times(schedule.sizes))


def units(name: str, cluster: str, gpus: int, ways: tuple[str, ...]) -> None:
    profile = device_alone(Profile.load(name))
    network = Network.load(cluster).at(workers=gpus)
    factor = slowdown_of(profile, network, sharded=True).factor
    for way in ways:
        chain = chain_of(profile, plan(profile, network, way))
        cost = ShardedCost.of(profile, network, chain.sharding)
        for slowdown in (1.0, factor):
            word = f"{way} of {profile.model}" + (", contended" if slowdown > 1 else "")
            build = partial(_graph, chain, cost, slowdown)
            compared(word, None, build)
            compared(f"  band of {word}", None, build, runs=3)


def _graph(chain: ShardedChain, cost: ShardedCost, slowdown: float) -> Graph:
    steps = UnitSteps(chain, cost, 1e-3, slowdown=slowdown)
    steps.add()
    return steps.graph


def stages() -> None:
    for schedule, count, micro_batches, chunks in (
        ("1f1b", 8, 64, 1), ("interleaved", 8, 64, 2), ("zero-bubble", 8, 64, 1), ("1f1b", 16, 256, 1),
    ):  # fmt: skip
        times = [StageTimes(1.0 + 0.01 * index, 1.1, 0.9) for index in range(count * chunks)]

        def build(schedule=schedule, count=count, micro_batches=micro_batches, times=times) -> Graph:  # type: ignore[no-untyped-def]
            return stage_graph(schedule, count, micro_batches, times, 0.01).graph

        name = f"{schedule}, {count} stages, {micro_batches} micro-batches"
        middle = partial(run_pipeline, schedule, count, micro_batches, times, 0.01, listed=False)  # type: ignore[arg-type]
        compared(name, middle, build)


if __name__ == "__main__":
    print(machine())
    print("buckets")
    ways = (("ddp", None), ("best", None), ("wfbp", None), ("wfbp", 2))
    buckets("resnet50-b64-bf16-h200", "100gbe", 64, ways)
    buckets("llama-8b-b1-bf16-adamw-h200", "aws-p5en", 64, (("ddp", None),))
    print("units")
    units("llama-8b-b1-bf16-adamw-h200", "aws-p5en", 64, ("fsdp", "hsdp:8"))
    print("pipelines")
    stages()
