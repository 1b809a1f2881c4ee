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

A profile is measured with whole fp32 parameters, in bf16 under autocast. Three things differ with sharded ones:

- Autocast keeps a copy of every weight in the dtype it computes with, and autograd saves it. Parameters that are
  gathered in that dtype need none.
- Units that are gathered in that dtype get their inputs in it. Autocast passes on a stream in fp32, of which every
  linear layer saves a copy of its own. torch 2.11 casts the inputs of a unit's first module, 2.13 those of each: units
  of several modules may hold less there than is predicted.
- The gradient of a weight is made beside the `.grad` that is there, and added to it. Under FSDP2 none is there: it
  becomes the gradient itself, which is counted with them.

The largest parameter stands for a block's gradients, since it makes them one after the other.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from backbeat.engine import Graph
from backbeat.engine.memory import HeldBytes, held_over_time, issue_times
from backbeat.model import Block, MemoryPlan, Network, Plan, Profile
from backbeat.model.blocks import ranges_of
from backbeat.model.gpu_memory import MemoryByKind
from backbeat.model.profile import DTYPE_BYTES, ELEMENT_BYTES
from backbeat.model.resident import ResidentMemory
from backbeat.model.slowdown import slowdown_of
from backbeat.steps.memory_timeline import BlockChain, Phase, Tally
from backbeat.steps.model_chain import ROOT, ShardedChain, chain_of
from backbeat.steps.unit_graph import Call, ShardedCost, calls, run_step

_HALF = ("bf16", "fp16")
MOST_MICRO_BATCHES = 3
"""Those after the second hold what the second holds."""
_KINDS = {
    "gathered": "gathered",
    "gather_buffer": "buffers",
    "whole_gradient": "gradients",
    "scatter_input": "buffers",
    "gradient": "gradients",
}
"""What units hold, and the kind that it is of."""

BytesByKind = Counter[str]
"""Bytes of `model.gpu_memory.KINDS`."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What units hold at one part of forward or backward, between the two, or at the end of a micro-batch."""

    call: Call
    before: BytesByKind
    """The most between the part before it and this one."""
    during: BytesByKind


class MemoryLevel(NamedTuple):
    """What the device holds from one moment to another."""

    where: str
    """The block, `loss`, or `copies` between two blocks."""
    phase: Phase
    held: BytesByKind
    start_s: float
    end_s: float

    @property
    def total_bytes(self) -> int:
        return self.held.total()


def sharded_memory(
    profile: Profile, plan: Plan, *, micro_batches: int = 1, chain: ShardedChain | None = None
) -> MemoryByKind | None:
    """The highest level; None where the profile has no memory figures. `chain`: the profile in the plan's units, where
    it is known."""
    if profile.memory is None:
        return None
    found = _Levels(profile, plan, chain or chain_of(profile, plan), micro_batches)
    level = max(found, key=_Level.total)
    return MemoryByKind.at(level.where, level.phase, found.always + level.held)


def memory_levels(profile: Profile, network: Network, plan: Plan, *, micro_batches: int = 1) -> tuple[MemoryLevel, ...]:
    """Every level of the step in order, in time; of many micro-batches the first three. Empty where the profile has no
    memory figures. Between two blocks the copies run: what they hold at most is a level of its own."""
    if profile.memory is None or plan.sharding is None or network.workers == 1:
        return ()
    chain = chain_of(profile, plan)
    found = _Levels(profile, plan, chain, micro_batches)
    cost = ShardedCost.of(profile, network, chain.sharding)
    factor = slowdown_of(profile, network, sharded=True).factor
    update_s = profile.update_s / chain.sharding.mesh.shard
    made, times = run_step(chain, cost, update_s, micro_batches=found.micro_batches, slowdown=factor)
    in_time = zip(made.calls, times.starts, times.ends, strict=True)
    parts = ((start, end) for call, start, end in in_time if call.event in ("forward", "backward"))
    levels: list[MemoryLevel] = []
    now = start = end = 0.0
    for level in found:
        until, where = now, level.where
        if level.share is not None:
            until += (end - start) * level.share
        else:
            where = "copies"
            if level.event in ("forward", "backward"):
                start, end = next(parts)
                until = max(start, now)
        levels.append(MemoryLevel(where, level.phase, found.always + level.held, now, until))
        now = until
    levels[-1] = levels[-1]._replace(end_s=times.ends[-1])
    return tuple(levels)


