"""Residuals: what is added to them, and host buffers that hold what was written."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backbeat.runtime.compressed.residual import accumulate, add_all
from backbeat.runtime.compressed.stores import HostBuffers, drop_infinite


def test_a_gradient_that_is_not_finite_is_not_added() -> None:
    targets = [torch.ones(3), torch.ones(2), torch.ones(2)]
    gradients = [torch.ones(3), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 0.0])]
    assert accumulate(targets, gradients) == [False, True, True]
    assert [target.tolist() for target in targets] == [[2, 2, 2], [1, 1], [1, 1]]


def test_gradients_of_another_dtype_are_widened_in_a_buffer_of_their_own() -> None:
    flat, buffer = torch.full((4,), 9.0), torch.zeros(4)
    gradients = [torch.ones(2).bfloat16(), torch.tensor([float("nan")]).bfloat16()]
    add_all(flat, [flat[:2], flat[2:3]], gradients, (buffer, [buffer[:2], buffer[2:3]]))
    drop_infinite(flat)
    assert flat.tolist() == [10, 10, 0, 9]


@given(buckets=st.integers(1, 5), order=st.lists(st.integers(0, 4), min_size=1, max_size=20), regular=st.booleans())
@example(buckets=3, order=[1, 1, 0, 0], regular=False)
@settings(max_examples=60, deadline=None)
def test_host_buffers_hold_what_was_written(buckets: int, order: list[int], regular: bool) -> None:
    sizes = [3 + bucket for bucket in range(buckets)]
    buffers = HostBuffers(sizes, torch.float32, torch.device("cpu"))
    expected = [torch.zeros(size) for size in sizes]
    turns = [turn % buckets for turn in range(12)] if regular else [turn % buckets for turn in order]
    on_device = set()
    for number, bucket in enumerate([*turns, *range(buckets)]):
        buffer = buffers.open(bucket)
        on_device.add(buffer.data_ptr())
        assert torch.equal(buffer, expected[bucket])
        buffer += number + 1
        expected[bucket] += number + 1
        buffers.close(bucket)
    assert len(on_device) <= 2
