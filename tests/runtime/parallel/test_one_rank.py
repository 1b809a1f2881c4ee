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


@pytest.mark.usefixtures("one_rank")
def test_one_rank_tries_the_example() -> None:
    """What it leaves unused, torch's DDP is told of; what does not run is said here, not on the cluster."""

    class Half(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self[0](batch)
            return found

    model = Half(nn.Linear(3, 2), nn.Linear(3, 2))
    with pytest.raises(InputError, match=r"a step of the example did not run: .*ZeroDivisionError"):
        parallelize(model, example=(torch.ones(4, 3), lambda *_: 1 / 0))
    wrapped = parallelize(model, example=(torch.ones(4, 3), loss))
    for _ in range(3):
        loss(wrapped, torch.ones(4, 3)).backward()
    assert model[1].weight.grad is None


def test_without_a_process_group() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        parallelize(nn.Linear(3, 2))
