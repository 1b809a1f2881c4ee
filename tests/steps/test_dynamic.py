"""Horovod's run-time fusion."""

from __future__ import annotations

import pytest

from backbeat.model import DynamicFusion
from backbeat.steps.fusion import fuse
from tests.problems import affine, make_profile

COST = affine(1e-3, 1e-9).cost
NO_COPY = 1e300


def test_whatever_is_ready_at_the_tick_travels_together() -> None:
    profile = make_profile([10**6] * 4, [0.2e-3, 0.9e-3, 1.5e-3, 9e-3])
    flow, ends, _ = fuse(profile, COST, DynamicFusion(copy_bytes_per_s=NO_COPY))
    # At 1 ms two are ready: 1 + 2 ms. At 4 ms the third: 2 ms. The fourth at 9 ms.
    assert ends == [2, 3, 4]
    assert flow.starts == pytest.approx([1e-3, 4e-3, 9e-3])
    assert flow.finishes == pytest.approx([4e-3, 6e-3, 11e-3])


def test_the_buffer_bounds_a_group_and_a_larger_tensor_travels_alone() -> None:
    profile = make_profile([600, 600, 5000, 100], [0.0, 0.0, 0.0, 0.0], backward=1e-3)
    assert fuse(profile, COST, DynamicFusion(buffer_bytes=1000))[1] == [1, 2, 3, 4]
    assert fuse(profile, COST, DynamicFusion(buffer_bytes=1200))[1] == [2, 3, 4]


def test_fused_groups_pay_two_copies_and_single_tensors_none() -> None:
    two = make_profile([10**6, 10**6], [0.0, 0.0])
    settings = DynamicFusion(copy_bytes_per_s=1e9)
    assert fuse(two, COST, settings)[0].end_s == pytest.approx(3e-3 + 2 * 2e-3)
    one = make_profile([2 * 10**6], [0.0])
    assert fuse(one, COST, settings)[0].end_s == pytest.approx(3e-3)


def test_cycle_time_delays_the_start() -> None:
    profile = make_profile([10**6], [1e-4], backward=1e-3)
    assert fuse(profile, COST, DynamicFusion(cycle_s=5e-3))[0].starts.tolist() == [5e-3]
