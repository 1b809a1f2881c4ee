"""Messages of all three formats give back what was written into them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.runtime.compressed.topk import format_of


@given(
    numel=st.sampled_from([1, 77, 65_536, 65_537, 300_000]),
    density=st.floats(1e-5, 1.0),
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_indices_and_values_come_back_as_they_were(numel: int, density: float, seed: int, ranks: int) -> None:
    form = format_of(numel, density)
    rows, messages = [], []
    for rank in range(ranks):
        source = torch.Generator().manual_seed(seed + rank)
        indices = torch.randperm(numel, generator=source)[: form.count].sort().values
        values = torch.randn(form.count, generator=source)
        message = torch.empty(form.bytes, dtype=torch.uint8)
        form.write_indices(indices, message)
        form.values(message).copy_(values)
        rows.append((indices, values))
        messages.append(message)
    for (indices, values), found, numbers in zip(rows, *form.unpack(torch.cat(messages)), strict=True):
        assert torch.equal(found, indices)
        assert torch.equal(numbers, values)
