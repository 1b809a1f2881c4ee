"""BatchNorm whose parameters are gathered in another dtype than its statistics have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backbeat.runtime.sharded.batchnorm import keep_statistics_dtype


def gathered(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """With parameters as FSDP2 leaves them in forward; buffers stay in fp32."""
    for name in ("weight", "bias"):
        setattr(norm, name, nn.Parameter(getattr(norm, name).detach().to(torch.bfloat16)))
    return norm


def hooks(norm: nn.Module) -> int:
    return len(norm._forward_pre_hooks) + len(norm._forward_hooks)


def test_parameters_are_widened_for_each_forward_and_stay_what_they_are() -> None:
    norm = nn.BatchNorm1d(3)
    keep_statistics_dtype([nn.Sequential(nn.Linear(3, 3), nn.Sequential(norm))], torch.bfloat16)
    gathered(norm)
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append((module.weight.dtype, module.bias.dtype)))
    parameter = norm.weight
    norm(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
    assert seen == [(torch.float32, torch.float32)]
    assert norm.weight is parameter
    assert parameter.grad is not None
    assert norm.bias.grad is not None
    # Also where forward raises.
    with pytest.raises(RuntimeError):
        norm(torch.randn(4, 5, dtype=torch.bfloat16))
    assert norm.weight is parameter


def test_once_and_only_where_dtypes_differ() -> None:
    norm = nn.BatchNorm1d(3)
    for dtype in (None, torch.float32):
        keep_statistics_dtype([norm], dtype)
    assert hooks(norm) == 0
    for _ in range(2):
        keep_statistics_dtype([nn.Sequential(norm)], torch.bfloat16)
    assert hooks(norm) == 2
    for other in (nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)):
        keep_statistics_dtype([other], torch.bfloat16)
        assert hooks(other) == 0
