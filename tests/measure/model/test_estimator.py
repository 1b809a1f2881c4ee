"""Chains of memory-bound operators as a compiler makes one kernel of them."""

from __future__ import annotations

import torch

from backbeat.cost.operators import Product, Traffic
from backbeat.measure.model.estimator import Fusion

KB = 1024
PRODUCT = Product("bf16", 64, 64, 64)


def tensor(elements: int = 256) -> torch.Tensor:
    return torch.empty(elements)


def pointwise() -> tuple[Traffic, ...]:
    return (Traffic("pointwise", 1),)


def test_a_chain_reads_what_comes_from_outside_once_and_writes_its_last_result() -> None:
    fusion, x, y, first, second = Fusion(), tensor(), tensor(), tensor(), tensor()
    assert fusion.add(pointwise(), [x, y], [first]) == ()
    assert fusion.add(pointwise(), [first, x], [second]) == ()
    assert fusion.flush() == (Traffic("pointwise", 3 * KB),)
    assert fusion.flush() == ()


def test_a_product_ends_the_chain_and_has_what_it_reads_written() -> None:
    fusion, x, first, second = Fusion(), tensor(), tensor(), tensor()
    fusion.add(pointwise(), [x], [first])
    fusion.add(pointwise(), [first], [second])
    assert fusion.add((PRODUCT,), [second.view(16, 16), x], [tensor()]) == (Traffic("pointwise", 2 * KB), PRODUCT)
    assert fusion.add((PRODUCT,), [first], [tensor()]) == (Traffic("pointwise", KB), PRODUCT)
    assert fusion.add((PRODUCT,), [first], [tensor()]) == (PRODUCT,)


def test_another_iteration_space_begins_another_chain() -> None:
    fusion, x, large = Fusion(), tensor(), tensor(1024)
    fusion.add(pointwise(), [x], [tensor()])
    assert fusion.add(pointwise(), [large], [tensor(1024)]) == (Traffic("pointwise", 2 * KB),)
    assert fusion.flush() == (Traffic("pointwise", 8 * KB),)


def test_a_smaller_operator_on_what_the_chain_made_stays_in_it() -> None:
    fusion, x, mean, root = Fusion(), tensor(), tensor(1), tensor(1)
    fusion.add((Traffic("sum_columns", 1),), [x], [mean])
    assert fusion.add(pointwise(), [mean], [root]) == ()
    assert fusion.add(pointwise(), [x, root], [tensor()]) == ()
    assert fusion.flush() == (Traffic("pointwise", 2 * KB),)


def test_odd_products_are_padded() -> None:
    copies, product = Fusion().add((Product("bf16", 64, 33, 64, alignment=2),), [tensor()], [tensor()])
    assert product == Product("bf16", 64, 33, 64)
    assert copies == Traffic("strided", 2 * 2 * (64 * 64 + 64 * 33), 2)
