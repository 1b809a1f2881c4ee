"""What operations are taken to do, checked by hand on small shapes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backbeat.cost.roofline import DEVICES, OperatorWork, Roofline  # noqa: E402
from backbeat.measure.model.operator_work import work_of  # noqa: E402


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, OperatorWork] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work[func._schema.name] = work_of(func, args, kwargs or {}, result)
        return result


def seen(call: Any) -> dict[str, OperatorWork]:
    with Seen() as mode:
        call()
    return mode.work


def convolution(groups: int = 1, channels_last: bool = False, dtype: Any = None) -> dict[str, OperatorWork]:
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False, dtype=dtype)
    images = torch.randn(2, 8, 4, 4, dtype=dtype)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    images.requires_grad_()
    return seen(lambda: layer(images).square().sum().backward())


@pytest.mark.parametrize("groups", [1, 8])
def test_convolutions_count_both_gradients_and_know_groups(groups: int) -> None:
    found = convolution(groups)
    flops = 2 * 2 * 4 * 4 * 8 * (8 // groups) * 9
    forward, backward = found["aten::convolution"], found["aten::convolution_backward"]
    assert (forward.flops, backward.flops) == (flops, 2 * flops)
    assert (forward.kernels, backward.kernels) == (1, 2)
    image, weight = 2 * 8 * 16 * 4, 8 * (8 // groups) * 9 * 4
    assert forward.bytes == 2 * image + weight
    assert backward.bytes == 4 * image + 2 * weight
    assert forward.tensor_cores is (groups == 1)


def test_channels_first_convolutions_are_turned_round_in_16_bits_only() -> None:
    first, last = convolution()["aten::convolution"], convolution(channels_last=True)["aten::convolution"]
    assert first.layout_bytes == 2 * 2 * (2 * 8 * 16 * 4)
    assert last.layout_bytes == 0
    roof = Roofline(DEVICES["h100"], "tf32")
    assert roof.seconds(first) == roof.seconds(last)
    half = convolution(dtype=torch.bfloat16)["aten::convolution"]
    half_last = convolution(channels_last=True, dtype=torch.bfloat16)["aten::convolution"]
    assert roof.seconds(half) > roof.seconds(half_last)


@pytest.mark.parametrize(("columns", "aligned"), [(8, True), (7, False)])
def test_products_with_odd_rows_are_slower(columns: int, aligned: bool) -> None:
    found = seen(lambda: torch.randn(4, 8) @ torch.randn(8, columns))["aten::mm"]
    assert found.flops == 2 * 4 * 8 * columns
    assert found.aligned is aligned
    roof = Roofline(DEVICES["h100"], "tf32")
    large = OperatorWork(1e12, 1e6, half=True, aligned=aligned)
    assert (roof.seconds(large) > roof.seconds(OperatorWork(1e12, 1e6, half=True))) is not aligned


def test_views_and_allocations_are_free_and_lookups_read_what_they_return() -> None:
    table = torch.randn(1000, 4)
    found = seen(lambda: torch.nn.functional.embedding(torch.tensor([1, 2, 3]), table).view(-1).expand(2, -1))
    assert found["aten::view"] == found["aten::expand"] == OperatorWork(0, 0, False)
    assert found["aten::embedding"].bytes == 2 * 3 * 4 * 4


def test_batch_norm_reads_its_input_twice() -> None:
    layer = torch.nn.BatchNorm2d(8)
    images = torch.randn(2, 8, 4, 4)
    (found,) = (work for name, work in seen(lambda: layer(images)).items() if "batch_norm" in name)
    assert found.kernels == 2
    assert found.bytes >= 3 * 2 * 8 * 16 * 4
