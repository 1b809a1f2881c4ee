"""The same model at another batch size: in proportion, or through a second profile. Strong scaling uses it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Block, Gradient, Memory, Profile
from backbeat.model.checks import at_least
from backbeat.model.files import bundled
from backbeat.simulate.host_lane import device_alone

_MEMORY_SIZES = [name for name in Memory.__struct_fields__ if name.endswith("_bytes")]
_TIMES, _SIZES = ([name for name in Block.GROWTH.batch if name.endswith(unit)] for unit in ("_s", "_bytes"))


def at_batch(profile: Profile, batch_size: int, other: Profile | None = None) -> Profile:
    """The profile at another batch size; its last note says how the times were found.

    With a second profile of the model every time and size is a fixed part and one that grows with the batch, through
    both; outside the two it is extrapolated. Blocks and memory are kept only where both profiles have the same blocks.
    With one profile all of each grows with the batch, which overstates a larger batch wherever some part is fixed. Time
    spent waiting for the host does not grow, where the profile says what the device takes without it.

    >>> small = Profile(
    ...     name="small", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=1.0, backward_s=2.0,
    ...     update_s=0.5, gradients=(Gradient(name="w", bytes=4, ready_s=2.0),))
    >>> at_batch(small, 3).forward_s
    3.0
    >>> at_batch(small, 3, replace(small, batch_size=5, forward_s=2.0)).forward_s
    1.5
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: a worker needs at least one sample; use fewer workers")
    if batch_size == profile.batch_size:
        return profile
    return _proportional(profile, batch_size) if other is None else _through(profile, other, batch_size)


def strong_scaling(
    profile: Profile, global_batch: int, workers: int, *, accumulation: int | None = None, other: Profile | None = None
) -> Profile:
    """The profile of one worker where all of them share a batch of `global_batch` samples per iteration.

    Times lie on the line through the profile and `other`, a second one of the model at another batch size. A bundled
    profile finds its second one by itself.

    >>> profile = Profile.load("resnet50-b64-bf16-h200")
    >>> [strong_scaling(profile, 1024, workers).batch_size for workers in (8, 16)]
    [128, 64]
    """
    at_least("global batch", global_batch, 1)
    micro_batches = accumulation or profile.accumulation
    parts = workers * micro_batches
    if global_batch % parts:
        raise InputError(
            f"a global batch of {global_batch} does not divide by {workers} workers"
            + (f" × {micro_batches} micro-batches" if micro_batches != 1 else "")
            + ": choose a multiple, or fewer workers"
        )
    batch_size = global_batch // parts
    if batch_size == profile.batch_size:
        return profile
    other = other or sibling(profile)
    if other is None:
        raise InputError(
            f"strong scaling needs {profile.name!r} at a second batch size: profile it and give it as other "
            "(--other-batch FILE)"
        )
    return at_batch(profile, batch_size, other)


def extrapolates(profile: Profile, batch_size: int, other: Profile | None = None) -> bool:
    """Whether `strong_scaling` finds times at this batch size beyond those measured; it takes the same `other`.

    >>> [extrapolates(Profile.load("resnet50-b64-bf16-h200"), size) for size in (32, 96)]
    [True, False]
    """
    other = other or sibling(profile)
    sizes = [profile.batch_size] if other is None else [profile.batch_size, other.batch_size]
    return not min(sizes) <= batch_size <= max(sizes)


def sibling(profile: Profile) -> Profile | None:
    """For a bundled profile, another one of the same model, precision and device at another batch size.

    >>> sibling(Profile.load("resnet50-b64-bf16-h200")).name
    'resnet50-b128-bf16-h200'
    """
    if profile.name not in bundled(Profile) or profile != _bundled(profile.name):
        return None
    before, _, after = profile.name.partition(f"-b{profile.batch_size}-")
    pattern = re.compile(rf"{re.escape(before)}-b\d+-{re.escape(after)}")
    found = [_bundled(name) for name in bundled(Profile) if name != profile.name and pattern.fullmatch(name)]
    return next((other for other in found if _gradients(other) == _gradients(profile)), None)


@lru_cache(maxsize=32)
def _bundled(name: str) -> Profile:
    return Profile.load(bundled(Profile)[name])


def _gradients(profile: Profile) -> set[str]:
    return {gradient.name for gradient in profile.gradients}


def same_blocks(one: Profile, two: Profile) -> bool:
    return [block.name for block in one.blocks] == [block.name for block in two.blocks]


