"""What a GPU runs where the CPU runs something else."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.measure.model.estimator import gpu_operators, unpacked_sequences


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def names(call: Any) -> list[str]:
    with gpu_operators(contextlib.nullcontext), Names() as mode:
        call()
    return mode.seen


def test_powers_and_norms_are_wide_under_autocast_and_as_they_were_afterwards() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with gpu_operators(contextlib.nullcontext):
            assert torch.pow(x, 3.0).dtype == torch.float32
            assert functional.layer_norm(x, (8,)).dtype == torch.float32
        assert torch.pow(x, 3.0).dtype == torch.bfloat16
    with gpu_operators(contextlib.nullcontext):
        assert torch.pow(x, 3.0).dtype == torch.bfloat16


def test_dropout_is_one_kernel_and_none_where_nothing_is_dropped() -> None:
    x = torch.randn(16, requires_grad=True)
    assert names(lambda: functional.dropout(x, 0.1)) == ["native_dropout"]
    assert names(lambda: functional.dropout(x, 0.0)) == []


def test_attention_with_dropout_and_shared_keys_is_one_kernel() -> None:
    query, key = torch.randn(1, 8, 16, 8), torch.randn(1, 2, 16, 8)
    seen = names(
        lambda: functional.scaled_dot_product_attention(query, key, key, dropout_p=0.1, is_causal=True, enable_gqa=True)
    )
    assert sum("attention" in name for name in seen) == 1
    assert "softmax" not in " ".join(seen)


def test_sequences_are_taken_not_to_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    masking = SimpleNamespace(find_packed_sequence_indices=lambda positions: positions)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    with unpacked_sequences():
        assert masking.find_packed_sequence_indices(1) is None
    assert masking.find_packed_sequence_indices(1) == 1
