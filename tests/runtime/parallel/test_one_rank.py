"""`parallelize` where there is nothing to send, or nobody to send to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.runtime import parallelize


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_is_stock_ddp(capfd: pytest.CaptureFixture[str]) -> None:
    model = parallelize(nn.Linear(3, 2), example=(torch.ones(4, 3), loss))
    assert isinstance(model, TorchDDP)
    loss(model, torch.ones(4, 3)).backward()
    assert "there is one rank, and nothing to send" in capfd.readouterr().err
    with pytest.raises(InputError, match="there is one rank"):
        parallelize(nn.Linear(3, 2), example=(torch.ones(4, 3), loss), memory="1GB")


def test_without_a_process_group() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        parallelize(nn.Linear(3, 2))