class _Level(NamedTuple):
    """What one level holds beside what is always there."""

    event: str
    where: str
    phase: Phase
    units: BytesByKind
    unit_bytes: int
    """All of them: a planner asks for many peaks, and each moment has several levels."""
    activations: int
    loss: int = 0
    share: float | None = None
    """Of the time of its part; None between two parts."""

    def total(self) -> int:
        return self.unit_bytes + self.activations + self.loss

    @property
    def held(self) -> BytesByKind:
        return self.units + Counter(activations=self.activations, loss=self.loss)


class _Levels:
    """All levels of a step in the order of issue."""

    def __init__(self, profile: Profile, plan: Plan, chain: ShardedChain, micro_batches: int) -> None:
        resident = ResidentMemory.of(profile)
        shared = resident.over(chain.sharding.mesh.shard, "parameters", "optimizer").by_kind
        self.always = Counter({kind: shared[kind] for kind in ("parameters", "optimizer", "other")})
        self.chain, self.micro_batches = chain, min(micro_batches, MOST_MICRO_BATCHES)
        self.pieces = {piece.block: piece for piece in chain.whole.pieces}
        self.moments = step_moments(chain, self.micro_batches, tied=tied_block(profile, chain) is not None)
        self.activations = Activations(profile, plan, chain, resident)

    def __iter__(self) -> Iterator[_Level]:
        kept = self.activations
        for call, before, during in ((one.call, one.before, one.during) for one in self.moments):
            event, most = call.event, before.total()
            if event == "end":
                # What is reduced when backward is done has no activations beside it.
                yield _Level(event, kept.names[0], "backward", before, most, 0)
            elif event == "loss":
                yield _Level(event, "loss", "loss", before, most, kept.at_loss)
                yield _Level(event, "loss", "loss", during, during.total(), kept.at_loss, kept.loss_bytes, 0.0)
            else:
                yield from self._part(call, before, during)

    def _part(self, call: Call, before: BytesByKind, during: BytesByKind) -> Iterator[_Level]:
        timed: list[tuple[int | None, float]] = [(None, 1.0)]
        if blocks := self.chain.parts[call.part].blocks:
            timed = [(block, self.pieces[block].forward_s) for block in blocks]
            if call.event == "backward":
                timed = [(block, self.pieces[block].backward_s) for block in reversed(blocks)]
        whole, size = sum(seconds for _, seconds in timed), during.total()
        for place, (block, seconds) in enumerate(timed):
            where, low, high, phase = self.activations.at(block, call.event)
            if place == 0:
                yield _Level(call.event, where, phase, before, before.total(), low)
            share = seconds / whole if whole > 0 else 1 / len(timed)
            yield _Level(call.event, where, phase, during, size, high, share=share)


def step_moments(chain: ShardedChain, micro_batches: int, *, tied: bool) -> list[Moment]:
    """What is held at every part, in order of issue. `tied`: the last part makes all gradients of the root."""
    found = calls(chain, micro_batches)
    buffers = _UnitBuffers(chain, micro_batches, tied=tied)
    for number, call in enumerate(found):
        buffers.add(number, call)
    levels = held_over_time(buffers.closed(), issue_times(len(found)))
    totals = [level.total for level in levels]
    moments: list[Moment] = []
    most = now = 0
    for number, call in enumerate(found):
        while now + 1 < len(levels) and levels[now + 1].start_s <= number:
            now += 1
            most = now if totals[now] > totals[most] else most
        if call.event in ("forward", "loss", "backward", "end"):
            moments.append(Moment(call, _whole(levels[most]), _whole(levels[now])))
            most = now
    return moments


