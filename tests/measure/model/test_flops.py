"""FLOPs and sequence lengths of profiles, measured and computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import QUICK
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from backbeat.measure import profile
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory
from backbeat.measure.model.inputs import sequence_length

TOKENS, WIDTH, WORDS, BATCH = 32, 64, 100, 4


class Language(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.reentrant = reentrant

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.projections(hidden).chunk(3, -1))
        return scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        plain = self.reentrant is None
        return self.head(self.mix(hidden) if plain else checkpoint(self.mix, hidden, use_reentrant=self.reentrant))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens(batch_size: int = BATCH) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch_size, TOKENS))


PRODUCTS = 2 * TOKENS * (WIDTH * 3 * WIDTH + WIDTH * WORDS)
ATTENTION = 2 * 2 * TOKENS * TOKENS * WIDTH
BY_HAND = 3 * (PRODUCTS + ATTENTION)
"""A product's backward is two products. Attention's computes the scores again, which the model does not need."""


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_flops_are_those_of_forward_and_backward_recomputed_or_not(reentrant: bool | None) -> None:
    result = profile(Language(reentrant), tokens(), loss, accumulation=2, **QUICK)
    assert result.flops_per_sample == pytest.approx(BY_HAND)
    assert result.sequence_length == TOKENS


def test_a_computed_profile_has_the_same() -> None:
    def factory(batch_size: int = BATCH) -> Any:
        return Language(), tokens(batch_size), loss

    result = analytic_profile(inspect_factory(factory, "tests:factory"), gpu="h100", batch_size=8)
    assert result.flops_per_sample == pytest.approx(BY_HAND)
    assert result.sequence_length == TOKENS


def test_a_model_without_products_says_why_it_has_no_flops() -> None:
    model, batch = nn.LayerNorm(8), torch.randn(4, 8)
    result = profile(model, batch, lambda model, batch: model(batch).pow(2).sum(), **QUICK)
    assert result.flops_per_sample is None
    assert result.sequence_length is None
    assert any(note.startswith("no FLOPs:") for note in result.notes)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"labels": torch.zeros(2, 7, dtype=torch.long), "input_ids": torch.zeros(2, 9, dtype=torch.long)}, 9),
        ((torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2)), 5),
        (torch.zeros(2, 5), None),
        ((torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.long)), None),
        (torch.zeros(2, 0, dtype=torch.long), None),
        (3, None),
    ],
)
def test_sequence_length(batch: Any, length: int | None) -> None:
    assert sequence_length(batch) == length
