"""Which gradients travel together, without any communication."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backbeat.errors import InputError
from backbeat.model import Bucket, Plan
from backbeat.runtime.reduce.partition import fill_buckets, plan_partition

sizes = st.lists(st.integers(1, 400), min_size=1, max_size=30)


def managed(counts: list[int], dtypes: list[torch.dtype] | None = None, **fields: Any) -> Any:
    """What a wrapper manages: parameters p0, p1, … of so many elements."""
    kinds = dtypes or [torch.float32] * len(counts)
    parameters = [nn.Parameter(torch.zeros(count, dtype=kind)) for count, kind in zip(counts, kinds, strict=True)]
    names = [f"p{index}" for index in range(len(counts))]
    plain = {"names": names, "parameters": parameters, "sparse": [False] * len(counts), "frozen": []}
    return SimpleNamespace(**{**plain, **fields})


@given(sizes, st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_are_torchs(counts: list[int], first: int, cap: int) -> None:
    found = managed(counts)
    order = list(reversed(range(len(counts))))
    expected, _ = dist._compute_bucket_assignment_by_size(
        [found.parameters[index] for index in order], [first, cap], [False] * len(order), order
    )
    assert fill_buckets(order, found, [first, cap]) == [list(b) for b in expected]


@given(sizes, st.data())
def test_every_parameter_travels_once_and_kinds_never_mix(counts: list[int], data: st.DataObject) -> None:
    kinds = data.draw(
        st.lists(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=len(counts), max_size=len(counts)
        )
    )
    names = [f"p{index}" for index in range(len(counts))]
    sparse = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    named = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True))
    plan = Plan(strategy="s", model="m", communicators=1, buckets=(Bucket(gradients=tuple(named), communicator=0),))
    found = plan_partition(plan, managed(counts, kinds, sparse=sparse))
    members = [index for bucket in found.buckets for index in bucket.members]
    assert sorted(members) == list(range(len(counts)))
    for bucket in found.buckets:
        assert len({kinds[index] for index in bucket.members}) == 1
        assert bucket.sparse == any(sparse[index] for index in bucket.members)
        assert not bucket.sparse or len(bucket.members) == 1


def test_a_plan_for_another_model_is_refused_by_name() -> None:
    plan = Plan(
        strategy="s", model="resnet", communicators=1, buckets=(Bucket(gradients=("fc.wieght",), communicator=0),)
    )
    with pytest.raises(InputError, match=r"buckets\[0\] names 'fc.wieght'.*nearest: 'fc.weight'.*made for 'resnet'"):
        plan_partition(plan, managed([3], names=["fc.weight"]))


def test_a_frozen_parameter_in_the_plan_is_left_out() -> None:
    plan = Plan(strategy="s", model="m", communicators=1, buckets=(Bucket(gradients=("a", "b"), communicator=0),))
    found = plan_partition(plan, managed([3], names=["a"], frozen=[("b", None)]))
    assert [bucket.members for bucket in found.buckets] == [(0,)]
