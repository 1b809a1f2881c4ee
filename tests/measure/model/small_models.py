"""A small classifier with its batch and loss, and options for a quick profile."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

QUICK = {"iterations": 3, "warmup": 1}


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def images(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 8), torch.randint(0, 4, (count,))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])
