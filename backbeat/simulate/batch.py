"""The same model at another batch size: between two that were profiled."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from backbeat.errors import InputError
from backbeat.model import Gradient, Profile
from backbeat.model.files import bundled


def at_batch(one: Profile, two: Profile, batch_size: int) -> Profile:
    """Every time taken as linear in the batch size, through the two profiles; outside them it is extrapolated.

    Times never fall below zero, and ready times keep the order of the profile nearer in size.
    """
    _check_same_model(one, two)
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: a worker needs at least one sample; use fewer workers")
    share = (batch_size - one.batch_size) / (two.batch_size - one.batch_size)

    def between(first: float, second: float) -> float:
        return max(first + share * (second - first), 0.0)

    near, far = (one, two) if share < 0.5 else (two, one)
    other = {gradient.name: gradient for gradient in far.gradients}
    weight = share if near is one else 1 - share
    backward = between(one.backward_s, two.backward_s)
    gradients: list[Gradient] = []
    ready = 0.0
    for gradient in near.gradients:
        seconds = gradient.ready_s + weight * (other[gradient.name].ready_s - gradient.ready_s)
        ready = min(max(seconds, ready), backward)
        gradients.append(msgspec.structs.replace(gradient, ready_s=ready, forward_s=None, activation_bytes=None))
    notes = list(near.notes)
    notes.append(f"times are between batch {one.batch_size} and {two.batch_size}, taken as linear")
    if not min(one.batch_size, two.batch_size) <= batch_size <= max(one.batch_size, two.batch_size):
        notes[-1] = f"batch {batch_size} is extrapolated from batch {one.batch_size} and {two.batch_size}"
    scale = between(one.single_s, two.single_s) / near.single_s if near.single_s > 0 else 1.0
    return msgspec.structs.replace(
        near,
        batch_size=batch_size,
        name=f"{near.name} at batch {batch_size}",
        forward_s=between(one.forward_s, two.forward_s),
        backward_s=backward,
        update_s=between(one.update_s, two.update_s),
        iteration_s=tuple(seconds * scale for seconds in near.iteration_s),
        gradients=tuple(gradients),
        memory=None,
        notes=tuple(notes),
    )


def sibling(one: Profile, name: str, load: Callable[[str], Profile] = Profile.load) -> Profile | None:
    """A bundled profile of the same model, precision and device at another batch size than the one of this name."""
    pattern = re.compile(re.sub(r"-b\d+-", r"-b\\d+-", re.escape(name).replace(r"\-", "-")))
    wanted = {gradient.name for gradient in one.gradients}
    others = (load(other) for other in bundled(Profile) if other != name and pattern.fullmatch(other))
    return next((two for two in others if {gradient.name for gradient in two.gradients} == wanted), None)


def _check_same_model(one: Profile, two: Profile) -> None:
    if one.batch_size == two.batch_size:
        raise InputError(
            f"{one.name} and {two.name} both have batch size {one.batch_size}: profile two different batch sizes"
        )
    if {gradient.name for gradient in one.gradients} != {gradient.name for gradient in two.gradients}:
        raise InputError(f"{one.name} and {two.name} have different gradients: give two profiles of the same model")
