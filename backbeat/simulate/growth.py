"""The same model at another batch size, with its blocks and memory: by proportion, or through a second profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backbeat.errors import InputError
from backbeat.model.profile import Memory
from backbeat.simulate.batch import at_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from backbeat.model import Block, Profile

_TIMES = ("forward_s", "backward_s")
_GROWING = ("activation_bytes", "batch_bytes", "head_bytes", "outside_bytes")
_SIZES = ("input_bytes", "output_bytes", "saved_bytes", "forward_peak_bytes", "backward_peak_bytes")


def grown(one: Profile, batch_size: int, two: Profile | None = None) -> Profile:
    """Block times and sizes at `batch_size`.

    With a second profile of the model each is a fixed part and one that grows with the batch, through both. Without,
    all of each grows with the batch, which overstates a larger one wherever some part is fixed.
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: a worker needs at least one sample")
    if batch_size == one.batch_size:
        return one
    if two is None:
        return _proportional(one, batch_size)
    if [block.name for block in one.blocks] != [block.name for block in two.blocks]:
        raise InputError(
            f"{one.name} and {two.name} have different blocks: give two profiles of the same model, both made with "
            "this version of `backbeat profile`"
        )
    share = (batch_size - one.batch_size) / (two.batch_size - one.batch_size) if two.batch_size != one.batch_size else 0

    def through(first: float, second: float) -> float:
        return max(first + share * (second - first), 0.0)

    times = at_batch(one, two, batch_size)
    return msgspec.structs.replace(
        times,
        blocks=tuple(
            msgspec.structs.replace(
                block,
                **{name: through(getattr(block, name), getattr(other, name)) for name in _TIMES},
                **{name: round(through(getattr(block, name), getattr(other, name))) for name in _SIZES},
            )
            for block, other in zip(one.blocks, two.blocks, strict=True)
        ),
        memory=_each(one.memory, two.memory, through),
        buffer_bytes=one.buffer_bytes,
    )


def _proportional(one: Profile, batch_size: int) -> Profile:
    factor = batch_size / one.batch_size

    def larger(block: Block) -> Block:
        return msgspec.structs.replace(
            block,
            **{name: getattr(block, name) * factor for name in _TIMES},
            **{name: round(getattr(block, name) * factor) for name in _SIZES},
        )

    memory = one.memory
    if memory is not None:
        weights = memory.parameter_bytes + memory.optimizer_bytes + memory.buffer_bytes
        # Where the batch was not weighed, all that stays beside the weights is taken for it.
        batch = memory.batch_bytes or max(memory.steady_bytes - weights, 0)
        memory = msgspec.structs.replace(
            memory,
            steady_bytes=memory.steady_bytes + round(batch * (factor - 1)),
            peak_bytes=0,
            **{name: round(getattr(memory, name) * factor) for name in _GROWING},
        )
    backward = one.backward_s * factor
    before = one.single_s
    after = one.accumulation * (one.forward_s + one.backward_s) * factor + one.update_s
    return msgspec.structs.replace(
        one,
        name=f"{one.name} at batch {batch_size}",
        batch_size=batch_size,
        forward_s=one.forward_s * factor,
        backward_s=backward,
        iteration_s=tuple(seconds * after / before for seconds in one.iteration_s) if before > 0 else (),
        gradients=tuple(
            msgspec.structs.replace(gradient, ready_s=min(gradient.ready_s * factor, backward))
            for gradient in one.gradients
        ),
        blocks=tuple(larger(block) for block in one.blocks),
        memory=memory,
        notes=(*one.notes, f"batch {batch_size} is extrapolated from batch {one.batch_size}, all in proportion"),
    )


def _each(one: Memory | None, two: Memory | None, through: Callable[[float, float], float]) -> Memory | None:
    if one is None or two is None:
        return None
    return Memory(**{name: round(through(getattr(one, name), getattr(two, name))) for name in Memory.__struct_fields__})
