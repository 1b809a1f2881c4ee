"""A compressed bucket by itself: what gradients add to its residual; and who updates what."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest
import torch
from torch.nn import Parameter

from backbeat.runtime.compressed import topk, updates
from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
from backbeat.runtime.compressed.residual import Scratch, Store
from backbeat.runtime.compressed.topk import TopK
from backbeat.runtime.compressed.updates import Updates
from backbeat.runtime.reduce.partition import BucketSpec


@pytest.mark.parametrize("hosts", [{"cpu"}, set()], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_elements_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, hosts: set[str], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(topk, "HOSTS", hosts)
    parameters = [Parameter(torch.ones(shape, dtype=dtype)) for shape in (3, (0, 4), (2, 2))]
    bucket = CompressedBucket(
        BucketSpec(members=(0, 1, 2), communicator=0),
        parameters,
        compressor=TopK(0.5),
        store=Store(7, torch.float32, torch.device("cpu"), velocity=False),
        dense=True,
        momentum_of=None,
        gathering=Scratch(),
    )
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        assert bucket.take_all()
        assert all(parameter.grad is None for parameter in parameters)
    assert torch.cat([value.reshape(-1) for value, _ in bucket.held().values()]).tolist() == [1.0] * 7
    assert bucket.take_refused() == []


class Owner:
    def check(self) -> None:
        """`step()` may be called."""


def test_ever_other_parameters_of_a_bucket_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_MOST_SHARES", 8)
    parameters = [Parameter(torch.ones(1)) for _ in range(6)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    owner = Owner()
    known = Updates(owner.check, momentum_correction=False)
    known.add(optimizer, max_grad_norm=None)
    known.check([f"p{index}" for index in range(6)], parameters)
    steps = [0] * 6
    held = [sys.getrefcount(parameter) for parameter in parameters]
    for chosen in [*combinations(range(6), 3), *combinations(range(6), 2)]:
        for index in chosen:
            parameters[index].grad = torch.ones(1)
            steps[index] += 1
        known.apply([parameters[index] for index in chosen], without_momentum=False)
        # What is looked up for parameters that are updated together holds these.
        assert max(sys.getrefcount(one) - before for one, before in zip(parameters, held, strict=True)) <= 9
    assert [parameter.item() for parameter in parameters] == [1 - 0.5 * count for count in steps]
