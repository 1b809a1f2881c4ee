"""What operations are taken to do, checked by hand on small shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.cost.operators import Attention, Convolution, Product, Traffic, in_fp8
from backbeat.measure.model.operator_work import work_of


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work[func._schema.name.removeprefix("aten::")] = work_of(func, args, kwargs or {}, result, "tf32")
        return result


def seen(call: Any) -> dict[str, tuple[Any, ...]]:
    with Seen() as mode:
        call()
    return mode.work


def convolution(groups: int = 1, channels_last: bool = False, bias: bool = False) -> dict[str, tuple[Any, ...]]:
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=bias)
    images = torch.randn(2, 8, 4, 4)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    images.requires_grad_()
    return seen(lambda: layer(images).square().sum().backward())


@pytest.mark.parametrize("groups", [1, 8])
def test_a_convolution_has_a_kernel_for_itself_and_one_for_each_gradient(groups: int) -> None:
    found = convolution(groups)
    (forward,), backward = found["convolution"], found["convolution_backward"]
    assert [work.direction for work in (forward, *backward)] == ["forward", "input", "weight"]
    image, weight = 2 * 8 * 16 * 4, 8 * (8 // groups) * 9 * 4
    for work in (forward, *backward):
        assert isinstance(work, Convolution)
        assert work.flops == 2 * 2 * 4 * 4 * 8 * (8 // groups) * 9
        assert work.bytes == 2 * image + weight
        assert not work.channels_last
    assert convolution(groups, channels_last=True)["convolution"][0].channels_last


def test_a_bias_of_a_convolution_is_a_kernel_of_its_own() -> None:
    found = convolution(bias=True)
    assert found["convolution"][-1] == Traffic("strided", 2 * 2 * 8 * 16 * 4)
    assert found["convolution_backward"][-1] == Traffic("strided", (2 * 8 * 16 + 8) * 4)


def test_a_few_rows_are_added_up_and_many_are_summed() -> None:
    few, many = torch.randn(4, 1000), torch.randn(1000, 4)
    assert seen(lambda: few.sum(0))["sum"] == (Traffic("strided", 5 * 4000),)
    assert seen(lambda: many.sum(0))["sum"] == (Traffic("sum_rows", 4 * 4000, 4, (1000, 4)),)
    assert seen(lambda: many.sum(1))["sum"][0].kind == "sum_columns"


def test_a_transposed_convolution_is_the_gradient_of_one() -> None:
    layer = torch.nn.ConvTranspose2d(4, 8, 2, stride=2, bias=False)
    found = seen(lambda: layer(torch.randn(2, 4, 3, 3, requires_grad=True)).sum().backward())
    (forward,), backward = found["convolution"], found["convolution_backward"]
    assert [work.direction for work in (forward, *backward)] == ["input", "forward", "weight"]
    assert {work.flops for work in (forward, *backward)} == {2 * 2 * 9 * 4 * 8 * 4}


@pytest.mark.parametrize(("columns", "alignment"), [(8, 16), (7, 4)])
def test_products_know_their_transposition_and_alignment(columns: int, alignment: int) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(columns, 8, requires_grad=True)
    found = seen(lambda: x @ weight.t())["mm"]
    assert found == (Product("tf32", 4, columns, 8, transposition="nt", alignment=alignment),)
    found = seen(lambda: torch.randn(4, 8) @ torch.randn(8, columns))["mm"]
    assert found == (Product("tf32", 4, columns, 8, transposition="nn", alignment=alignment),)
    assert seen(lambda: torch.randn(8, 4).t() @ torch.randn(8, 8))["mm"][0].transposition == "tn"


def test_batched_products_and_attention() -> None:
    found = seen(lambda: torch.bmm(torch.randn(3, 4, 8), torch.randn(3, 8, 16)))["bmm"]
    assert found == (Product("tf32", 4, 16, 8, transposition="nn", batch=3),)
    query = torch.randn(2, 3, 16, 8)
    (found,) = (
        works
        for name, works in seen(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        ).items()
        if "attention" in name
    )
    assert found == (Attention("tf32", 6, 16, 16, 8, "causal"),)


def test_views_and_allocations_are_free_and_lookups_read_what_they_return() -> None:
    table = torch.randn(1000, 4)
    found = seen(lambda: torch.nn.functional.embedding(torch.tensor([1, 2, 3]), table).view(-1).expand(2, -1))
    assert found["view"] == found["expand"] == ()
    assert found["embedding"] == (Traffic("strided", 2 * 3 * 4 * 4),)
    assert seen(lambda: torch.randn(2, 3, 4) @ torch.randn(4, 5))["_unsafe_view"] == ()


def test_traffic_counts_each_tensor_once_and_what_is_written_in_place_twice() -> None:
    x, y = torch.randn(256), torch.randn(256)
    assert seen(lambda: x + y)["add"] == (Traffic("pointwise", 3 * 1024),)
    assert seen(lambda: x * x)["mul"] == (Traffic("pointwise", 2 * 1024),)
    assert seen(lambda: x.add_(y))["add_"] == (Traffic("pointwise", 3 * 1024),)
    assert seen(lambda: x.copy_(y))["copy_"] == (Traffic("pointwise", 2 * 1024),)


def test_the_loss_reads_one_number_of_every_row() -> None:
    rows = torch.randn(4, 100).log_softmax(-1)
    found = seen(lambda: torch.nn.functional.nll_loss(rows, torch.zeros(4, dtype=torch.long)))["nll_loss_forward"]
    assert found[0].bytes < 100
    assert found[0].kind == "fill"


def test_norms_say_their_shape() -> None:
    images = torch.randn(2, 8, 4, 4)
    found = seen(lambda: torch.nn.BatchNorm2d(8)(images))
    ((batch_norm,),) = (works for name, works in found.items() if "batch_norm" in name)
    assert (batch_norm.kind, batch_norm.sizes) == ("batch_norm", (2, 8, 16))
    ((layer_norm,),) = (seen(lambda: torch.nn.LayerNorm(16)(torch.randn(3, 5, 16)))["native_layer_norm"],)
    assert (layer_norm.kind, layer_norm.sizes) == ("layer_norm", (15, 16))


def test_products_in_fp8_pay_for_casting_their_operands() -> None:
    product, cast = in_fp8((Product("bf16", 64, 32, 16, "nn"),))
    assert product == Product("fp8", 64, 32, 16, "nt")
    assert cast == Traffic("pointwise", 5 * (64 * 16 + 16 * 32), 2)
    odd = (Product("bf16", 64, 33, 16),)
    assert in_fp8(odd) == odd
