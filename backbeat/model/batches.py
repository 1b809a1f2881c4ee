"""One training measured at several batch sizes: a profile with a row for each, and each as a profile of its own."""

from __future__ import annotations

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model.profile import BatchRow, Profile

_ALIKE = ("precision", "gradient_dtype", "device", "optimizer", "compiled", "accumulation", "sequence_length")


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