def _whole(level: HeldBytes) -> BytesByKind:
    return Counter({kind: int(size) for kind, size in level.by_kind.items()})


class _UnitBuffers:
    """What each call of a step takes, until which call. Calls are numbered in the order of issue."""

    def __init__(self, chain: ShardedChain, micro_batches: int, *, tied: bool) -> None:
        self.chain, self.sharding, self.micro_batches = chain, chain.sharding, micro_batches
        self.graph = Graph()
        self.held: dict[tuple[str, int], tuple[int, float]] = {}
        """By what it is (`_KINDS`) and unit, or part: the call that took it, and its bytes."""
        self.made = [0 if tied and part.unit == ROOT else part.elements for part in chain.parts]
        """Elements whose gradients each part makes."""
        if tied:
            self.made[-1] = chain.elements[ROOT]
        self.forward, self.micro_batch = True, 0
        self.buffer: int | None = None
        """In forward: the unit whose gathered buffer is still there."""

    def add(self, number: int, call: Call) -> None:
        event, unit = call.event, call.unit
        elements = self.chain.elements[unit]
        param, reduced = DTYPE_BYTES[self.sharding.param_dtype], DTYPE_BYTES[self.sharding.reduce_dtype]
        if event == "begin":
            self.forward, self.micro_batch = True, self.micro_batch + 1
        elif event == "all_gather":
            self._take("gather_buffer", unit, number, elements * param)
        elif event == "copy_out":
            self._free("gather_buffer", self.buffer if self.forward else None, number - 1)
            self._take("gathered", unit, number, elements * param)
            if self.forward:
                self.buffer = unit
            else:
                self._free("gather_buffer", unit, number)
        elif event == "to_backward":
            self._free("gather_buffer", self.buffer, number - 1)
            self.forward, self.buffer = False, None
        elif event == "free":
            self._free("gathered", unit, number - 1)
        elif event == "backward":
            summed = self.sharding.gradient_sync == "last"
            before = reduced if summed and self.micro_batch > 1 else 0
            self._take("whole_gradient", call.part, number, self.made[call.part] * (before + param))
            if summed and self.micro_batch < self.micro_batches:
                self._take("whole_gradient", call.part, number + 1, self.made[call.part] * reduced)
        elif event == "wait":
            self._free("scatter_input", unit, number - 1)
        elif event == "reduce_scatter":
            self._take("scatter_input", unit, number, elements * reduced)
            for index, part in enumerate(self.chain.parts):
                if part.unit == unit:
                    self._free("whole_gradient", index, number)
            # The shard comes as the input is done with.
            self._take("gradient", unit, number + 1, -(-elements * ELEMENT_BYTES // self.sharding.mesh.shard))
        elif event == "end":
            for one in (ROOT, *range(self.chain.count)):
                self._free("scatter_input", one, number - 1)

    def closed(self) -> Graph:
        """With what stays to the end."""
        for (what, _), (first, size) in self.held.items():
            self.graph.hold(_KINDS[what], size, first)
        return self.graph

    def _take(self, what: str, unit: int, number: int, size: float) -> None:
        self._free(what, unit, number - 1)
        self.held[what, unit] = number, size

    def _free(self, what: str, unit: int | None, last: int) -> None:
        if unit is not None and (what, unit) in self.held:
            first, size = self.held.pop((what, unit))
            self.graph.hold(_KINDS[what], size, first, [last])


class Activations(Tally):
    """The level before every block of forward and backward, and the most while it runs."""

    __slots__ = ("at_loss", "levels", "loss_bytes", "names")

    def __init__(self, profile: Profile, plan: Plan, chain: ShardedChain, resident: ResidentMemory) -> None:
        super().__init__(0)
        assert profile.memory is not None
        self.names = [block.name for block in profile.blocks] or ["the rest"]
        self.levels: dict[tuple[str, int], tuple[int, int, Phase]] = {}
        # Without blocks all activations are there all the time.
        self.at_loss = 0 if profile.blocks else profile.memory.kept_bytes
        """Kept at the end of forward."""
        self.loss_bytes = 0
        """What the loss takes beside it."""
        if profile.blocks:
            blocks = BlockChain(sharded_activations(profile, chain), resident)
            blocks.run(ranges_of(profile, plan.memory or MemoryPlan()), self)

    def see(self, above: int, block: int, phase: Phase) -> None:
        if phase == "loss":
            self.at_loss, self.loss_bytes = self.level, above
            return
        key = "forward" if phase == "forward" else "backward", block
        low, high, highest = self.levels.get(key, (0, -1, phase))
        if self.level + above > high:
            high, highest = self.level + above, phase
        self.levels[key] = max(low, self.level), high, highest

    def at(self, block: int | None, event: str) -> tuple[str, int, int, Phase]:
        """The block's name, the level before it runs, the most while it does, and when that is."""
        if block is None:
            return "the rest", self.at_loss, self.at_loss, "forward" if event == "forward" else "backward"
        return self.names[block], *self.levels[event, block]


def tied_block(profile: Profile, chain: ShardedChain) -> int | None:
    """A block after the last unit and after all parameters, whose backward makes the gradient of one of the root's: a
    head tied to the embedding. A pooling, which has a classifier after it, is none."""
    last = chain.parts[-1]
    if last.unit != ROOT or not (largest := _largest_of_root(chain)):
        return None
    element = DTYPE_BYTES[profile.compute_dtype]
    own = {piece.block: piece.elements for piece in chain.whole.pieces}
    behind = itertools.takewhile(lambda k: not own[k], reversed(last.blocks))
    tied = (k for k in behind if profile.blocks[k].backward_peak_bytes >= largest * element)
    return next(tied, None)


def sharded_activations(profile: Profile, chain: ShardedChain) -> Profile:
    """The profile with what its blocks take beside sharded parameters."""
    autocast = profile.autocast in _HALF
    native = autocast and chain.sharding.param_dtype in _HALF
    element = DTYPE_BYTES[profile.compute_dtype]
    tied = tied_block(profile, chain)
    blocks = list(profile.blocks)
    cast = _cast_blocks(profile, chain) if native else frozenset()
    for piece in chain.whole.pieces:
        if piece.block is None:
            continue
        elements = piece.elements if piece.block != tied else (_largest_of_root(chain),)
        block = blocks[piece.block]
        less = element * sum(elements) if native else 0
        less += block.cast_saving_bytes if piece.block in cast else 0
        blocks[piece.block] = _with_less(block, less, element * max(elements, default=0))
    return replace(profile, blocks=tuple(blocks))


@lru_cache(maxsize=2**12)
def _with_less(block: Block, saved_bytes: int, backward_bytes: int) -> Block:
    """A planner asks for the same blocks in every plan that it tries."""
    return replace(
        block,
        saved_bytes=max(block.saved_bytes - saved_bytes, 0),
        forward_peak_bytes=max(block.forward_peak_bytes - saved_bytes, 0),
        backward_peak_bytes=max(block.backward_peak_bytes - backward_bytes, 0),
    )


def _cast_blocks(profile: Profile, chain: ShardedChain) -> frozenset[int]:
    """Blocks whose inputs come in the gathered dtype: the first of each unit, and those after it as long as what is
    passed on stays in that dtype."""
    found: set[int] = set()
    stays = False
    for part in chain.parts:
        for place, index in enumerate(part.blocks):
            block = profile.blocks[index]
            if (place == 0 and part.unit != ROOT) or (stays and block.chained):
                found.add(index)
            stays = index in found and block.cast_output
    return frozenset(found)


def _largest_of_root(chain: ShardedChain) -> int:
    """Elements of the largest parameter that the root holds."""
    held = [0, *chain.whole.loose]
    of_root = {block for part in chain.parts if part.unit == ROOT for block in part.blocks}
    for piece in chain.whole.pieces:
        if piece.block in of_root:
            held.extend(piece.elements)
    return max(held)
