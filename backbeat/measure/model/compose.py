"""The profile of a deep model from two shallow ones that were measured: what they differ by is a layer's.

A model of many equal layers need not fit on the device. Measured with few layers and with some more, the difference
over the layers more is one layer; all else (embedding, head, loss) is in both. Times, memory and arithmetic grow
by that much a layer. A layer from the middle of the deeper model stands for all that are added: its gradients and its
block are repeated, their times stretched to one layer's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec.structs import replace

from backbeat.errors import InputError, MeasurementError
from backbeat.model import Block, Gradient, Memory, Profile, Source

_ALIKE = ("model", "batch_size", "precision", "device", "accumulation", "optimizer", "compiled")
_TIMES = ("forward_s", "backward_s", "update_s")
_OPTIONAL = [name for name in Profile.GROWTH.layers if name not in (*_TIMES, "buffer_bytes")]
_DIGITS = 8
_AMISS = 0.05
"""Where fewer layers took longer than more, a layer is taken to need none of that time. The whole may be too long by
this share of it."""


def compose_profile(shallow: Profile, deep: Profile, layers: int, *, name: str | None = None) -> Profile:
    """The same model with `layers` layers. `deep` has more layers than `shallow`, three at least."""
    stack = _find_stack(shallow, deep, layers)
    times, too_short = _times(shallow, deep, stack)
    one = {field: (times[field] - getattr(deep, field)) / max(stack.more, 1) for field in times}
    made = replace(
        deep,
        **times,
        name=name or deep.name,
        batches=(),
        architecture=None if deep.architecture is None else replace(deep.architecture, layers=layers),
        gradients=_gradients(deep.gradients, stack, one["forward_s"], one["backward_s"]),
        memory=_memory(shallow.memory, deep.memory, stack),
        buffer_bytes=round(stack.value(shallow.buffer_bytes, deep.buffer_bytes)),
        blocks=_blocks(deep.blocks, stack),
        **{field: stack.optional(getattr(shallow, field), getattr(deep, field)) for field in _OPTIONAL},
        source=replace(deep.source, method="composed") if isinstance(deep.source, Source) else deep.source,
        notes=(
            f"composed from measured blocks: {layers} layers from runs with {stack.shallow} and {stack.deep}; a layer "
            f"more is what they differ by: {one['forward_s'] * 1e3:.3g} ms forward, {one['backward_s'] * 1e3:.3g} ms "
            f"backward, {one['update_s'] * 1e3:.3g} ms update; peak memory and the spread of iterations are computed",
            *too_short,
            *(f"with {stack.deep} layers: {note}" for note in deep.notes),
        ),
    )
    spread = made.single_s / deep.single_s
    return replace(made, iteration_s=tuple(round(seconds * spread, _DIGITS) for seconds in deep.iteration_s))


@dataclass(frozen=True)
class _Stack:
    """The layers that the two profiles differ in, `PREFIX.INDEX.…`, and what a whole of more layers takes."""

    prefix: str
    shallow: int
    deep: int
    more: int
    """Layers to add to the deeper one."""

    @property
    def middle(self) -> int:
        """Stands for the layers that are added. The first and the last have neighbours of other kinds."""
        return self.deep // 2

    def index(self, name: str) -> int | None:
        """The layer that a gradient or a block belongs to."""
        match = re.match(rf"{re.escape(self.prefix)}\.(\d+)(\.|$)", name)
        return int(match.group(1)) if match else None

    def renamed(self, name: str, index: int) -> str:
        _, dot, rest = name[len(self.prefix) + 1 :].partition(".")
        return f"{self.prefix}.{index}{dot}{rest}"

    def value(self, shallow: float, deep: float) -> float:
        """
        >>> _Stack("layers", shallow=2, deep=4, more=12).value(10.0, 14.0)
        38.0
        """
        return deep + self.more * (deep - shallow) / (self.deep - self.shallow)

    def optional(self, shallow: float | None, deep: float | None) -> float | None:
        return None if shallow is None or deep is None else max(round(self.value(shallow, deep), _DIGITS), deep)


def _times(shallow: Profile, deep: Profile, stack: _Stack) -> tuple[dict[str, float], list[str]]:
    """What the whole takes; and where a layer is too short to time, what was measured."""
    sides = {field: (getattr(shallow, field), getattr(deep, field)) for field in _TIMES}
    times = {field: round(max(stack.value(*side), side[1]), _DIGITS) for field, side in sides.items()}
    against = [field for field, (fewer, more) in sides.items() if more <= fewer]
    found = [
        f"{field} is {fewer * 1e3:.4g} ms with fewer layers and {more * 1e3:.4g} ms with more"
        for field, (fewer, more) in sides.items()
        if field in against
    ]
    amiss = sum(times[field] - stack.value(*sides[field]) for field in against)
    if amiss > _AMISS * sum(times.values()) or len(against) == len(_TIMES):
        raise MeasurementError(
            f"{found[0]}: the machine was busy, or a layer is too small to time; measure again, with more layers or a "
            "larger batch"
        )
    return times, [f"{one}: a layer is taken to need none of it" for one in found]


def _find_stack(shallow: Profile, deep: Profile, layers: int) -> _Stack:
    for field in _ALIKE:
        one, other = getattr(shallow, field), getattr(deep, field)
        if one != other:
            raise InputError(f"{field} is {one!r} in one profile and {other!r} in the other: measure both alike")
    added = [name for name in deep.index if name not in shallow.index]
    prefixes = {match.group(1) if (match := re.match(r"(.*?)\.\d+\.", name)) else "" for name in added}
    if len(prefixes) != 1 or "" in prefixes or shallow.index.keys() - deep.index.keys():
        raise InputError(
            f"{deep.name} is not {shallow.name} with more layers of one stack: "
            "only models with one list of layers (layers.0, layers.1, …) can be composed; measure it whole"
        )
    (prefix,) = prefixes

    def count(profile: Profile) -> int:
        indices = (_Stack(prefix, 0, 0, 0).index(name) for name in profile.index)
        return 1 + max((index for index in indices if index is not None), default=-1)

    stack = _Stack(prefix, count(shallow), count(deep), layers - count(deep))
    if stack.shallow < 1 or stack.deep < 3:
        raise InputError(
            f"{stack.shallow} and {stack.deep} layers were measured: take 1 or more and 3 or more, so that one of them "
            "lies between two others"
        )
    if layers < stack.deep:
        raise InputError(f"layers is {layers}: compose goes up from the {stack.deep} that were measured")
    return stack


def _memory(shallow: Memory | None, deep: Memory | None, stack: _Stack) -> Memory | None:
    if shallow is None or deep is None:
        return None

    def grown(field: str) -> int:
        return max(round(stack.value(getattr(shallow, field), getattr(deep, field))), 0)

    kinds = {field: grown(field) for field in Memory.GROWTH.layers}
    # The peak of few layers may be in the head, that of many where backward ends and every gradient is there.
    peak = max(grown("peak_bytes"), kinds["steady_bytes"] + kinds["gradient_bytes"])
    return replace(deep, **kinds, peak_bytes=peak)


def _gradients(
    measured: tuple[Gradient, ...], stack: _Stack, forward_s: float, backward_s: float
) -> tuple[Gradient, ...]:
    """Backward goes down the stack: after the middle layer come its copies, and what was ready later is so by them."""
    middle = [gradient for gradient in measured if stack.index(gradient.name) == stack.middle]
    ended_s = max(gradient.ready_s for gradient in middle)
    above_s = max(
        (gradient.ready_s for gradient in measured if (stack.index(gradient.name) or 0) > stack.middle), default=0.0
    )
    stretch = backward_s / (ended_s - above_s) if ended_s > above_s else 0.0
    whole_s = sum(gradient.forward_s or 0.0 for gradient in middle)
    made: list[Gradient] = []
    for gradient in measured:
        index = stack.index(gradient.name)
        if index is not None and index >= stack.middle:
            made.append(replace(gradient, name=stack.renamed(gradient.name, index + stack.more)))
        elif index is not None or gradient.ready_s > ended_s:
            made.append(replace(gradient, ready_s=round(gradient.ready_s + stack.more * backward_s, _DIGITS)))
        else:
            made.append(gradient)
    for copy in range(stack.more):
        for gradient in middle:
            share = (gradient.forward_s or 0.0) / whole_s if whole_s else 0.0
            within_s = max(gradient.ready_s - above_s, 0.0) * stretch
            made.append(
                replace(
                    gradient,
                    name=stack.renamed(gradient.name, stack.middle + stack.more - 1 - copy),
                    ready_s=round(ended_s + copy * backward_s + within_s, _DIGITS),
                    forward_s=None if gradient.forward_s is None else round(share * forward_s, _DIGITS),
                )
            )
    return tuple(sorted(made, key=lambda gradient: gradient.ready_s))


def _blocks(measured: tuple[Block, ...], stack: _Stack) -> tuple[Block, ...]:
    """The middle layer's, which may be several, once and again; those of later layers move up."""
    middle = [block for block in measured if stack.index(block.name) == stack.middle]
    made: list[Block] = []
    for block in measured:
        index = stack.index(block.name)
        if index is None or index < stack.middle:
            made.append(block)
        elif index > stack.middle:
            made.append(replace(block, name=stack.renamed(block.name, index + stack.more)))
        elif block is middle[0]:
            indices = range(index, index + stack.more + 1)
            made += [replace(one, name=stack.renamed(one.name, copy)) for copy in indices for one in middle]
    return tuple(made)
