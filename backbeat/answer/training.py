"""What a whole training takes: hours, GPU-hours and money."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Prediction
from backbeat.model.prediction import Cost

WORK = ("tokens", "samples")
OF_THE_WORK = ("price", "deadline", "goodput")


def check_training(given: Mapping[str, Any], *, sequences: bool) -> None:
    """Refuse what says too little, or the same twice; `sequences` is whether samples are such."""
    if "epochs" in given and "samples" not in given:
        raise InputError(f"epochs is {given['epochs']:g}: passes over how many samples? say it with samples")
    if "tokens" in given and "samples" in given:
        raise InputError("tokens and samples both say how much is trained: leave one out")
    for name in OF_THE_WORK:
        if name in given and not set(WORK) & set(given):
            raise InputError(f"{name} is {given[name]:g}, of how much? say what is trained with tokens or samples")
    if "tokens" in given and not sequences:
        raise InputError(f"tokens is {given['tokens']:g}, but this model's samples are no sequences: give samples")


def with_cost(found: Prediction, given: Mapping[str, Any]) -> Prediction:
    """The prediction with what the training takes, where it was said how much is trained."""
    samples = given.get("samples", 0.0) * given.get("epochs", 1.0)
    if "tokens" in given and found.sequence:
        samples = given["tokens"] / found.sequence
    if not samples or found.samples_per_s <= 0:
        return found
    hours = samples / found.samples_per_s / 3600 / given.get("goodput", 1.0)
    price = given.get("price")
    gpu_hours = hours * found.gpus
    return replace(found, cost=Cost(hours, gpu_hours, None if price is None else gpu_hours * price))
