"""Computed profiles of models that recompute their blocks in backward, with dropout in the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory

WIDTH, LENGTH = 512, 256


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.projections(hidden).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return hidden + mixed.transpose(1, 2).flatten(2)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 8, dropout=0.1, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            plain = self.reentrant is None
            hidden = block(hidden) if plain else checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


def computed(block: type[nn.Module], reentrant: bool | None) -> Any:
    def factory(batch_size: int = 32) -> Any:
        batch = torch.randn(batch_size, LENGTH, WIDTH)
        return Blocks(block, reentrant), batch, lambda model, batch: model(batch).sum()

    return analytic_profile(
        inspect_factory(factory, "tests:factory"), gpu="h100", precision="fp32", launch_overhead=False
    )


@pytest.mark.parametrize("block", [Direct, Module])
def test_backward_takes_one_more_forward_of_the_blocks(block: type[nn.Module]) -> None:
    plain = computed(block, None)
    inside_s = sum(gradient.forward_s for gradient in plain.gradients if not gradient.name.startswith("first"))
    for reentrant in (False, True):
        again = computed(block, reentrant)
        assert again.forward_s == pytest.approx(plain.forward_s, rel=1e-6)
        assert again.backward_s == pytest.approx(plain.backward_s + inside_s, rel=0.06)
        assert again.memory.activation_bytes < plain.memory.activation_bytes / 2


def test_attention_is_as_it_was_afterwards() -> None:
    computed(Direct, None)
    ones = torch.ones(1, 1, 64, 64)
    torch.manual_seed(0)
    assert (scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5) != 1).any()
