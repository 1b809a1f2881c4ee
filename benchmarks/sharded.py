"""How long it takes to plan a sharded job, beside trying every way to cut its blocks into units, and beside one
prediction.

    python benchmarks/sharded.py

Both sides see the same blocks on the same network. `every cut` simulates all units that 10 blocks allow, on one mesh
and with units freed after forward; `programme` finds the same units. `plan()` chooses mesh, resharding, prefetch and
recomputation as well, and fits them into memory: the device's, then nine tenths of what FSDP takes.
"""

from __future__ import annotations

from itertools import combinations, product
from time import process_time

import msgspec

from backbeat import plan, predict
from backbeat.model import Gradient, Network, Profile
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.shard_problem import ShardChoice, ShardProblem
from backbeat.planners.unit_programme import unit_ends
from benchmarks.harness import machine, seconds

NETWORKS = (("25gbe", 8), ("ib400", 64), ("aws-p5", 64))
BUDGETS = (None, 0.9)
"""Of the peak of FSDP; None: what the device has."""


def deep(count: int) -> Profile:
    """The measured Llama 8B with this many layers, each with the computation of 32 / `count` of a real one."""
    llama = Profile.load("llama-8b-b1-bf16-adamw-h200")
    share = 32 / count
    layer = next(block for block in llama.blocks if block.name == "model.layers.0")
    sizes = [gradient.bytes for gradient in llama.gradients if gradient.name.startswith("model.layers.0.")]
    layers = [
        msgspec.structs.replace(
            layer,
            name=f"model.layers.{index}",
            forward_s=layer.forward_s * share,
            backward_s=layer.backward_s * share,
            saved_bytes=int(layer.saved_bytes * share),
            forward_peak_bytes=int(layer.forward_peak_bytes * share),
        )
        for index in range(count)
    ]
    blocks, own = [], {}
    for block in llama.blocks:
        if not block.name.startswith("model.layers."):
            blocks.append(block)
            own[block.name] = [g.bytes for g in llama.gradients if g.name.startswith(f"{block.name}.")]
        elif block.name == "model.layers.0":
            blocks += layers
            own |= {one.name: [int(size * share) for size in sizes] for one in layers}
    gradients, now = [], 0.0
    for block in reversed(blocks):
        now += block.backward_s
        gradients += [
            Gradient(name=f"{block.name}.w{index}", bytes=size, ready_s=now)
            for index, size in enumerate(own[block.name])
        ]
    forward_s = sum(block.forward_s for block in blocks)
    return msgspec.structs.replace(
        llama, blocks=tuple(blocks), gradients=tuple(gradients), forward_s=forward_s, backward_s=now
    )


def beside_every_cut() -> None:
    problem = ShardProblem(deep(8), Network.load("ib400").at(workers=64), StrategyOptions())
    count, cost = len(problem.names), problem.cost(64)
    cuts = [(*inner, count) for size in range(count) for inner in combinations(range(1, count), size)]
    every, _ = seconds(lambda: [problem.seconds(ShardChoice(ends=ends, shard=64)) for ends in cuts], repeats=1)
    atoms = problem.atoms(ShardChoice(ends=(count,), shard=64))
    programme, _ = seconds(lambda: unit_ends(atoms, cost, reshard=True), repeats=5)
    print(f"{count} blocks: every cut ({len(cuts)}) {every:.2f} s, programme {programme * 1e3:.0f} ms, "
          f"every cut/programme {every / programme:.0f}")  # fmt: skip


def large() -> None:
    print("plan() and predict() in seconds of CPU time; again: blocks recomputed")
    print("blocks  network  budget   plan()  predict()  plan()/predict()  units  kept  again  over bound  FSDP/planned")
    for count, (name, workers), share in product((32, 100, 1000), NETWORKS, BUDGETS):
        profile, network = deep(count), Network.load(name).at(workers=workers)
        stock = plan(profile, network, "fsdp")
        usual = predict(profile, network, stock)
        budget = None if share is None else int(share * (usual.peak_bytes or 0))
        began = process_time()
        made = plan(profile, network, "sharded", memory=budget)
        planned = process_time()
        result = predict(profile, network, made)
        one = process_time() - planned
        whole = planned - began
        assert made.sharding is not None
        units = made.sharding.units
        kept, again = sum(not unit.reshard for unit in units), len(made.memory.segments) if made.memory else 0
        print(
            f"{count:6}  {name:7}  {'device' if share is None else f'{share:6.0%}'}  {whole:7.1f}  {one:9.3f}  "
            f"{whole / one:16.0f}  {len(units):5}  {kept:4}  {again:5}  {result.gap:10.1%}  "
            f"{usual.iteration_s / result.iteration_s:12.3f}",
            flush=True,
        )


if __name__ == "__main__":
    print(machine())
    beside_every_cut()
    large()
