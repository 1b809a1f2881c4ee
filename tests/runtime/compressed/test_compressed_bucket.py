"""A compressed bucket by itself: what gradients add to its residual; and who updates what."""

from __future__ import annotations

import sys
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from backbeat.runtime.compressed import attached_optimizers, topk
from backbeat.runtime.compressed.attached_optimizers import AttachedOptimizers
from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
from backbeat.runtime.compressed.stores import Scratch, Store
from backbeat.runtime.compressed.topk import TopK
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
    assert torch.cat([value.reshape(-1) for value, _ in bucket.owed().values()]).tolist() == [1.0] * 7
    assert bucket.faults() == []


def test_a_frozen_member_that_gets_late_gradients_is_owed_all_of_them() -> None:
    parameters = [Parameter(torch.zeros(3)), Parameter(torch.zeros(4))]
    bucket = CompressedBucket(
        BucketSpec(members=(0, 1), communicator=0),
        parameters,
        compressor=TopK(0.5),
        store=Store(7, torch.float32, torch.device("cpu"), velocity=True),
        dense=True,
        momentum_of=lambda parameter: (0.5, 0.0),
        gathering=Scratch(),
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert bucket.take_all()
    parameters[0].requires_grad_(False)
    step: Any = SimpleNamespace(contributes_nothing=False, arrivals=SimpleNamespace(arrived_since_reduce=[0, 0]))
    bucket.pack(step)
    for _ in range(2):
        parameters[0].grad = torch.full((3,), 4.0)
        bucket.keep_late(0)
        values, velocity = bucket.owed()[0]
        bucket.pack(step)
        assert torch.equal(values, bucket.owed()[0][0])
    # Velocities begin anew where the first is frozen: 4, and what is owed is the sum of 1, 4 and 4.
    assert values.tolist() == [9.0] * 3
    assert velocity is not None
    assert velocity.tolist() == [9.0] * 3
    # Free again, it moves on: the residual gets 0.5 times the velocity, though no gradient came.
    parameters[0].requires_grad_(True)
    bucket.pack(step)
    values, velocity = bucket.owed()[0]
    assert values.tolist() == [13.5] * 3
    assert velocity is not None
    assert velocity.tolist() == [4.5] * 3


def test_what_comes_late_is_part_of_a_step_that_was_taken() -> None:
    """Momentum and weight decay act once a step, however many gradients it has."""
    parameter = Parameter(torch.full((3,), 2.0))
    bucket = CompressedBucket(
        BucketSpec(members=(0,), communicator=0),
        [parameter],
        compressor=TopK(1.0),
        store=Store(3, torch.float32, torch.device("cpu"), velocity=True),
        dense=False,
        momentum_of=lambda parameter: (0.5, 0.25),
        gathering=Scratch(),
    )
    for velocity, late in ((1.0 + 0.5, 4.0), (0.5 * 5.5 + 1.5, 0.0)):
        parameter.grad = torch.ones(3)
        assert bucket.take_all()
        values, held = bucket.owed()[0]
        assert held is not None
        assert held.tolist() == [velocity] * 3
        # What was sent before is gone; what came late was kept.
        assert values.tolist() == [velocity + (4.0 if velocity > 2 else 0.0)] * 3
        bucket.begin(scale=1.0, density=1.0)
        parameter.grad = torch.full((3,), late)
        bucket.keep_late(0)


class Owner:
    def check(self) -> None:
        """`step()` may be called."""


def test_ever_other_parameters_of_a_bucket_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_optimizers, "_MOST_SHARES", 8)
    parameters = [Parameter(torch.ones(1)) for _ in range(6)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    owner = Owner()
    known = AttachedOptimizers(owner.check, momentum_correction=False)
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
