"""Device memory of a sharded step, by kind: at its highest moment, and in time.

Counted in the order in which the host issues work, as the device's allocator counts it:

- Shards of parameters and optimizer state are there all the time. A shard of a unit's gradients comes with its
  reduce-scatter and stays until the step ends.
- An all-gather takes a buffer for the whole unit, a copy-out the unit's parameters themselves. In forward the buffer is
  freed at the next copy-out, in backward at once. Parameters are freed where they are resharded, and after backward.
- Backward takes a unit's whole gradients, in the parameters' dtype. They go when the reduce-scatter's input, in the
  reduce dtype, is filled; that goes when its turn to be waited for comes. Gradients that are not reduced in this
  micro-batch stay whole, in the reduce dtype.
- Activations are kept, recomputed or offloaded block by block, as `memory_timeline` counts them. Those of a profile
  without blocks are taken to be there all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from backbeat.model import MemoryPlan, Network, Plan, Profile
from backbeat.model.blocks import ranges_of
from backbeat.model.profile import DTYPE_BYTES, ELEMENT_BYTES
from backbeat.model.slowdown import slowdown_of
from backbeat.steps.memory_timeline import Chain, Phase, Tally
from backbeat.steps.resident_memory import ResidentMemory
from backbeat.steps.sharded_activations import sharded_activations, tied_block
from backbeat.steps.sharded_cost import ShardedCost
from backbeat.steps.sharded_units import ROOT, ShardedChain, chain_of
from backbeat.steps.unit_graph import Call, calls
from backbeat.steps.unit_step import run_step

MOST_MICRO_BATCHES = 3
"""Those after the second hold what the second holds."""


BytesByKind = Counter[str]
"""Bytes by kind. All the time: this rank's shards, `parameter` and `optimizer`; `other`, that is module buffers, the
batch, workspaces and tensors outside the blocks. Then `gradient`, shards of gradients that are reduced already;
`gathered`, parameters of units that are whole; `gather_buffer`, `whole_gradient`, `scatter_input`; and `activation`,
with what operations need beside them."""


class MemoryLevel(NamedTuple):
    """What the device holds at one moment, or from one to another."""

    where: str
    """The block, `loss`, or `copies` between two blocks."""
    phase: Phase
    held: BytesByKind
    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.held.total()


def always_held(resident: ResidentMemory, shards: int) -> BytesByKind:
    """What is there all the time: shards, and what is not sharded."""
    return Counter(
        parameter=-(-resident.parameter_bytes // shards),
        optimizer=-(-resident.optimizer_bytes // shards),
        other=resident.buffer_bytes + resident.batch_bytes + resident.outside_bytes,
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at one part of forward or backward, between the two, or at the end of a micro-batch."""

    call: Call
    before: BytesByKind
    """The most between the part before it and this one."""
    during: BytesByKind


def sharded_memory(
    profile: Profile, plan: Plan, *, micro_batches: int = 1, chain: ShardedChain | None = None
) -> MemoryLevel | None:
    """The highest level; None where the profile has no memory figures. `chain`: the profile in the plan's units, where
    it is known."""
    if profile.memory is None:
        return None
    chain = chain or chain_of(profile, plan)
    resident = ResidentMemory.of(profile)
    count, tied = min(micro_batches, MOST_MICRO_BATCHES), tied_block(profile, chain) is not None
    levels = _levels(chain, step_moments(chain, count, tied=tied), Activations(profile, plan, chain, resident))
    most, activation, where, phase = max(levels, key=lambda level: level[0].total() + level[1])
    held = always_held(resident, chain.sharding.mesh.shard)
    held.update(most, activation=activation)
    return MemoryLevel(where, phase, held)


