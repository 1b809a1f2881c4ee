"""A model as a chain of pieces in the order of forward, and the same cut into the units of a sharded plan.

A piece is a block of the profile or, where it has none, the gradients that one repeated module owns (`layers.0`,
`transformer.h.3`). Times are the device's own, without communication. A unit holds consecutive pieces; what no unit
holds is the root's, both its parameters and its computation. A *part* is a run of pieces of one unit.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Plan, Profile, Sharding
from backbeat.model.blocks import FETCH, RECOMPUTE, ranges_of
from backbeat.model.resident import ResidentMemory
from backbeat.model.sharding import enclosing
from backbeat.steps.memory_timeline import BlockChain

ROOT = -1
"""The root's index, after the units."""


@dataclass(frozen=True, slots=True)
class ChainPiece:
    """The smallest part of a model that can be a unit, or be computed again."""

    name: str
    forward_s: float
    backward_s: float
    elements: tuple[int, ...]
    """Of each parameter with a gradient."""
    block: int | None = None
    """Its index among the profile's blocks."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Pieces in the order of forward.

    Two layers of a profile without blocks: gradients are grouped by the module that owns them.

    >>> from backbeat.model import Gradient
    >>> profile = Profile(
    ...     name="two", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=2.0, backward_s=4.0,
    ...     update_s=0.5, gradients=tuple(Gradient(name=f"b.{k}.w", bytes=8, ready_s=4.0 - 2 * k) for k in (1, 0)))
    >>> [(piece.name, piece.forward_s, piece.backward_s, piece.elements) for piece in Chain.of_profile(profile).pieces]
    [('b.0', 1.0, 2.0, (2,)), ('b.1', 1.0, 2.0, (2,))]
    """

    pieces: tuple[ChainPiece, ...]
    loose: tuple[int, ...] = ()
    """Elements of parameters that no piece holds: the root's."""
    notes: tuple[str, ...] = ()

    @property
    def forward_s(self) -> float:
        return sum(piece.forward_s for piece in self.pieces)

    @property
    def backward_s(self) -> float:
        return sum(piece.backward_s for piece in self.pieces)

    @classmethod
    def of_profile(cls, profile: Profile, memory: MemoryPlan | None = None) -> Chain:
        """With `memory`, every time is of an iteration that recomputes or offloads as it says."""
        return _of_blocks(profile, memory) if profile.blocks else _of_gradients(profile)


