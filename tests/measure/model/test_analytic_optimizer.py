"""Computed profiles count the optimizer that the factory returns: its update, and the memory of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from backbeat.errors import InputError
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from backbeat.model import Profile


def computed(optimizer: Callable[[Any], Any] | None) -> Profile:
    def factory(batch_size: int = 8, device: str = "cpu") -> Any:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
        made = model, torch.randn(batch_size, 512, device=device), lambda model, batch: model(batch).sum()
        return made if optimizer is None else (*made, optimizer(model.parameters()))

    return analytic_profile(inspect_factory(factory, "tests:factory"), gpu="h100")


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (None, 1),
        (lambda weights: torch.optim.SGD(weights, lr=0.1), 0),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 1),
        (torch.optim.Adam, 2),
        (torch.optim.AdamW, 2),
        (lambda weights: torch.optim.AdamW(weights, fused=True), 2),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), 3),
        (torch.optim.RMSprop, 1),
    ],
    ids=["none", "sgd", "momentum", "adam", "adamw", "fused", "amsgrad", "rmsprop"],
)
def test_memory_of_the_state(optimizer: Callable[[Any], Any] | None, states: int) -> None:
    profile = computed(optimizer)
    assert profile.memory is not None
    assert profile.memory.optimizer_bytes == states * profile.memory.parameter_bytes
    held = profile.memory.optimizer_bytes + profile.memory.parameter_bytes
    assert profile.memory.steady_bytes >= held


def test_the_update_of_adamw_takes_longer_than_that_of_sgd() -> None:
    plain, momentum, adamw = (
        computed(build).update_s
        for build in (lambda weights: torch.optim.SGD(weights, lr=0.1), None, torch.optim.AdamW)
    )
    assert plain < momentum < adamw


def test_the_optimizer_is_named() -> None:
    assert computed(torch.optim.AdamW).optimizer == "AdamW"
    assert computed(None).optimizer == "SGD with momentum"


def test_what_is_no_torch_optimizer_is_refused() -> None:
    class Own:
        def __init__(self, _weights: Any) -> None: ...

        def step(self) -> None: ...

    with pytest.raises(InputError, match=r"is a Own, no torch\.optim\.Optimizer"):
        computed(Own)
