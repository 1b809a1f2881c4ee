"""One training measured at several batch sizes, and the same at others: through those that were measured, or in
proportion. Strong scaling uses it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model.blocks import Block
from backbeat.model.checks import at_least
from backbeat.model.files import bundled
from backbeat.model.profile import BatchRow, Gradient, Memory, Profile, device_alone

_ALIKE = ("precision", "gradient_dtype", "device", "optimizer", "compiled", "accumulation", "sequence_length")
_MEMORY_SIZES = [name for name in Memory.__struct_fields__ if name.endswith("_bytes")]
_TIMES, _SIZES = ([name for name in Block.GROWTH.batch if name.endswith(unit)] for unit in ("_s", "_bytes"))


def join(profile: Profile, *others: Profile) -> Profile:
    """The profile with what others say of the same training at other batch sizes.

    >>> join(Profile.load("vgg16-b64-bf16-h200"), Profile.load("vgg16-b128-bf16-h200")).batches[0].batch_size
    128
    """
    others = tuple(each for other in others for each in measured(other))
    for other in others:
        if other.batch_size == profile.batch_size:
            raise InputError(
                f"{profile.name} and {other.name} both have batch size {other.batch_size}: profile two different batch "
                "sizes"
            )
        if other.index.keys() != profile.index.keys():
            raise InputError(
                f"{profile.name} and {other.name} have different gradients: give profiles of the same model"
            )
        for field in _ALIKE:
            one, two = getattr(profile, field), getattr(other, field)
            if one is not None and two is not None and one != two:
                raise InputError(
                    f"{profile.name} and {other.name} differ in more than the batch size: {field} is {one!r} and "
                    f"{two!r}; give profiles of the same training"
                )
    return replace(profile, batches=(*profile.batches, *(_row(profile, other) for other in others)))


def measured(profile: Profile) -> list[Profile]:
    """The training at each batch size that was measured, the smallest first.

    >>> pair = join(Profile.load("vgg16-b128-bf16-h200"), Profile.load("vgg16-b64-bf16-h200"))
    >>> [one.batch_size for one in measured(pair)]
    [64, 128]
    """
    alone = replace(profile, batches=())
    return sorted([alone, *(_at(alone, row) for row in profile.batches)], key=lambda one: one.batch_size)


def same_blocks(one: Profile | BatchRow, two: Profile | BatchRow) -> bool:
    return [block.name for block in one.blocks] == [block.name for block in two.blocks]


def _row(profile: Profile, other: Profile) -> BatchRow:
    return BatchRow(
        ready_s=tuple(other.gradients[other.index[gradient.name]].ready_s for gradient in profile.gradients),
        **{name: getattr(other, name) for name in BatchRow.__struct_fields__ if name != "ready_s"},
    )


def _at(profile: Profile, row: BatchRow) -> Profile:
    """What a module's forward takes, and what is saved there, is known of the profile's own batch size alone."""
    gradients = [
        replace(gradient, ready_s=ready_s, forward_s=None, activation_bytes=None)
        for gradient, ready_s in zip(profile.gradients, row.ready_s, strict=True)
    ]
    return replace(
        profile,
        gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        **{name: getattr(row, name) for name in BatchRow.__struct_fields__ if name != "ready_s"},
    )


def at_batch(profile: Profile, batch_size: int) -> Profile:
    """The profile at another batch size; its last note says how the times were found.

    Measured at several, every time and size is a fixed part and one that grows with the batch, through the nearest two;
    outside all of them it is extrapolated. Blocks and memory are kept only where both have the same blocks. Measured at
    one, all of each grows with the batch, which overstates a larger batch wherever some part is fixed. Time spent
    waiting for the host does not grow, where the profile says what the device takes without it.

    >>> small = Profile(
    ...     name="small", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=1.0, backward_s=2.0,
    ...     update_s=0.5, gradients=(Gradient(name="w", bytes=4, ready_s=2.0),))
    >>> at_batch(small, 3).forward_s
    3.0
    >>> at_batch(join(small, replace(small, batch_size=5, forward_s=2.0)), 3).forward_s
    1.5
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: a worker needs at least one sample; use fewer workers")
    if batch_size == profile.batch_size:
        return profile
    found = measured(profile)
    sizes = [one.batch_size for one in found]
    if len(found) == 1:
        there = _proportional(profile, batch_size)
    elif batch_size in sizes:
        exact = found[sizes.index(batch_size)]
        there = replace(exact, notes=(*exact.notes, f"times are as measured at batch {batch_size}"))
    else:
        after = min(max(bisect_left(sizes, batch_size), 1), len(found) - 1)
        there = _through(found[after - 1], found[after], batch_size)
    return replace(there, name=f"{profile.name} at batch {batch_size}")


def strong_scaling(profile: Profile, global_batch: int, workers: int, *, accumulation: int | None = None) -> Profile:
    """The profile of one worker where all of them share a batch of `global_batch` samples per iteration.

    The profile knows a second batch size, or is a bundled one with a sibling that does.

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
    known = with_sibling(profile)
    if not known.batches:
        raise InputError(
            f"strong scaling needs {profile.name!r} at a second batch size: profile it at both "
            f"(`backbeat profile --batch {profile.batch_size},{2 * profile.batch_size}`)"
        )
    return at_batch(known, batch_size)


def extrapolates(profile: Profile, batch_size: int) -> bool:
    """Whether `strong_scaling` finds times at this batch size beyond those measured.

    >>> [extrapolates(Profile.load("resnet50-b64-bf16-h200"), size) for size in (32, 96)]
    [True, False]
    """
    sizes = [one.batch_size for one in measured(with_sibling(profile))]
    return not sizes[0] <= batch_size <= sizes[-1]


def with_sibling(profile: Profile) -> Profile:
    """A bundled profile with another of the same model, precision and device at another batch size; any other as it is.

    >>> with_sibling(Profile.load("resnet50-b64-bf16-h200")).batches[0].batch_size
    128
    """
    if profile.batches or profile.name not in bundled(Profile) or profile != _bundled(profile.name):
        return profile
    before, _, after = profile.name.partition(f"-b{profile.batch_size}-")
    pattern = re.compile(rf"{re.escape(before)}-b\d+-{re.escape(after)}")
    found = [_bundled(name) for name in bundled(Profile) if name != profile.name and pattern.fullmatch(name)]
    alike = next((other for other in found if other.index.keys() == profile.index.keys()), None)
    return profile if alike is None else join(profile, alike)


@lru_cache(maxsize=32)
def _bundled(name: str) -> Profile:
    return Profile.load(bundled(Profile)[name])


def _through(one: Profile, two: Profile, batch_size: int) -> Profile:
    """Ready times keep the order of the profile nearer in size. No figure falls below zero, and what was less at the
    larger batch of the two is not extrapolated further down: that is noise, or another kernel."""
    share = (batch_size - one.batch_size) / (two.batch_size - one.batch_size)

    def between(first: float, second: float) -> float:
        steps = min(max(share, 0.0), 1.0) if second < first else share
        return max(first + steps * (second - first), 0.0)

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
    if not 0 < share < 1:
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