def _of_blocks(profile: Profile, memory: MemoryPlan | None) -> Chain:
    index = {block.name: number for number, block in enumerate(profile.blocks)}
    held: list[list[int]] = [[] for _ in profile.blocks]
    loose: list[int] = []
    for gradient in profile.gradients:
        name = innermost(gradient.name, index)
        (loose if name is None else held[index[name]]).append(-(-gradient.bytes // profile.element_bytes))
    forward, backward, after = _block_times(profile, memory)
    pieces = [
        ChainPiece(block.name, f, b, tuple(elements), number)
        for number, (block, f, b, elements) in enumerate(zip(profile.blocks, forward, backward, held, strict=True))
    ]
    if max(after) > 0:
        pieces.append(ChainPiece("loss", *after, ()))
    return Chain(tuple(pieces), tuple(loose))


def _block_times(profile: Profile, memory: MemoryPlan | None) -> tuple[list[float], list[float], tuple[float, float]]:
    """Forward and backward of each block, and of what follows the last."""
    chain = BlockChain(profile, ResidentMemory())
    forward, backward = list(chain.forward), list(chain.backward)
    after = (chain.loss_forward, chain.loss_backward)
    if memory is None or not memory.segments:
        return forward, backward, after
    actions = ranges_of(profile, memory)
    run = chain.run(actions)
    for first, last, what in actions:
        if what in (RECOMPUTE, FETCH):
            # When backward reaches the segment.
            backward[last - 1] += sum(chain.forward[first:last])
    # Waits for copies from and to the host, and the host's own pace, lengthen the whole.
    longer = (run.backward_s - after[1]) / sum(backward) if sum(backward) > 0 else 1.0
    stalled = (run.forward_s - after[0]) / sum(forward) if sum(forward) > 0 else 1.0
    return [seconds * stalled for seconds in forward], [seconds * longer for seconds in backward], after


def innermost(name: str, modules: Container[str]) -> str | None:
    """Of these modules the innermost that holds a parameter.

    >>> innermost("layers.0.attn.weight", {"layers", "layers.0"})
    'layers.0'
    """
    return next((module for module in reversed(enclosing(name)) if module in modules), None)


def repeated(names: Sequence[str]) -> list[str]:
    """Of these modules, those that have siblings of the same name but for a number.

    >>> repeated(["embed", "layers.0", "layers.1", "norm", "head1"])
    ['layers.0', 'layers.1']
    """
    alike = [re.sub(r"\d+", "#", name) for name in names]
    return [name for name, kind in zip(names, alike, strict=True) if kind != name and alike.count(kind) > 1]


def owning_module(name: str) -> str:
    """The outermost numbered module that holds a parameter, or the parameter's own module.

    >>> owning_module("transformer.h.3.attn.c_proj.weight"), owning_module("lm_head.weight")
    ('transformer.h.3', 'lm_head')
    """
    modules = enclosing(name)[:-1]
    return next((module for module in modules if re.search(r"\d+$", module)), modules[-1] if modules else name)


def _of_gradients(profile: Profile) -> Chain:
    """Without blocks: times from the gradients' own, in the reverse of ready order."""
    spans = np.diff(profile.ready, prepend=0.0)
    spans[-1] += profile.backward_s - float(profile.ready[-1])
    known = [gradient.forward_s for gradient in profile.gradients if gradient.forward_s is not None]
    guessed = len(known) < len(profile.gradients)
    weights = spans if guessed else np.array(known)
    total = float(weights.sum())
    forward = (
        weights * (profile.forward_s / total) if total > 0 else np.full(len(spans), profile.forward_s / len(spans))
    )
    pieces: dict[str, ChainPiece] = {}
    rows = zip(reversed(profile.gradients), forward[::-1].tolist(), spans[::-1].tolist(), strict=True)
    for gradient, forward_s, backward_s in rows:
        name = owning_module(gradient.name)
        piece = pieces.get(name, ChainPiece(name, 0.0, 0.0, ()))
        pieces[name] = replace(
            piece,
            forward_s=piece.forward_s + forward_s,
            backward_s=piece.backward_s + backward_s,
            elements=(*piece.elements, -(-gradient.bytes // profile.element_bytes)),
        )
    notes = [
        f"the profile {profile.name} has no blocks: gradients are grouped by module name, like {next(iter(pieces))}"
    ]
    if guessed:
        notes.append("forward times are guessed from backward's")
    return Chain(tuple(pieces.values()), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class UnitPart:
    """Consecutive pieces of one unit, or of the root."""

    unit: int
    forward_s: float
    backward_s: float
    elements: int
    """Whose gradients its backward makes, padded."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardedChain:
    """A model in units."""

    parts: tuple[UnitPart, ...]
    elements: tuple[int, ...]
    """Of each unit, and last of the root: all parameters, each padded to a whole number of elements a shard."""
    reduced_last: frozenset[int]
    """Units whose input needs no gradient: autograd never reaches their input, so they are reduced when all of backward
    is done."""
    whole: Chain
    """Before it was cut."""
    sharding: Sharding

    @property
    def count(self) -> int:
        """Units without the root."""
        return len(self.sharding.units)

    @property
    def has_root(self) -> bool:
        """The root holds parameters."""
        return self.elements[ROOT] > 0

    @classmethod
    def of(cls, chain: Chain, sharding: Sharding) -> ShardedChain:
        owner = _owners([piece.name for piece in chain.pieces], sharding)
        _join_gaps(owner, chain.pieces)
        held: list[list[int]] = [[] for _ in range(len(sharding.units) + 1)]
        held[ROOT].extend(chain.loose)
        shards = sharding.mesh.shard
        parts: list[UnitPart] = []
        for unit, run in groupby(zip(owner, chain.pieces, strict=True), key=itemgetter(0)):
            own = [piece for _, piece in run]
            elements = [count for piece in own for count in piece.elements]
            held[unit].extend(elements)
            forward_s, backward_s = sum(piece.forward_s for piece in own), sum(piece.backward_s for piece in own)
            blocks = tuple(piece.block for piece in own if piece.block is not None)
            parts.append(UnitPart(unit, forward_s, backward_s, padded(elements, shards), blocks))
        _check_order(parts, sharding)
        for index, inside in enumerate(held[:ROOT]):
            if not inside:
                raise InputError(
                    f"units[{index}] ({', '.join(sharding.units[index].modules)}) holds no parameter with a gradient: "
                    "remove it, its modules are the root's"
                )
        units = tuple(padded(inside, shards) for inside in held)
        holding = [unit for unit, piece in zip(owner, chain.pieces, strict=True) if piece.elements]
        return cls(tuple(parts), units, frozenset({ROOT, *holding[:1]}), chain, sharding)


def chain_of(profile: Profile, plan: Plan) -> ShardedChain:
    """The profile in the plan's units."""
    if plan.sharding is None:
        raise InputError(f"the plan {plan.strategy!r} has no sharding: make one with `backbeat plan --way fsdp`")
    plan.check(profile)
    return ShardedChain.of(Chain.of_profile(profile, plan.memory), plan.sharding)


def padded(elements: Iterable[int], shards: int) -> int:
    """Elements of these parameters, each filled up to a whole number a shard."""
    return sum(-(-count // shards) * shards for count in elements)


def _owners(names: Sequence[str], sharding: Sharding) -> list[int]:
    """The unit of each piece, or ROOT."""
    of_module = {module: index for index, unit in enumerate(sharding.units) for module in unit.modules}
    owner = []
    found: set[str] = set()
    for name in names:
        module = next((outer for outer in enclosing(name) if outer in of_module), None)
        owner.append(ROOT if module is None else of_module[module])
        if module is not None:
            found.add(module)
    for module, index in of_module.items():
        if module not in found:
            raise InputError(
                f"units[{index}] names {module!r}, which is a part of a block or holds several kinds of them: units "
                f"are made of whole blocks, like {names[len(names) // 2]!r}"
            )
    return owner


def _join_gaps(owner: list[int], pieces: Sequence[ChainPiece]) -> None:
    """Pieces without parameters between two of one unit run while it is gathered."""
    last = 0
    for index in range(1, len(owner)):
        if owner[index] == ROOT and not pieces[index].elements:
            continue
        if owner[index] == owner[last] != ROOT:
            owner[last:index] = [owner[index]] * (index - last)
        last = index


def _check_order(parts: Sequence[UnitPart], sharding: Sharding) -> None:
    order = [part.unit for part in parts if part.unit != ROOT]
    if order != list(range(len(sharding.units))):
        broken = next((index for index, unit in enumerate(order) if unit != index), len(order))
        where = order[broken] if broken < len(order) else broken
        raise InputError(
            f"units[{where}] is not a run of consecutive blocks after those before it: list units, and the modules "
            "of each, in the order of forward"
        )