def _through(one: Profile, two: Profile, batch_size: int) -> Profile:
    """Times never fall below zero, and ready times keep the order of the profile nearer in size."""
    if one.batch_size == two.batch_size:
        raise InputError(
            f"{one.name} and {two.name} both have batch size {one.batch_size}: profile two different batch sizes"
        )
    if _gradients(one) != _gradients(two):
        raise InputError(f"{one.name} and {two.name} have different gradients: give two profiles of the same model")
    for field in ("precision", "device", "optimizer", "compiled"):
        first, second = getattr(one, field), getattr(two, field)
        if first is not None and second is not None and first != second:
            raise InputError(
                f"{one.name} and {two.name} differ in more than the batch size: {field} is {first!r} and {second!r}; "
                "give two profiles of the same training"
            )
    share = (batch_size - one.batch_size) / (two.batch_size - one.batch_size)

    def between(first: float, second: float) -> float:
        return max(first + share * (second - first), 0.0)

    def sizes_between(first: object, second: object, names: Iterable[str]) -> dict[str, int]:
        return {name: round(between(getattr(first, name), getattr(second, name))) for name in names}

    def block_between(first: Block, second: Block) -> Block:
        times = {name: between(getattr(first, name), getattr(second, name)) for name in _TIMES}
        return replace(first, **times, **sizes_between(first, second, _SIZES))

    near, far = (one, two) if share < 0.5 else (two, one)
    ready_far = {gradient.name: gradient.ready_s for gradient in far.gradients}
    weight = share if near is one else 1 - share
    backward = between(one.backward_s, two.backward_s)
    gradients: list[Gradient] = []
    ready = 0.0
    for gradient in near.gradients:
        seconds = gradient.ready_s + weight * (ready_far[gradient.name] - gradient.ready_s)
        ready = min(max(seconds, ready), backward)
        gradients.append(replace(gradient, ready_s=ready, forward_s=None, activation_bytes=None))
    note = f"times are between batch {one.batch_size} and {two.batch_size}, taken as linear"
    if extrapolates(one, batch_size, two):
        note = f"batch {batch_size} is extrapolated from batch {one.batch_size} and {two.batch_size}"
    scale = between(one.single_s, two.single_s) / near.single_s if near.single_s > 0 else 1.0
    device_s = None
    if one.device_s is not None or two.device_s is not None:
        device_s = between(*(device_alone(side).forward_s + device_alone(side).backward_s for side in (one, two)))
    alike = same_blocks(one, two)
    memory = one.memory if alike and two.memory is not None else None
    if memory is not None:
        memory = replace(memory, **sizes_between(memory, two.memory, _MEMORY_SIZES))
    return replace(
        near,
        batch_size=batch_size,
        name=f"{near.name} at batch {batch_size}",
        forward_s=between(one.forward_s, two.forward_s),
        backward_s=backward,
        update_s=between(one.update_s, two.update_s),
        device_s=device_s,
        iteration_s=tuple(seconds * scale for seconds in near.iteration_s),
        gradients=tuple(gradients),
        blocks=tuple(block_between(*pair) for pair in zip(one.blocks, two.blocks, strict=True)) if alike else (),
        memory=memory,
        buffer_bytes=one.buffer_bytes,
        notes=(*near.notes, note),
    )


def _proportional(one: Profile, batch_size: int) -> Profile:
    factor = slower = batch_size / one.batch_size
    whole = one.forward_s + one.backward_s
    if one.device_s is not None and one.device_s < whole:
        slower = max(one.device_s * factor / whole, 1.0)

    def larger(block: Block) -> Block:
        return replace(
            block,
            **{name: getattr(block, name) * slower for name in _TIMES},
            **{name: round(getattr(block, name) * factor) for name in _SIZES},
        )

    memory = one.memory
    if memory is not None:
        weights = memory.parameter_bytes + memory.optimizer_bytes + memory.buffer_bytes
        # Where the batch was not weighed, all that stays beside the weights is taken for it.
        batch = memory.batch_bytes or max(memory.steady_bytes - weights, 0)
        memory = replace(
            memory,
            steady_bytes=memory.steady_bytes + round(batch * (factor - 1)),
            peak_bytes=0,
            **{name: round(getattr(memory, name) * factor) for name in Memory.GROWTH.batch},
        )
    backward = one.backward_s * slower
    before = one.single_s
    after = one.accumulation * whole * slower + one.update_s
    return replace(
        one,
        name=f"{one.name} at batch {batch_size}",
        batch_size=batch_size,
        forward_s=one.forward_s * slower,
        backward_s=backward,
        device_s=None if one.device_s is None else one.device_s * factor,
        iteration_s=tuple(seconds * after / before for seconds in one.iteration_s) if before > 0 else (),
        gradients=tuple(
            replace(gradient, ready_s=min(gradient.ready_s * slower, backward)) for gradient in one.gradients
        ),
        blocks=tuple(larger(block) for block in one.blocks),
        memory=memory,
        notes=(*one.notes, f"batch {batch_size} is extrapolated from batch {one.batch_size}, all in proportion"),
    )
