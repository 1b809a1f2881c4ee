"""`reducer="ddp"` is torch's own wrapper with the plan's buckets, whatever is done to it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario_rig import mlp, small_plan
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.runtime import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("one_rank")


def made() -> TorchDDP:
    torch.manual_seed(1)
    model = mlp()
    return DistributedDataParallel(model, plan=small_plan(model, communicators=2), reducer="ddp")


def gradients(model: TorchDDP) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) == 8 and all(map(torch.equal, one, other))


def test_it_is_torchs_wrapper_and_reducer() -> None:
    wrapped = made()
    assert isinstance(wrapped, TorchDDP)
    assert not isinstance(wrapped, DistributedDataParallel)
    assert isinstance(wrapped.reducer, dist.Reducer)
    assert alike(gradients(wrapped), gradients(made()))


def test_it_carries_one_thing_beside_torchs_own() -> None:
    assert vars(made()).keys() - vars(TorchDDP(mlp())).keys() == {"stock"}


@pytest.mark.parametrize("options", [{}, {"communicators": 2}, {"reduce_dtype": torch.bfloat16}], ids=str)
def test_copies_train_too(options: dict[str, Any]) -> None:
    wrapped = DistributedDataParallel(mlp(), reducer="ddp", **options)
    expected = gradients(wrapped)
    copied = copy.deepcopy(wrapped)
    assert alike(gradients(copied), expected)
    assert alike(gradients(copy.deepcopy(copied)), expected)
    assert [hook for hook, _ in copied._comm_hooks] == [hook for hook, _ in wrapped._comm_hooks]
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(wrapped)
    assert alike(gradients(loaded), expected)


def test_buckets_below_torchs_first_can_be_compiled() -> None:
    wrapped = made()
    expected = gradients(wrapped)
    wrapped.compile(backend="eager")
    assert alike(gradients(wrapped), expected)
    torch._dynamo.reset()


def test_what_needs_our_reducer_is_refused() -> None:
    wrapped = made()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.attach(optimizer, max_grad_norm=None)
    with pytest.raises(InputError, match="no bucket of the plan is compressed"):
        wrapped.attach(optimizer, max_grad_norm=1.0)
    with pytest.raises(InputError, match=r"use backbeat\.runtime\.Watch"):
        wrapped.report()


def test_a_class_derived_from_ours_keeps_our_reducer() -> None:
    class Derived(DistributedDataParallel):
        pass

    assert type(Derived(mlp())) is Derived
    with pytest.raises(InputError, match="a class of its own"):
        Derived(mlp(), reducer="ddp")
