"""The profile of a deep model from two shallow ones that were measured: what they differ by is a layer's.

A model of many equal layers need not fit on the device: measured with few layers and with some more, the difference
over the number of layers more is one layer, and everything else (embedding, head, loss) is in both. Forward, backward,
update, memory by kind and arithmetic grow by one layer's each. One layer from the middle of the deeper model stands
for all that are added: its gradients and its blocks are repeated, their times stretched to one layer's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from backbeat.errors import InputError, MeasurementError
from backbeat.model import Gradient, Memory, Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from backbeat.model import Block

_SUMMED = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes", "steady_bytes")
_DIGITS = 8


def compose(shallow: Profile, deep: Profile, layers: int, *, name: str | None = None) -> Profile:
    """The same model with `layers` layers. `deep` has more layers than `shallow`, three at least."""
    stack = _stack(shallow, deep)
    if layers < stack.deep:
        raise InputError(f"layers is {layers}: compose goes up from the {stack.deep} that were measured")
    more = layers - stack.deep
    grown = _Grown(stack.deep - stack.shallow, more)
    forward_s, backward_s = (grown.seconds(shallow, deep, field) for field in ("forward_s", "backward_s"))
    update_s = grown.seconds(shallow, deep, "update_s")
    gradients = _gradients(deep, stack, more, grown, shallow)
    single_s = deep.accumulation * (forward_s + backward_s) + update_s
    return replace(
        deep,
        name=name or f"{deep.name}-{layers}-layers",
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        gradients=gradients,
        iteration_s=tuple(round(seconds * single_s / deep.single_s, _DIGITS) for seconds in deep.iteration_s),
        memory=_memory(shallow.memory, deep.memory, grown),
        buffer_bytes=grown.whole(shallow.buffer_bytes, deep.buffer_bytes),
        blocks=_blocks(deep, stack, more),
        host_s=grown.optional(shallow.host_s, deep.host_s),
        host_recompute_s=grown.optional(shallow.host_recompute_s, deep.host_recompute_s),
        flops_per_sample=grown.optional(shallow.flops_per_sample, deep.flops_per_sample),
        notes=(
            *deep.notes[:1],
            f"composed from measured blocks: {layers} layers from runs with {stack.shallow} and {stack.deep}; a layer "
            f"more is what they differ by ({_layer_ms(shallow, deep, grown)}); peak memory and the spread of "
            "iterations are computed",
            *(f"with {stack.deep} layers: {note}" for note in deep.notes[1:]),
        ),
    )


@dataclass(frozen=True)
class _Stack:
    """The layers that the two profiles differ in: `PREFIX.INDEX.…`."""

    prefix: str
    shallow: int
    deep: int

    @property
    def middle(self) -> int:
        """Stands for the layers that are added: neither the first nor the last, which have neighbours of other kinds."""
        return self.deep // 2

    def place(self, name: str) -> int | None:
        """The index of the layer that a gradient or a block belongs to."""
        match = re.match(rf"{re.escape(self.prefix)}\.(\d+)(\.|$)", name)
        return int(match.group(1)) if match else None

    def renamed(self, name: str, index: int) -> str:
        rest = name[len(self.prefix) + 1 :].partition(".")
        return f"{self.prefix}.{index}{rest[1]}{rest[2]}"


def _stack(shallow: Profile, deep: Profile) -> _Stack:
    for field in ("model", "batch_size", "precision", "device", "accumulation", "optimizer"):
        one, other = getattr(shallow, field), getattr(deep, field)
        if one != other:
            raise InputError(f"{field} is {one!r} in one profile and {other!r} in the other: compose needs them alike")
    known = set(shallow.index)
    added = [name for name in deep.index if name not in known]
    prefixes = {match.group(1) for name in added if (match := re.match(r"(.*?)\.\d+\.", name))}
    if len(prefixes) != 1 or known - set(deep.index):
        raise InputError(
            f"{deep.name} is not {shallow.name} with more layers of one stack: compose needs names like layers.0.weight"
        )
    (prefix,) = prefixes

    def count(names: set[str]) -> int:
        indices = {place for name in names if (place := _Stack(prefix, 0, 0).place(name)) is not None}
        return max(indices, default=-1) + 1

    stack = _Stack(prefix, count(known), count(set(deep.index)))
    if stack.shallow < 1 or stack.deep < 3:
        raise InputError(
            f"{stack.shallow} and {stack.deep} layers were measured: compose needs 1 or more, and 3 or more, "
            "so that one of them lies between two others"
        )
    return stack


@dataclass(frozen=True)
class _Grown:
    """Figures at the full number of layers from those at two smaller ones."""

    between: int
    """Layers that the measured two differ by."""
    more: int
    """Layers to add to the deeper one."""

    def value(self, shallow: float, deep: float) -> float:
        return deep + self.more * (deep - shallow) / self.between

    def seconds(self, shallow: Profile, deep: Profile, field: str) -> float:
        one, other = getattr(shallow, field), getattr(deep, field)
        if other <= one:
            raise MeasurementError(
                f"{field} is {one * 1e3:.4g} ms with fewer layers and {other * 1e3:.4g} ms with more: the machine was "
                "busy or the layers are too small to time; measure again, with more layers or a larger batch"
            )
        return round(self.value(one, other), _DIGITS)

    def optional(self, shallow: float | None, deep: float | None) -> float | None:
        return None if shallow is None or deep is None else max(round(self.value(shallow, deep), _DIGITS), deep)

    def whole(self, shallow: int, deep: int) -> int:
        return round(self.value(shallow, deep))

    def layer_s(self, shallow: Profile, deep: Profile, field: str) -> float:
        return float(getattr(deep, field) - getattr(shallow, field)) / self.between


def _layer_ms(shallow: Profile, deep: Profile, grown: _Grown) -> str:
    forward, backward, update = (
        grown.layer_s(shallow, deep, field) * 1e3 for field in ("forward_s", "backward_s", "update_s")
    )
    return f"{forward:.3g} ms forward, {backward:.3g} backward, {update:.3g} update"


def _memory(shallow: Memory | None, deep: Memory | None, grown: _Grown) -> Memory | None:
    if shallow is None or deep is None:
        return None
    sums = {field: grown.whole(getattr(shallow, field), getattr(deep, field)) for field in _SUMMED}
    # The peak of few layers may be in the head, that of many where backward ends and every gradient is there.
    peak = max(grown.whole(shallow.peak_bytes, deep.peak_bytes), sums["steady_bytes"] + sums["gradient_bytes"])
    outside = max(grown.whole(shallow.outside_bytes, deep.outside_bytes), 0)
    return replace(deep, **sums, peak_bytes=peak, outside_bytes=outside)


def _gradients(deep: Profile, stack: _Stack, more: int, grown: _Grown, shallow: Profile) -> tuple[Gradient, ...]:
    """Those ready before the middle layer's stay, the middle layer's are repeated, and what follows is that later."""
    middle = [gradient for gradient in deep.gradients if stack.place(gradient.name) == stack.middle]
    begun_s = max((one.ready_s for one in deep.gradients if (stack.place(one.name) or 0) > stack.middle), default=0.0)
    ended_s = max(one.ready_s for one in middle)
    layer_s = grown.layer_s(shallow, deep, "backward_s")
    stretch = layer_s / (ended_s - begun_s) if ended_s > begun_s else 0.0
    layer_forward_s = grown.layer_s(shallow, deep, "forward_s")
    middle_forward_s = sum(one.forward_s or 0.0 for one in middle)
    widen = layer_forward_s / middle_forward_s if middle_forward_s else 1.0
    made = []
    for gradient in deep.gradients:
        place = stack.place(gradient.name)
        if place is not None:
            above = place > stack.middle
            gradient = replace(gradient, name=stack.renamed(gradient.name, place + more if above else place))
        later = place is not None and place < stack.middle or place is None and gradient.ready_s > ended_s
        if place == stack.middle or not later:
            made.append(gradient if place != stack.middle else _named(gradient, stack, stack.middle + more))
        else:
            made.append(_at(gradient, gradient.ready_s + more * layer_s))
    for copy in range(1, more + 1):
        for gradient in middle:
            offset = max(gradient.ready_s - begun_s, 0.0) * stretch
            made.append(
                replace(
                    gradient,
                    name=stack.renamed(gradient.name, stack.middle + more - copy),
                    ready_s=round(ended_s + (copy - 1) * layer_s + offset, _DIGITS),
                    forward_s=None if gradient.forward_s is None else round(gradient.forward_s * widen, _DIGITS),
                )
            )
    total = grown.seconds(shallow, deep, "backward_s")
    return tuple(sorted((_at(one, min(one.ready_s, total)) for one in made), key=lambda one: one.ready_s))


def _named(gradient: Gradient, stack: _Stack, index: int) -> Gradient:
    return replace(gradient, name=stack.renamed(gradient.name, index))


def _at(gradient: Gradient, ready_s: float) -> Gradient:
    return replace(gradient, ready_s=round(ready_s, _DIGITS))


def _blocks(deep: Profile, stack: _Stack, more: int) -> tuple[Block, ...]:
    """The middle layer's block, and as many more of it."""
    made: list[Block] = []
    for block in deep.blocks:
        place = stack.place(block.name)
        copies = more + 1 if place == stack.middle else 1
        moved: Callable[[int], int] = (lambda copy: copy) if place is None or place <= stack.middle else lambda _: more
        for copy in range(copies):
            index = None if place is None else place + moved(copy)
            made.append(block if index is None else replace(block, name=stack.renamed(block.name, index)))
    return tuple(made)
