"""Seconds of one operation from its work and a GPU's peak rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.roofline import DEVICES, OperatorWork, Roofline, roofline


@given(
    st.sampled_from(sorted(DEVICES)),
    st.floats(0, 1e15),
    st.floats(1, 1e12),
    st.floats(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_more_work_never_takes_less_time(
    device: str, flops: float, size: float, factor: float, half: bool, convolution: bool
) -> None:
    roof = Roofline(DEVICES[device], "fp32")
    seconds = roof.seconds(OperatorWork(flops, size, half, convolution))
    assert seconds >= roof.efficiency.kernel_s
    assert roof.seconds(OperatorWork(flops * factor, size * factor, half, convolution)) >= seconds
    assert roof.seconds(OperatorWork(flops, size, True, convolution)) <= seconds


def test_a_custom_gpu_overrides_a_known_one() -> None:
    assert roofline("h100", "bf16", gbps=1000).device.bytes_per_s == 1e12
    assert roofline("h100", "bf16", tflops=100).flops(half=True) == 1e14


def test_the_optimizers_operations_are_one_stream_of_bytes() -> None:
    roof = Roofline(DEVICES["h200"], "bf16")
    assert roof.seconds(OperatorWork(0, 3.6e9, False, optimizer=True)) == pytest.approx(1e-3)
