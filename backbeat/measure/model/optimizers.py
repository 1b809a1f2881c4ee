"""The optimizer a model is measured with: one by name where the factory brings none, and what to call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backbeat.errors import InputError

OPTIMIZERS = ("sgd", "adam", "adamw")


def make_optimizer(kind: str, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam or AdamW in their fused form, as trainers of transformers run them."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    if kind not in OPTIMIZERS:
        raise InputError(f"optimizer is {kind!r}: it must be one of {', '.join(OPTIMIZERS)}")
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    if not any(parameter.is_meta for parameter in parameters):
        return adam(parameters, lr=1e-4, fused=True)
    # Torch refuses to fuse tensors without data; what runs on them is estimated, and only needs to know the choice.
    made = adam(parameters, lr=1e-4)
    for settings in (made.defaults, *made.param_groups):
        settings["fused"] = True
    return made


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its class and what changes its memory or its time.

    >>> weight = [torch.nn.Parameter(torch.zeros(1))]
    >>> describe_optimizer(make_optimizer("sgd", weight)), describe_optimizer(make_optimizer("adamw", weight))
    ('SGD with momentum', 'AdamW, fused')
    """
    defaults = getattr(optimizer, "defaults", {})
    momentum = " with momentum" if defaults.get("momentum") else ""
    return f"{type(optimizer).__name__}{momentum}{', fused' if defaults.get('fused') else ''}"
