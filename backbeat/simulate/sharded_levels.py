"""Device memory over a sharded step, by kind, in time: `sharded_memory` at every block, where `sharded_step` puts it.

Between two blocks the copies run: what they hold at most is a level of its own, from the end of one block to the start
of the next. The highest level is the peak of `sharded_memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from backbeat.model import Network, Plan, Profile
from backbeat.simulate.contention import slowdown_of
from backbeat.simulate.memory_timeline import Phase
from backbeat.simulate.resident_memory import ResidentMemory
from backbeat.simulate.sharded_cost import ShardedCost
from backbeat.simulate.sharded_memory import (
    MOST_MICRO_BATCHES,
    Activations,
    Kinds,
    always_held,
    step_moments,
    tied_block,
)
from backbeat.simulate.sharded_step import run_step
from backbeat.simulate.sharded_units import ShardedChain, chain_of
from backbeat.simulate.stream_engine import COMPUTE


class MemoryLevel(NamedTuple):
    """What the device holds from one moment to another."""

    start_s: float
    end_s: float
    where: str
    """The block, or `copies` between two."""
    phase: Phase
    held: Kinds
    """Bytes by kind, as `ShardedMemory` names them: parameter, optimizer, activation, gathered, …"""

    @property
    def total_bytes(self) -> int:
        return self.held.total()


def memory_levels(profile: Profile, network: Network, plan: Plan, *, micro_batches: int = 1) -> tuple[MemoryLevel, ...]:
    """Every level of the step in order; of many micro-batches the first three. Empty where the profile has no memory
    figures."""
    if profile.memory is None or plan.sharding is None or network.workers == 1:
        return ()
    chain = chain_of(profile, plan)
    shards, count = chain.sharding.mesh.shard, min(micro_batches, MOST_MICRO_BATCHES)
    cost = ShardedCost.of(profile, network, chain.sharding)
    factor = slowdown_of(profile, network, sharded=True).factor
    run = run_step(chain, cost, profile.update_s / shards, micro_batches=count, slowdown=factor)
    parts = iter(
        [
            (start, end)
            for task, call, start, end in zip(run.tasks, run.calls, run.times.starts, run.times.ends, strict=True)
            if task.stream == COMPUTE and call.event in ("forward", "backward")
        ]
    )
    resident = ResidentMemory.of(profile)
    always = always_held(resident, shards)
    activations = Activations(profile, plan, chain, resident)
    levels: list[MemoryLevel] = []
    now = 0.0

    def add(end: float, where: str, phase: Phase, held: Kinds, activation: int) -> None:
        nonlocal now
        levels.append(MemoryLevel(now, end, where, phase, always + held + Counter(activation=activation)))
        now = end

    moments = step_moments(chain, count, tied=tied_block(profile, chain) is not None)
    for moment in moments:
        event = moment.call.event
        phase: Phase = "forward" if event == "forward" else "backward"
        if event == "end":
            add(run.end_s if moment is moments[-1] else now, "copies", phase, moment.before, 0)
            continue
        if event == "loss":
            add(now, "copies", "loss", moment.before, activations.at_loss)
            add(now, "loss", "loss", moment.during, activations.loss_bytes)
            continue
        start, end = next(parts)
        blocks = list(_blocks(chain, moment.call.part, phase))
        first = blocks[0][0] if blocks else None
        add(max(start, now), "copies", phase, moment.before, activations.between(first, phase))
        length, whole = end - start, sum(seconds for _, seconds in blocks)
        for block, seconds in blocks:
            share = seconds / whole if whole > 0 else 1 / len(blocks)
            name, high = activations.at(block, phase)
            add(now + length * share, name, phase, moment.during, high)
        now = max(now, end)
    return tuple(levels)


def _blocks(chain: ShardedChain, index: int, phase: Phase) -> Iterator[tuple[int | None, float]]:
    """The pieces of a part in the order in which they run, with how long each takes."""
    mine = set(chain.parts[index].blocks)
    pieces = [piece for piece in chain.pieces.pieces if piece.block in mine]
    if not pieces:
        yield None, 1.0
        return
    for piece in pieces if phase == "forward" else reversed(pieces):
        yield piece.block, piece.forward_s if phase == "forward" else piece.backward_s