class _Held:
    """What is held of every unit, by kind, with running totals."""

    def __init__(self) -> None:
        self.totals: BytesByKind = Counter()
        self._parts: dict[tuple[str, int | None], int] = {}
        self.most: BytesByKind = Counter()
        """The highest since the last part."""

    def put(self, kind: str, unit: int, size: int) -> None:
        self.take(kind, unit)
        self._parts[kind, unit] = size
        self.totals[kind] += size
        if self.totals.total() > self.most.total():
            self.most = self.totals.copy()

    def take(self, kind: str, unit: int | None) -> None:
        self.totals[kind] -= self._parts.pop((kind, unit), 0)

    def moment(self, call: Call) -> Moment:
        before, self.most = self.most, self.totals.copy()
        return Moment(call, before, self.totals.copy())


def step_moments(chain: ShardedChain, micro_batches: int, *, tied: bool) -> list[Moment]:
    """What is held at every part, in order of issue. `tied`: the last part makes all gradients of the root."""
    sharding = chain.sharding
    param, reduced = DTYPE_BYTES[sharding.param_dtype], DTYPE_BYTES[sharding.reduce_dtype]
    gradients = [part.elements for part in chain.parts]
    if tied:
        gradients = [0 if one.unit == ROOT else one.elements for one in chain.parts]
        gradients[-1] = chain.elements[ROOT]
    indices: dict[int, list[int]] = {ROOT: []}
    for index, part in enumerate(chain.parts):
        indices.setdefault(part.unit, []).append(index)
    held = _Held()
    moments: list[Moment] = []
    forward, number = True, 0
    buffer: int | None = None  # in forward: the unit whose gathered buffer is still there
    for call in calls(chain, micro_batches):
        event, unit = call.event, call.unit
        elements = chain.elements[unit]
        if event == "begin":
            forward, number = True, number + 1
        elif event == "all_gather":
            held.put("gather_buffer", unit, elements * param)
        elif event == "copy_out":
            held.take("gather_buffer", buffer)
            held.put("gathered", unit, elements * param)
            if forward:
                buffer = unit
            else:
                held.take("gather_buffer", unit)
        elif event == "to_backward":
            held.take("gather_buffer", buffer)
            forward, buffer = False, None
        elif event in ("loss", "forward"):
            moments.append(held.moment(call))
        elif event == "free":
            held.take("gathered", unit)
        elif event == "backward":
            later = sharding.gradient_sync == "last" and number < micro_batches
            before = reduced if sharding.gradient_sync == "last" and number > 1 else 0
            held.put("whole_gradient", call.part, gradients[call.part] * (before + param))
            moments.append(held.moment(call))
            if later:
                held.put("whole_gradient", call.part, gradients[call.part] * reduced)
        elif event == "wait":
            held.take("scatter_input", unit)
        elif event == "reduce_scatter":
            held.put("scatter_input", unit, elements * reduced)
            for index in indices[unit]:
                held.take("whole_gradient", index)
            held.put("gradient", unit, -(-elements * ELEMENT_BYTES // sharding.mesh.shard))
        elif event == "end":
            for one in (ROOT, *range(chain.count)):
                held.take("scatter_input", one)
            moments.append(held.moment(call))
    return moments


class Activations(Tally):
    """The level at every block of forward and backward, and the most above it."""

    __slots__ = ("at_loss", "levels", "loss_bytes", "names")

    def __init__(self, profile: Profile, plan: Plan, chain: ShardedChain, resident: ResidentMemory) -> None:
        super().__init__(0)
        assert profile.memory is not None
        self.names = [block.name for block in profile.blocks]
        self.levels: dict[tuple[str, int], tuple[int, int, Phase]] = {}
        # Without blocks all activations are there all the time.
        constant = 0 if self.names else profile.memory.activation_bytes + resident.loss_bytes
        self.at_loss = self.loss_bytes = constant
        """Kept at the end of forward, and the most at the loss."""
        if self.names:
            blocks = Chain(sharded_activations(profile, chain), resident)
            blocks.run(ranges_of(profile, plan.memory or MemoryPlan()), self)

    def see(self, above: int, block: int, phase: Phase) -> None:
        if phase == "loss":
            self.at_loss, self.loss_bytes = self.level, self.level + above
            return
        key = "forward" if phase == "forward" else "backward", block
        low, high, highest = self.levels.get(key, (0, -1, phase))
        if self.level + above > high:
            high, highest = self.level + above, phase
        self.levels[key] = max(low, self.level), high, highest

    def at(self, block: int | None, phase: Phase) -> tuple[str, int, int]:
        """The block's name, the level before it runs, and the most while it does."""
        if block is None:
            return "the rest", self.at_loss, self.at_loss
        return self.names[block], *self.levels[phase, block][:2]


def _levels(
    chain: ShardedChain, moments: list[Moment], activations: Activations
) -> Iterator[tuple[BytesByKind, int, str, Phase]]:
    """Every level of a step, those between two blocks included: what sharding holds, the bytes of activations beside
    it, and where that is."""
    if not activations.names:
        for held in (one for moment in moments for one in (moment.before, moment.during)):
            yield held, activations.at_loss, "loss", "backward"
        return
    for moment in moments:
        event = moment.call.event
        if event == "end":
            # What is reduced when backward is done has no activations beside it.
            yield moment.before, 0, activations.names[0], "backward"
        elif event == "loss":
            yield moment.before, activations.at_loss, "loss", "loss"
            yield moment.during, activations.loss_bytes, "loss", "loss"
        else:
            for block in chain.parts[moment.call.part].blocks:
                low, high, phase = activations.levels[event, block]
                yield moment.before, low, activations.names[block], phase
                yield moment.during, high, activations.names[block], phase


def memory_levels(profile: Profile, network: Network, plan: Plan, *, micro_batches: int = 1) -> tuple[MemoryLevel, ...]:
    """Every level of the step in order, in time; of many micro-batches the first three. Empty where the profile has no
    memory figures. Between two blocks the copies run: what they hold at most is a level of its own."""
    if profile.memory is None or plan.sharding is None or network.workers == 1:
        return ()
    chain = chain_of(profile, plan)
    shards, count = chain.sharding.mesh.shard, min(micro_batches, MOST_MICRO_BATCHES)
    cost = ShardedCost.of(profile, network, chain.sharding)
    factor = slowdown_of(profile, network, sharded=True).factor
    made, times = run_step(chain, cost, profile.update_s / shards, micro_batches=count, slowdown=factor)
    calls_in_time = zip(made.calls, times.starts, times.ends, strict=True)
    parts = ((start, end) for call, start, end in calls_in_time if call.event in ("forward", "backward"))
    resident = ResidentMemory.of(profile)
    always = always_held(resident, shards)
    activations = Activations(profile, plan, chain, resident)
    levels: list[MemoryLevel] = []
    now = 0.0

    def add(end: float, where: str, phase: Phase, held: BytesByKind, activation: int) -> None:
        nonlocal now
        levels.append(MemoryLevel(where, phase, always + held + Counter(activation=activation), now, end))
        now = end

    moments = step_moments(chain, count, tied=tied_block(profile, chain) is not None)
    for moment in moments:
        event = moment.call.event
        phase: Phase = "forward" if event == "forward" else "backward"
        if event == "end":
            add(times.ends[-1] if moment is moments[-1] else now, "copies", phase, moment.before, 0)
            continue
        if event == "loss":
            add(now, "copies", "loss", moment.before, activations.at_loss)
            add(now, "loss", "loss", moment.during, activations.loss_bytes)
            continue
        start, end = next(parts)
        mine = set(chain.parts[moment.call.part].blocks)
        pieces = [piece for piece in chain.pieces.pieces if piece.block in mine]
        blocks: list[tuple[int | None, float]] = [(piece.block, piece.forward_s) for piece in pieces]
        if event == "backward":
            blocks = [(piece.block, piece.backward_s) for piece in reversed(pieces)]
        blocks = blocks or [(None, 1.0)]
        add(max(start, now), "copies", phase, moment.before, activations.at(blocks[0][0], phase)[1])
        length, whole = end - start, sum(seconds for _, seconds in blocks)
        for block, seconds in blocks:
            share = seconds / whole if whole > 0 else 1 / len(blocks)
            name, _, high = activations.at(block, phase)
            add(now + length * share, name, phase, moment.during, high)
        now = max(now, end)
    return tuple(levels)
